"""A model as a table of its layers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from expmflow.nn.masked import Mask
from expmflow.transforms.amortized import Amortized
from expmflow.transforms.base import Chain, Inverse, Transform, layer_name, watching
from expmflow.transforms.conv1x1 import Conv1x1
from expmflow.transforms.flipped import Flipped
from expmflow.transforms.multiscale import Split

HEADER = ("layer", "kind", "output", "parameters", "closed form")
LISTS = (Chain, Amortized)
CONTAINERS = (*LISTS, Flipped, Inverse, Split)


def description(transform: Transform, x: Tensor, context: Any = None) -> str:
    """A line for each layer that `x` passes through, in that order, without containers."""
    shapes: dict[Transform, tuple[int, ...]] = {}

    def note(layer: Transform, received: Tensor, out: Tensor, logdet: Tensor) -> None:
        shapes[layer] = tuple(out.shape[1:])

    training = transform.training
    with torch.no_grad(), watching(note):
        transform.eval()(x, context)
    transform.train(training)
    lines = [HEADER]
    for name, layer, backwards in _layers(transform):
        directions = ", ".join(layer.closed_form)
        kind = f"{layer_name(layer)}{'⁻¹' if backwards else ''}"
        shape = " × ".join(map(str, shapes[layer]))
        lines.append((name, kind, shape, f"{count_parameters(layer):,}", directions or "none"))
    widths = [max(len(line[k]) for line in lines) for k in range(len(HEADER))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )


def count_parameters(module: nn.Module) -> int:
    """The number of parameters, without masked weights and the unused halves of triangular factors."""
    total = sum(p.numel() for p in module.parameters())
    for part in module.modules():
        if isinstance(part, Mask):
            total -= int((part.mask == 0).sum())
        if isinstance(part, Conv1x1) and part.parametrization == "lu":
            total -= part.channels * (part.channels + 1)
    return total


def empty_context(module: nn.Module) -> Tensor | None:
    """Zeros instead of a context, if a network in the model needs one."""
    wanted = max((getattr(part, "context_channels", 0) for part in module.modules()), default=0)
    return torch.zeros(1, wanted) if wanted else None


def _layers(transform: Transform, name: str = "", backwards: bool = False) -> Iterator[tuple[str, Transform, bool]]:
    """Names, layers, and whether each layer runs backwards."""
    if not isinstance(transform, CONTAINERS):
        yield name, transform, backwards
        return
    parts = list(transform.named_children()) if not isinstance(transform, LISTS) else []
    if isinstance(transform, LISTS):
        parts = [(str(k), layer) for k, layer in enumerate(transform)]
    if isinstance(transform, Split):  # the prior sees the second half first
        parts.reverse()
    turned = backwards != isinstance(transform, Inverse)
    for key, part in parts:
        if isinstance(part, Transform):
            yield from _layers(part, f"{name}.{key}" if name else key, turned)
