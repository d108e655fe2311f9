"""The linear operator: what each one provides, and what all of them share."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from typing import ClassVar, final

import torch
from torch import Tensor

from expmflow._identical import identical
from expmflow._transformed import transformed
from expmflow._validation import expect, expect_alike, expect_finite, expect_tensor, expect_type
from expmflow.operators import matrices

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
        self._cache: dict[tuple[object, ...], Tensor] = {}
        self._cached_for: tuple[list[int], list[Tensor]] | None = None

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
        from expmflow.operators.algebra import Scaled  # here, as it builds on this module

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
        return matrices.trace(self.dense(event_shape))

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
        from expmflow.operators.algebra import Adjoint

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
        if self._parameters_changed():
            self._cache = {}
        elif key in self._cache:
            return self._cache[key]
        for parameter in self.parameters:
            expect_finite(parameter, "the operator's parameters")
        with torch.no_grad():
            self._cache[key] = compute(shape).to(torch.float64)
        return self._cache[key]

    def _parameters_changed(self) -> bool:
        """Whether the parameters have changed since this was last called; True for the first call.

        Someone may have written into them after construction. Their version counters reveal most writes, but not
        those of fused optimizers, through `.data`, through a numpy view, or in inference mode. So borrowed tensors are
        compared with a copy, entry by entry.
        """
        versions = [0 if p.is_inference() else p._version for p in self.parameters]
        borrowed = [p.detach() for p in self.borrowed if not transformed(p)]
        if self._cached_for is not None and self._cached_for[0] == versions:
            copies = self._cached_for[1]
            if len(copies) == len(borrowed) and all(map(identical, copies, borrowed)):
                return False
        self._cached_for = versions, [p.clone() for p in borrowed]
        return True

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
        from expmflow.operators.algebra import Sum

        expect_type(isinstance(other, LinearOperator), "an operator to add", type(other).__name__)
        return Sum(self, other)

    def __sub__(self, other: LinearOperator) -> LinearOperator:
        return self + (-other)
