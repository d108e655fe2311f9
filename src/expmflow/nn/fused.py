"""Parts of networks that run as one function with a gradient of its own: where they may, and what else stands in."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from expmflow._transformed import transformed


def must_record(*tensors: Tensor) -> bool:
    """Whether autograd has to see every operation: compilers, function transforms, mixed precision."""
    if torch.compiler.is_compiling():
        return True
    mixed = torch.is_autocast_enabled(tensors[0].device.type) or len({tensor.dtype for tensor in tensors}) > 1
    return mixed or transformed(*tensors)


def recorded_vjp(
    formula: Callable[..., Tensor], given: Sequence[Tensor], needed: Sequence[bool], grad: Tensor
) -> tuple[Tensor | None, ...]:
    """The gradients of a formula by operations that autograd knows, to be differentiated once more if need be."""
    again = torch.is_grad_enabled()
    with torch.enable_grad():
        leaves = given if again else [t.detach().requires_grad_(n) for t, n in zip(given, needed, strict=True)]
        wanted = [t for t, n in zip(leaves, needed, strict=True) if n]
        found = iter(torch.autograd.grad(formula(*leaves), wanted, grad, create_graph=again))
    return tuple(next(found) if n else None for n in needed)
