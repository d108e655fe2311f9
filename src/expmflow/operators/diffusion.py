"""One step of a diffusion on a sparse graph."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import final

import torch
from torch import Tensor

from expmflow._validation import expect
from expmflow.operators.base import LinearOperator
from expmflow.operators.blocks import BlockedMatrix
from expmflow.operators.sparse import Pattern, SparseProduct


@final
class Diffusion(LinearOperator):
    """X ↦ S X + diag(s) X for `X` of shape `(N, columns)`, with S sparse: `X` is a single event, without a batch.

    Args:
        pattern: the positions of the entries of S.
        values: the entries of S.
        diagonal: `(N,)`, s; None for zero.
        symmetric: whether S is symmetric, to rounding.
    """

    def __init__(self, pattern: Pattern, values: Tensor, diagonal: Tensor | None, *, symmetric: bool) -> None:
        super().__init__()
        self.pattern = pattern
        self.values = values
        self.diagonal = diagonal
        self.symmetric = symmetric

    @property
    def parameters(self) -> tuple[Tensor, ...]:
        return (self.values,) if self.diagonal is None else (self.values, self.diagonal)

    @property
    def borrowed(self) -> tuple[Tensor, ...]:
        return ()  # every tensor is made for one call

    def rebuild(self, parameters: Sequence[Tensor]) -> Diffusion:
        diagonal = None if self.diagonal is None else parameters[1]
        return Diffusion(self.pattern, parameters[0], diagonal, symmetric=self.symmetric)

    def apply(self, x: Tensor) -> Tensor:
        product = SparseProduct.apply(self.pattern, self.values, x)
        return product if self.diagonal is None else product + self.diagonal.unsqueeze(-1) * x

    def apply_into(self, out: Tensor, x: Tensor, *, alpha: float = 1.0, beta: float = 1.0) -> Tensor:
        """`out` becomes β·out + α·(this operator applied to x), in place; no gradient."""
        self._matrix.add_to(out, x, alpha=alpha, beta=beta)
        return out if self.diagonal is None else out.addcmul_(self.diagonal.unsqueeze(-1), x, value=alpha)

    @cached_property
    def _matrix(self) -> BlockedMatrix:
        return self.pattern.matrix(self.values.detach())

    def apply_adjoint(self, y: Tensor) -> Tensor:
        if self.symmetric:
            return self.apply(y)
        values = self.values.index_select(0, self.pattern.order)
        return Diffusion(self.pattern.transposed, values, self.diagonal, symmetric=False).apply(y)

    def parameter_vjp(self, x: Tensor, y: Tensor) -> tuple[Tensor | None, ...]:
        values = self.pattern.values_vjp(x, y)
        return (values,) if self.diagonal is None else (values, torch.linalg.vecdot(x, y))

    def sum_length(self, event_shape: Sequence[int]) -> int:
        return self.pattern.depth + 1

    def check_event_shape(self, event_shape: tuple[int, ...]) -> None:
        fits = len(event_shape) == 1
        expect(fits, f"columns of {self.pattern.size} nodes", f"events of shape {event_shape}")
