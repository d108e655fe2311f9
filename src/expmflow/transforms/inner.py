"""Requirements of Sylvester flows on their inner functions: a context that can be cut by rows, and Theorem 2."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from expmflow._validation import expect


def context_cutter(inner: nn.Module, context: Any, rows: int) -> Callable[[Any], Any] | None:
    """A function that returns the context of some of the rows; None if it is unknown which part belongs to which
    row."""
    if context is None:
        return lambda chosen: None
    if hasattr(inner, "context_rows"):
        return lambda chosen: inner.context_rows(context, chosen)  # type: ignore[operator]
    per_row = isinstance(context, Tensor) and context.ndim > 0 and context.shape[0] == rows
    return (lambda chosen: context[chosen]) if per_row else None


def check_inner(inner: nn.Module, u: Tensor, context: Any = None) -> None:
    """Raise `ValueError` unless the Jacobian at each row of `u` is triangular in some order, as Theorem 2 requires."""
    _, declared = inner(u, context)
    cut = context_cutter(inner, context, u.shape[0])
    for row in range(u.shape[0]):
        own = context if cut is None else cut(slice(row, row + 1))
        size = u[row].numel()
        jacobian = torch.autograd.functional.jacobian(
            lambda point, own=own: inner(point.reshape(1, *u.shape[1:]), own)[0].flatten(),
            u[row].flatten(),
        ).reshape(size, size)
        diagonal = jacobian.diagonal()
        expect(bool((diagonal > -1).all()), "a diagonal greater than -1", f"{float(diagonal.min()):g}")
        expect(
            _has_order(jacobian - torch.diag(diagonal)), "a Jacobian that is triangular in some order", "a cycle in it"
        )
        agree = torch.allclose(declared[row].flatten(), diagonal, atol=1e-4 if u.dtype == torch.float32 else 1e-8)
        expect(agree, "the declared diagonal to be the Jacobian's", "another")


def _has_order(off_diagonal: Tensor) -> bool:
    """Whether some order of the variables makes the matrix triangular: no variable depends on itself through others."""
    depends = off_diagonal != 0
    left = torch.ones(len(depends), dtype=torch.bool, device=depends.device)
    while bool(left.any()):
        free = left & ~(depends & left).any(1)
        if not bool(free.any()):
            return False
        left &= ~free
    return True
