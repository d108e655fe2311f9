"""Residual blocks against the convolutional Sylvester flow: what is kept for the backward pass, and times."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from expmflow import nn as N
from expmflow import transforms as T
from timing import medians, table

SHAPES = [(12, 16), (24, 8)]
BATCH = 8
HIDDEN = 528  # the paper's
TERMS = (2, 20)


class PlainSwish(nn.Module):
    """LipSwish by operations that autograd records one by one."""

    def __init__(self) -> None:
        super().__init__()
        self.sharpness = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        beta = F.softplus(self.sharpness)
        return x * torch.sigmoid(beta * x) / 1.1

    def lipschitz_bound(self) -> float:
        return 1.0


def plain_network(channels: int) -> nn.Module:
    first, last = nn.Conv2d(channels, HIDDEN, 3, padding=1), nn.Conv2d(HIDDEN, channels, 3, padding=1)
    return nn.Sequential(first, PlainSwish(), nn.Conv2d(HIDDEN, HIDDEN, 1), PlainSwish(), last)


def candidates(channels: int) -> dict[str, T.Transform]:
    return {
        "ConvSylvester": T.ConvSylvester(channels, HIDDEN),
        "ConvSylvester, without basis": T.ConvSylvester(channels, HIDDEN, use_basis=False),
        "TriangularConvSylvester": T.TriangularConvSylvester(channels, HIDDEN // channels),
        **{
            f"ResidualBlock, {terms} exact terms": T.ResidualBlock(
                N.LipschitzConvNet(channels, HIDDEN), training_terms=terms
            )
            for terms in TERMS
        },
        "ResidualBlock, activations by autograd": T.ResidualBlock(plain_network(channels)),
    }


def kept_per_image(layer: T.Transform, x: Tensor) -> float:
    """Bytes that a training pass keeps for the backward pass for each further image, beside what is kept of weights."""
    return (_kept(layer, x) - _kept(layer, x[: len(x) // 2])) / (len(x) - len(x) // 2)


def _kept(layer: T.Transform, x: Tensor) -> int:
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        _pass(layer, x)
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in kept}.values())


def _pass(layer: T.Transform, x: Tensor) -> Tensor:
    with T.keyed_draws(layer, "benchmark", range(len(x))):
        z, logdet = layer(x.detach().requires_grad_())
    return z.square().sum() / 2 - logdet.sum()


def _backward(layer: T.Transform, x: Tensor) -> Callable[[], None]:
    def run() -> None:
        layer.zero_grad(set_to_none=True)
        _pass(layer, x).backward()

    return run


def training_memory(rounds: int) -> str:
    """What a training pass keeps, and how long it takes with its backward pass, in units of ConvSylvester's."""
    header = ["layer"]
    rows = [[name] for name in candidates(4)]
    for channels, size in SHAPES:
        torch.manual_seed(0)
        x = torch.randn(BATCH, channels, size, size)
        made = candidates(channels)
        kept = {name: kept_per_image(layer, x) for name, layer in made.items()}
        times = medians({name: _backward(layer, x) for name, layer in made.items()}, rounds)
        header += [f"kept an image, {channels}×{size}×{size}", "relative", "forward+backward, relative"]
        for row in rows:
            own, base = kept[row[0]], kept["ConvSylvester"]
            time = times[row[0]] / times["ConvSylvester"]
            row += [f"{own / 2**20:.2f} MiB", f"{own / base:.2f}", f"{time:.2f}"]
    return table(header, rows)
