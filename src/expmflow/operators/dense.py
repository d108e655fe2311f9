"""A matrix as an operator."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor

from expmflow._transformed import exporting
from expmflow._validation import expect, expect_finite, expect_tensor
from expmflow.operators import matrices
from expmflow.operators.base import LinearOperator, Scalar


@final
class DenseOperator(LinearOperator):
    """x ↦ M x for vectors `x` of shape `(batch, d)`.

    Args:
        matrix: `(d, d)`, or `(batch, d, d)` for another matrix in each row of the batch.
        validate: check shapes and finiteness; layers that build an operator at each call turn it off.

    Example:
        >>> rotation = DenseOperator(torch.tensor([[0.0, -1.0], [1.0, 0.0]]))
        >>> rotation(torch.tensor([[1.0, 0.0]]))
        tensor([[0., 1.]])
        >>> rotation.norm_bound((2,)), rotation.log_norm_bound((2,))
        (tensor(1.0000, dtype=torch.float64), tensor(0., dtype=torch.float64))
    """

    def __init__(self, matrix: Tensor, *, validate: bool = True) -> None:
        super().__init__()
        if validate:
            expect_tensor(matrix, "the matrix")
            square = matrix.ndim in (2, 3) and matrix.shape[-1] == matrix.shape[-2]
            expect(square, "a matrix of shape (d, d) or (batch, d, d)", tuple(matrix.shape))
            expect_finite(matrix, "the matrix")
        self.matrix = matrix

    @property
    def parameters(self) -> tuple[Tensor, ...]:
        return (self.matrix,)

    @property
    def batch_size(self) -> int | None:
        return self.matrix.shape[0] if self.matrix.ndim == 3 else None

    def rebuild(self, parameters: Sequence[Tensor]) -> DenseOperator:
        return DenseOperator(*parameters, validate=False)

    def scale(self, factor: Scalar) -> DenseOperator:
        return DenseOperator(self.matrix * factor, validate=False)

    def apply(self, x: Tensor) -> Tensor:
        return _product(self.matrix, x)

    def apply_adjoint(self, y: Tensor) -> Tensor:
        return _product(self.matrix.mT, y)

    def parameter_vjp(self, x: Tensor, y: Tensor) -> tuple[Tensor | None, ...]:
        return (y.T @ x if self.batch_size is None else y.unsqueeze(-1) * x.unsqueeze(-2),)

    def check_event_shape(self, event_shape: tuple[int, ...]) -> None:
        size = self.matrix.shape[-1]
        expect(event_shape == (size,), f"vectors of shape (batch, {size})", f"events of shape {event_shape}")

    collapses = True

    def sum_length(self, event_shape: Sequence[int]) -> int:
        return int(self.matrix.shape[-1])

    def _absolute_norm_bound(self, event_shape: tuple[int, ...]) -> Tensor:
        return matrices.norm(self.matrix.double().abs())

    def collapsed(self, steps: int, terms: int, batch: int) -> DenseOperator | None:
        """Σ M^i / i! by blocks of powers (Paterson and Stockmeyer, 1973): about 2√T products instead of T.

        Only for a single step: all factors of a power of the rounded matrix share one rounding error, which accumulates
        faster than the plan allows.
        """
        block = max(1, math.isqrt(terms))
        products = (block - 1) + terms // block
        dear = not exporting() and products * self.matrix.shape[-1] + batch >= terms * batch
        if steps > 1 or dear or self.batch_size is not None:
            return None
        identity = torch.eye(self.matrix.shape[-1], dtype=self.matrix.dtype, device=self.matrix.device)
        powers = [identity, self.matrix]
        while len(powers) <= block:
            powers.append(powers[-1] @ powers[1])
        total = torch.zeros_like(identity)
        for start in range(terms - terms % block, -1, -block):
            # in units of 1/start!, which would underflow on its own
            first, count = math.factorial(start), min(block, terms + 1 - start)
            inner = sum(powers[j] * (first / math.factorial(start + j)) for j in range(count))
            total = total @ (powers[block] * (first / math.factorial(start + block))) + inner
        return DenseOperator(total, validate=False)

    def dense(self, event_shape: Sequence[int]) -> Tensor:
        self._event(event_shape)
        return self.matrix

    def _norm_bound(self, event_shape: tuple[int, ...]) -> Tensor:
        return matrices.norm(self.matrix.double())

    def _log_norm_bound(self, event_shape: tuple[int, ...]) -> Tensor:
        return matrices.log_norm(self.matrix.double())


def _product(matrix: Tensor, x: Tensor) -> Tensor:
    return x @ matrix.T if matrix.ndim == 2 else (matrix @ x.unsqueeze(-1)).squeeze(-1)
