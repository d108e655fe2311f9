"""The linear operator: its interface, and the algebra that all operators share."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from typing import ClassVar, final

import torch
from torch import Tensor

from expmflow._transformed import transformed
from expmflow._validation import expect, expect_alike, expect_finite, expect_tensor, expect_type

Scalar = float | Tensor

_ROUNDING_OF_BOUNDS = 1 + 1e-12  # keeps a bound valid after its rounding in float64


class LinearOperator(ABC):
    """A square linear map A on tensors of shape `(batch, *event)`.

    An operator is immutable. Its `parameters` are plain tensors owned by someone else, so gradients flow to the owner.
    What the operator computes about itself, such as its norm bound, is cached. `-A`, `c * A`, `A + B` and `A.adjoint()`
    are operators too.

    A new operator implements `parameters`, `rebuild`, `apply`, `apply_adjoint`, `parameter_vjp` and
    `check_event_shape`, and, where it can, `trace`, `_norm_bound` and `_log_norm_bound`.
    `expmflow.testing.check_operator` tests all of them.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[object, ...], Tensor] = {}
        self._known_of: tuple[list[int], list[Tensor]] | None = None

    # --- what each operator provides ---------------------------------------------------------------------------------

    @property
    @abstractmethod
    def parameters(self) -> tuple[Tensor, ...]:
        """The tensors that the operator depends on, in a fixed order."""

    @abstractmethod
    def rebuild(self, parameters: Sequence[Tensor]) -> LinearOperator:
        """The same operator around other parameters (of the same shapes), unchecked."""

    @abstractmethod
    def apply(self, x: Tensor) -> Tensor:
        """A x, unchecked: `x` has shape `(batch, *event)`."""

    @abstractmethod
    def apply_adjoint(self, y: Tensor) -> Tensor:
        """Aᵀ y, unchecked."""

    @abstractmethod
    def parameter_vjp(self, x: Tensor, y: Tensor) -> tuple[Tensor | None, ...]:
        """The gradient of ⟨y, A x⟩ in each of `parameters`."""

    @abstractmethod
    def check_event_shape(self, event_shape: tuple[int, ...]) -> None:
        """Raise `ValueError` unless the operator acts on events of this shape."""

    @property
    def borrowed(self) -> tuple[Tensor, ...]:
        """The `parameters` that others also hold and may overwrite, without tensors that the operator made itself."""
        return self.parameters

    @property
    def batch_size(self) -> int | None:
        """The batch size, if each row of a batch has an operator of its own; None if one operator serves all rows."""
        return None

    @property
    def traceable(self) -> bool:
        """Whether `torch.compile` can trace the adjoint product; it cannot where autograd computes it."""
        return True

    def scale(self, factor: Scalar) -> LinearOperator:
        """`factor`·A; override this in an operator that can fold the factor into its parameters."""
        return Scaled(self, factor)

    def multiples(self, factors: Sequence[float]) -> list[LinearOperator]:
        """`factor`·A for each factor, prepared together."""
        return [self.scale(factor) for factor in factors]

    def adjoint_product(self) -> Callable[[Tensor], Tensor]:
        """Aᵀ as a function, prepared for many products."""
        return self.apply_adjoint

    def collapsed(self, steps: int, terms: int, batch: int) -> LinearOperator | None:
        """The whole series as one operator if that costs less than applying the series to `batch` rows; else None."""
        return None

    def layout(self, x: Tensor) -> Tensor:
        """`x` in the memory layout in which repeated products are fastest; the values do not change."""
        return x

    def folded(self, event_shape: tuple[int, ...]) -> LinearOperator:
        """The same map for events of this shape only, without the parts that cancel or have no effect there."""
        return self

    def trace(self, event_shape: Sequence[int]) -> Tensor:
        """tr A, differentiable: a scalar, or shape `(batch,)` where the operator differs within the batch.

        Exact. This default takes `d` products with unit vectors; the operators of this package have closed forms.
        """
        return self.dense(event_shape).diagonal(dim1=-2, dim2=-1).sum(-1)

    collapses: ClassVar[bool] = False
    """Whether `collapsed` can return an operator."""

    def sum_length(self, event_shape: Sequence[int]) -> int | None:
        """How many numbers n are added, one after another, for one entry of A x; None if unknown.

        It bounds the rounding error of an entry, which is at most γ_n |A||x| with γ_n ≈ n u.
        """
        return None

    def adjoint_sum_length(self, event_shape: Sequence[int]) -> int | None:
        """The same for Aᵀ."""
        return self.sum_length(event_shape)

    def _absolute_norm_bound(self, event_shape: tuple[int, ...]) -> Tensor:
        """The Frobenius norm, which |A| shares with A, bounds ‖|A|‖."""
        return self.norm_bound(event_shape) * math.sqrt(math.prod(event_shape))

    def _norm_bound(self, event_shape: tuple[int, ...]) -> Tensor:
        raise ValueError(f"Expected a norm bound for {type(self).__name__}; got none: declare one, or pass terms=.")

    def _log_norm_bound(self, event_shape: tuple[int, ...]) -> Tensor:
        return self._norm_bound(event_shape)

    # --- what all operators share ------------------------------------------------------------------------------------

    @final
    def __call__(self, x: Tensor) -> Tensor:
        """A x for `x` of shape `(batch, *event)`."""
        self.check_input(x)
        return self.apply(x)

    @final
    def adjoint(self) -> LinearOperator:
        """Aᵀ, the operator with ⟨y, A x⟩ = ⟨Aᵀ y, x⟩."""
        return self.inner if isinstance(self, Adjoint) else Adjoint(self)

    @final
    def norm_bound(self, event_shape: Sequence[int]) -> Tensor:
        """An upper bound of the 2-norm ‖A‖ on events of this shape (float64 scalar, no gradient; cached)."""
        return self.remember("norm", event_shape, self._norm_bound) * _ROUNDING_OF_BOUNDS

    @final
    def log_norm_bound(self, event_shape: Sequence[int]) -> Tensor:
        """An upper bound of λmax((A + Aᵀ)/2), so that ‖exp(tA)‖ ≤ exp(tμ) for t ≥ 0 (float64 scalar; cached)."""
        return self.remember("log_norm", event_shape, self._log_norm_bound)

    @final
    def absolute_norm_bound(self, event_shape: Sequence[int]) -> Tensor:
        """An upper bound of ‖|A|‖, the norm of the absolute values, which scales rounding errors (float64; cached)."""
        return self.remember("absolute norm", event_shape, self._absolute_norm_bound) * _ROUNDING_OF_BOUNDS

    def dense(self, event_shape: Sequence[int]) -> Tensor:
        """The matrix of A, `(d, d)` or `(batch, d, d)` with d the size of an event: for tests and small events."""
        shape = self._event(event_shape)
        size = torch.Size(shape).numel()
        like = self.parameters[0] if self.parameters else torch.empty(0)
        units = torch.eye(size, dtype=like.dtype, device=like.device).reshape(size, *shape)
        if self.batch_size is None:
            return self.apply(units).reshape(size, size).T
        columns = [self.apply(unit.expand(self.batch_size, *shape)).flatten(1) for unit in units]
        return torch.stack(columns, dim=-1)

    def check_input(self, x: Tensor) -> None:
        """Raise unless `x` is a batch of events that this operator acts on."""
        expect_tensor(x, "the input")
        if self.parameters:
            expect_alike([("the operator", self.parameters[0]), ("the input", x)])
        expect(x.ndim >= 1, "an input of shape (batch, *event)", "a scalar")
        if self.batch_size is not None:
            expect(x.shape[0] == self.batch_size, f"a batch of {self.batch_size}, as the operator's", x.shape[0])
        self.check_event_shape(tuple(x.shape[1:]))

    def _event(self, event_shape: Sequence[int]) -> tuple[int, ...]:
        shape = tuple(event_shape)
        self.check_event_shape(shape)
        return shape

    def remember(
        self, name: Hashable, event_shape: Sequence[int], compute: Callable[[tuple[int, ...]], Tensor]
    ) -> Tensor:
        """`compute(event_shape)`, in float64 without gradient, cached until the parameters change."""
        shape = self._event(event_shape)
        key = (name, shape)
        if not self._unchanged():
            self._known = {}
        elif key in self._known:
            return self._known[key]
        for parameter in self.parameters:
            expect_finite(parameter, "the operator's parameters")
        with torch.no_grad():
            self._known[key] = compute(shape).to(torch.float64)
        return self._known[key]

    def _unchanged(self) -> bool:
        """Whether the parameters have stayed the same since this was last called.

        Someone may have written into them after construction. Their version counters reveal most writes, but not
        those of fused optimizers, through `.data`, through a numpy view, or in inference mode. So borrowed tensors are
        compared with a copy, entry by entry.
        """
        versions = [0 if p.is_inference() else p._version for p in self.parameters]
        borrowed = [p.detach() for p in self.borrowed if not transformed(p)]
        if self._known_of is not None and self._known_of[0] == versions:
            copies = self._known_of[1]
            if len(copies) == len(borrowed) and all(map(_equal, copies, borrowed)):
                return True
        self._known_of = versions, [p.clone() for p in borrowed]
        return False

    def __neg__(self) -> LinearOperator:
        return self.scale(-1.0)

    def __mul__(self, factor: Scalar) -> LinearOperator:
        expect_type(
            isinstance(factor, int | float | Tensor), "a number or a tensor as the factor", type(factor).__name__
        )
        if isinstance(factor, Tensor):
            expect(factor.ndim == 0, "a scalar as the factor", f"a tensor of shape {tuple(factor.shape)}")
        return self.scale(factor)

    __rmul__ = __mul__

    def __add__(self, other: LinearOperator) -> LinearOperator:
        expect_type(isinstance(other, LinearOperator), "an operator to add", type(other).__name__)
        return Sum(self, other)

    def __sub__(self, other: LinearOperator) -> LinearOperator:
        return self + (-other)


def _equal(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.device == b.device and torch.equal(a, b)


@final
class Adjoint(LinearOperator):
    """Aᵀ: the two products are swapped."""

    def __init__(self, inner: LinearOperator) -> None:
        super().__init__()
        self.inner = inner

    @property
    def parameters(self) -> tuple[Tensor, ...]:
        return self.inner.parameters

    @property
    def borrowed(self) -> tuple[Tensor, ...]:
        return self.inner.borrowed

    @property
    def batch_size(self) -> int | None:
        return self.inner.batch_size

    @property
    def traceable(self) -> bool:
        return self.inner.traceable

    def rebuild(self, parameters: Sequence[Tensor]) -> LinearOperator:
        return Adjoint(self.inner.rebuild(parameters))

    def apply(self, x: Tensor) -> Tensor:
        return self.inner.apply_adjoint(x)

    def apply_adjoint(self, y: Tensor) -> Tensor:
        return self.inner.apply(y)

    def parameter_vjp(self, x: Tensor, y: Tensor) -> tuple[Tensor | None, ...]:
        return self.inner.parameter_vjp(y, x)

    def check_event_shape(self, event_shape: tuple[int, ...]) -> None:
        self.inner.check_event_shape(event_shape)

    def check_input(self, x: Tensor) -> None:
        self.inner.check_input(x)

    def scale(self, factor: Scalar) -> LinearOperator:
        return Adjoint(self.inner.scale(factor))

    def layout(self, x: Tensor) -> Tensor:
        return self.inner.layout(x)

    def folded(self, event_shape: tuple[int, ...]) -> LinearOperator:
        inner = self.inner.folded(event_shape)
        return self if inner is self.inner else Adjoint(inner)

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
class Scaled(LinearOperator):
    """c·A for an operator that cannot fold c into its parameters; a tensor c becomes one more parameter."""

    def __init__(self, inner: LinearOperator, factor: Scalar) -> None:
        super().__init__()
        self.inner = inner
        self.factor = factor

    @property
    def parameters(self) -> tuple[Tensor, ...]:
        own = (self.factor,) if isinstance(self.factor, Tensor) else ()
        return (*self.inner.parameters, *own)

    @property
    def borrowed(self) -> tuple[Tensor, ...]:
        own = (self.factor,) if isinstance(self.factor, Tensor) else ()
        return (*self.inner.borrowed, *own)

    @property
    def batch_size(self) -> int | None:
        return self.inner.batch_size

    @property
    def traceable(self) -> bool:
        return self.inner.traceable

    def rebuild(self, parameters: Sequence[Tensor]) -> LinearOperator:
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

    def check_event_shape(self, event_shape: tuple[int, ...]) -> None:
        self.inner.check_event_shape(event_shape)

    def check_input(self, x: Tensor) -> None:
        self.inner.check_input(x)

    def scale(self, factor: Scalar) -> LinearOperator:
        return Scaled(self.inner, self.factor * factor)

    def layout(self, x: Tensor) -> Tensor:
        return self.inner.layout(x)

    def folded(self, event_shape: tuple[int, ...]) -> LinearOperator:
        inner = self.inner.folded(event_shape)
        return self if inner is self.inner else Scaled(inner, self.factor)

    def trace(self, event_shape: Sequence[int]) -> Tensor:
        return self.inner.trace(event_shape) * self.factor

    def sum_length(self, event_shape: Sequence[int]) -> int | None:
        return _one_more(self.inner.sum_length(event_shape))

    def adjoint_sum_length(self, event_shape: Sequence[int]) -> int | None:
        return _one_more(self.inner.adjoint_sum_length(event_shape))

    def _absolute_norm_bound(self, event_shape: tuple[int, ...]) -> Tensor:
        return self.inner.absolute_norm_bound(event_shape) * abs(self._factor())

    def _norm_bound(self, event_shape: tuple[int, ...]) -> Tensor:
        return self.inner.norm_bound(event_shape) * abs(self._factor())

    def _log_norm_bound(self, event_shape: tuple[int, ...]) -> Tensor:
        if self._factor() >= 0:
            return self.inner.log_norm_bound(event_shape) * self._factor()
        return self._norm_bound(event_shape)  # λmax(−S) = −λmin(S), which the inner operator does not bound

    def _factor(self) -> float:
        return float(self.factor.detach() if isinstance(self.factor, Tensor) else self.factor)


@final
class Sum(LinearOperator):
    """A + B; its bounds are sums of bounds (the triangle inequality)."""

    def __init__(self, first: LinearOperator, second: LinearOperator) -> None:
        super().__init__()
        sizes = {op.batch_size for op in (first, second)} - {None}
        expect(len(sizes) <= 1, "two operators of one batch size", f"{first.batch_size} and {second.batch_size}")
        if first.parameters and second.parameters:
            expect_alike([("the first operator", first.parameters[0]), ("the second", second.parameters[0])])
        self.first = first
        self.second = second

    @property
    def parameters(self) -> tuple[Tensor, ...]:
        return (*self.first.parameters, *self.second.parameters)

    @property
    def borrowed(self) -> tuple[Tensor, ...]:
        return (*self.first.borrowed, *self.second.borrowed)

    @property
    def batch_size(self) -> int | None:
        return self.second.batch_size if self.first.batch_size is None else self.first.batch_size

    @property
    def traceable(self) -> bool:
        return self.first.traceable and self.second.traceable

    def rebuild(self, parameters: Sequence[Tensor]) -> LinearOperator:
        split = len(self.first.parameters)
        return Sum(self.first.rebuild(parameters[:split]), self.second.rebuild(parameters[split:]))

    def apply(self, x: Tensor) -> Tensor:
        return self.first.apply(x) + self.second.apply(x)

    def apply_adjoint(self, y: Tensor) -> Tensor:
        return self.first.apply_adjoint(y) + self.second.apply_adjoint(y)

    def parameter_vjp(self, x: Tensor, y: Tensor) -> tuple[Tensor | None, ...]:
        return (*self.first.parameter_vjp(x, y), *self.second.parameter_vjp(x, y))

    def check_event_shape(self, event_shape: tuple[int, ...]) -> None:
        self.first.check_event_shape(event_shape)
        self.second.check_event_shape(event_shape)

    def check_input(self, x: Tensor) -> None:
        self.first.check_input(x)
        self.second.check_input(x)

    def scale(self, factor: Scalar) -> LinearOperator:
        return Sum(self.first.scale(factor), self.second.scale(factor))

    def layout(self, x: Tensor) -> Tensor:
        return self.first.layout(x)

    def folded(self, event_shape: tuple[int, ...]) -> LinearOperator:
        first, second = self.first.folded(event_shape), self.second.folded(event_shape)
        return self if first is self.first and second is self.second else Sum(first, second)

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
