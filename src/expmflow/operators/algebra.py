"""Operators made of other operators: Aᵀ, c·A and A + B."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import final

from torch import Tensor

from expmflow._validation import expect, expect_alike
from expmflow.operators.base import LinearOperator, Scalar


class Derived(LinearOperator):
    """An operator made of `operands`; its parameters are theirs, and it acts on the events that all of them act on."""

    def __init__(self, *operands: LinearOperator) -> None:
        super().__init__()
        self.operands = operands

    @abstractmethod
    def with_operands(self, *operands: LinearOperator) -> LinearOperator:
        """The same operator, made of others."""

    @property
    def parameters(self) -> tuple[Tensor, ...]:
        return tuple(parameter for op in self.operands for parameter in op.parameters)

    @property
    def borrowed(self) -> tuple[Tensor, ...]:
        return tuple(parameter for op in self.operands for parameter in op.borrowed)

    @property
    def batch_size(self) -> int | None:
        return next((op.batch_size for op in self.operands if op.batch_size is not None), None)

    @property
    def traceable(self) -> bool:
        return all(op.traceable for op in self.operands)

    def rebuild(self, parameters: Sequence[Tensor]) -> LinearOperator:
        remaining = iter(parameters)
        return self.with_operands(*(op.rebuild([next(remaining) for _ in op.parameters]) for op in self.operands))

    def check_event_shape(self, event_shape: tuple[int, ...]) -> None:
        for op in self.operands:
            op.check_event_shape(event_shape)

    def check_input(self, x: Tensor) -> None:
        for op in self.operands:
            op.check_input(x)

    def layout(self, x: Tensor) -> Tensor:
        return self.operands[0].layout(x)

    def folded(self, event_shape: tuple[int, ...]) -> LinearOperator:
        folded = [op.folded(event_shape) for op in self.operands]
        same = all(new is old for new, old in zip(folded, self.operands, strict=True))
        return self if same else self.with_operands(*folded)


@final
class Adjoint(Derived):
    """Aᵀ: the two products are swapped."""

    def __init__(self, inner: LinearOperator) -> None:
        super().__init__(inner)
        self.inner = inner

    def with_operands(self, *operands: LinearOperator) -> Adjoint:
        return Adjoint(*operands)

    def apply(self, x: Tensor) -> Tensor:
        return self.inner.apply_adjoint(x)

    def apply_adjoint(self, y: Tensor) -> Tensor:
        return self.inner.apply(y)

    def parameter_vjp(self, x: Tensor, y: Tensor) -> tuple[Tensor | None, ...]:
        return self.inner.parameter_vjp(y, x)

    def scale(self, factor: Scalar) -> Adjoint:
        return Adjoint(self.inner.scale(factor))

    def trace(self, event_shape: Sequence[int]) -> Tensor:
        return self.inner.trace(event_shape)

    def sum_length(self, event_shape: Sequence[int]) -> int | None:
        return self.inner.adjoint_sum_length(event_shape)

    def adjoint_sum_length(self, event_shape: Sequence[int]) -> int | None:
        return self.inner.sum_length(event_shape)

    def _absolute_norm_bound(self, event_shape: tuple[int, ...]) -> Tensor:
        return self.inner.absolute_norm_bound(event_shape)

    def _norm_bound(self, event_shape: tuple[int, ...]) -> Tensor:
        return self.inner.norm_bound(event_shape)

    def _log_norm_bound(self, event_shape: tuple[int, ...]) -> Tensor:
        return self.inner.log_norm_bound(event_shape)


@final
class Scaled(Derived):
    """c·A for an operator that cannot fold c into its parameters; a tensor c becomes one more parameter."""

    def __init__(self, inner: LinearOperator, factor: Scalar) -> None:
        super().__init__(inner)
        self.inner = inner
        self.factor = factor

    def with_operands(self, *operands: LinearOperator) -> Scaled:
        (inner,) = operands
        return Scaled(inner, self.factor)

    @property
    def parameters(self) -> tuple[Tensor, ...]:
        return (*self.inner.parameters, *self._learned())

    @property
    def borrowed(self) -> tuple[Tensor, ...]:
        return (*self.inner.borrowed, *self._learned())

    def _learned(self) -> tuple[Tensor, ...]:
        return (self.factor,) if isinstance(self.factor, Tensor) else ()

    def rebuild(self, parameters: Sequence[Tensor]) -> Scaled:
        if isinstance(self.factor, Tensor):
            return Scaled(self.inner.rebuild(parameters[:-1]), parameters[-1])
        return Scaled(self.inner.rebuild(parameters), self.factor)

    def apply(self, x: Tensor) -> Tensor:
        return self.inner.apply(x) * self.factor

    def apply_adjoint(self, y: Tensor) -> Tensor:
        return self.inner.apply_adjoint(y) * self.factor

    def parameter_vjp(self, x: Tensor, y: Tensor) -> tuple[Tensor | None, ...]:
        inner = self.inner.parameter_vjp(x, y * self.factor)
        if isinstance(self.factor, Tensor):
            return (*inner, (y * self.inner.apply(x)).sum())
        return inner

    def scale(self, factor: Scalar) -> Scaled:
        return Scaled(self.inner, self.factor * factor)

    def trace(self, event_shape: Sequence[int]) -> Tensor:
        return self.inner.trace(event_shape) * self.factor

    def sum_length(self, event_shape: Sequence[int]) -> int | None:
        return _one_more(self.inner.sum_length(event_shape))

    def adjoint_sum_length(self, event_shape: Sequence[int]) -> int | None:
        return _one_more(self.inner.adjoint_sum_length(event_shape))

    def _absolute_norm_bound(self, event_shape: tuple[int, ...]) -> Tensor:
        return self.inner.absolute_norm_bound(event_shape) * abs(self._number())

    def _norm_bound(self, event_shape: tuple[int, ...]) -> Tensor:
        return self.inner.norm_bound(event_shape) * abs(self._number())

    def _log_norm_bound(self, event_shape: tuple[int, ...]) -> Tensor:
        if self._number() >= 0:
            return self.inner.log_norm_bound(event_shape) * self._number()
        return self._norm_bound(event_shape)  # λmax(−S) = −λmin(S), which the inner operator does not bound

    def _number(self) -> float:
        return float(self.factor.detach() if isinstance(self.factor, Tensor) else self.factor)


@final
class Sum(Derived):
    """A + B; its bounds are sums of bounds (the triangle inequality)."""

    def __init__(self, first: LinearOperator, second: LinearOperator) -> None:
        sizes = {op.batch_size for op in (first, second)} - {None}
        expect(len(sizes) <= 1, "two operators of one batch size", f"{first.batch_size} and {second.batch_size}")
        if first.parameters and second.parameters:
            expect_alike([("the first operator", first.parameters[0]), ("the second", second.parameters[0])])
        super().__init__(first, second)
        self.first = first
        self.second = second

    def with_operands(self, *operands: LinearOperator) -> Sum:
        return Sum(*operands)

    def apply(self, x: Tensor) -> Tensor:
        return self.first.apply(x) + self.second.apply(x)

    def apply_adjoint(self, y: Tensor) -> Tensor:
        return self.first.apply_adjoint(y) + self.second.apply_adjoint(y)

    def parameter_vjp(self, x: Tensor, y: Tensor) -> tuple[Tensor | None, ...]:
        return (*self.first.parameter_vjp(x, y), *self.second.parameter_vjp(x, y))

    def scale(self, factor: Scalar) -> Sum:
        return Sum(self.first.scale(factor), self.second.scale(factor))

    def trace(self, event_shape: Sequence[int]) -> Tensor:
        return self.first.trace(event_shape) + self.second.trace(event_shape)

    def sum_length(self, event_shape: Sequence[int]) -> int | None:
        return _one_more(self.first.sum_length(event_shape), self.second.sum_length(event_shape))

    def adjoint_sum_length(self, event_shape: Sequence[int]) -> int | None:
        return _one_more(self.first.adjoint_sum_length(event_shape), self.second.adjoint_sum_length(event_shape))

    def _absolute_norm_bound(self, event_shape: tuple[int, ...]) -> Tensor:
        return self.first.absolute_norm_bound(event_shape) + self.second.absolute_norm_bound(event_shape)

    def _norm_bound(self, event_shape: tuple[int, ...]) -> Tensor:
        return self.first.norm_bound(event_shape) + self.second.norm_bound(event_shape)

    def _log_norm_bound(self, event_shape: tuple[int, ...]) -> Tensor:
        return self.first.log_norm_bound(event_shape) + self.second.log_norm_bound(event_shape)


def _one_more(*lengths: int | None) -> int | None:
    """The longest of these sums plus one rounding; None if one of them is unknown."""
    known = [length for length in lengths if length is not None]
    return max(known) + 1 if len(known) == len(lengths) else None
