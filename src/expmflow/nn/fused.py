"""Parts of networks that run as one function with its own gradient: when they may, and their fallback."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from expmflow._transformed import transformed


def must_record(*tensors: Tensor) -> bool:
    """Whether autograd has to see every operation: for compilers, function transforms, mixed precision."""
    if torch.compiler.is_compiling():
        return True
    mixed = torch.is_autocast_enabled(tensors[0].device.type) or len({tensor.dtype for tensor in tensors}) > 1
    return mixed or transformed(*tensors)


def recorded_vjp(
    formula: Callable[..., Tensor], given: Sequence[Tensor], needed: Sequence[bool], grad: Tensor
) -> tuple[Tensor | None, ...]:
    """The gradients of a formula in operations that autograd knows, which can be differentiated again."""
    again = torch.is_grad_enabled()
    with torch.enable_grad():
        leaves = given if again else [t.detach().requires_grad_(n) for t, n in zip(given, needed, strict=True)]
        wanted = [t for t, n in zip(leaves, needed, strict=True) if n]
        gradients = iter(torch.autograd.grad(formula(*leaves), wanted, grad, create_graph=again))
    return tuple(next(gradients) if n else None for n in needed)
