"""Exponentials of linear maps as layers: z = exp(A) x, with logdet tr A and inverse exp(−A)."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, Literal, final

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from expmflow._transformed import transformed
from expmflow._validation import expect, expect_count, expect_one_of, expect_unexported, expect_untraced
from expmflow.nn.constraints import (
    PowerConstraint,
    SkewKernel,
    SkewMatrix,
    constrain,
    update_constraint,
)
from expmflow.nn.spectral import SpectralConstraint
from expmflow.numerics import SeriesPlan, expm_apply, plan_series
from expmflow.numerics.plan import check_tol
from expmflow.numerics.series import Gradient, apply_at
from expmflow.operators import ConvOperator, DenseOperator, LinearOperator
from expmflow.operators.padding import PADDINGS, Padding
from expmflow.transforms.base import Output, Transform, expanded
from expmflow.transforms.frozen import Frozen
from expmflow.transforms.shapes import expect_vectors

INITIAL_NORM = 1e-2  # near the identity, but far enough from it to learn at once
MARGIN = 1.02  # how far a tracked norm may lag behind the weights in training
MAX_PLANS = 64  # norms are rounded up to multiples of coeff over this
MIN_SHARE = 0.25  # a gradient needs one more term than the value, which matters if there are few terms


class Exponential(Transform):
    """The common part of the exponential layers: planning, freezing, and the two directions."""

    training_tol: float | None = None
    """The truncation error in training, where it may be larger; `tol` if None."""

    freezes: ClassVar[bool] = True
    """Whether the operator depends on the weights alone, so that its plan can be cached until they change."""

    def __init__(self, coeff: float | None, tol: float | None, terms: int | None, gradient: Gradient) -> None:
        super().__init__()
        expect(coeff is None or coeff > 0, "a positive coeff", coeff)
        expect(tol is None or terms is None, "either tol or terms", "both")
        check_tol(tol)
        if terms is not None:
            expect_count(terms, "terms")
        self.coeff = coeff
        self.tol = tol
        self.terms = terms
        self.gradient: Gradient = gradient
        self._frozen = Frozen()

    @abstractmethod
    def operator(self, context: Any = None) -> LinearOperator:
        """The operator A that the layer exponentiates, built from its parameters."""

    constrained: ClassVar[str | None] = None
    """The parameter whose norm is constrained."""

    def update(self, x: Tensor) -> None:
        """Update the norm constraint to the current weights: in training, before the operator is built."""
        if self.constrained is not None:
            update_constraint(self, self.constrained, tuple(x.shape[1:]))

    def _forward(self, x: Tensor, context: Any) -> Output:
        return self._exponential(x, 1.0, context)

    def _inverse(self, z: Tensor, context: Any) -> Output:
        return self._exponential(z, -1.0, context)

    def _exponential(self, x: Tensor, sign: float, context: Any) -> Output:
        expect_untraced("an exponential, whose terms follow from its weights")
        if self.training:
            self.update(x)
        fixed = self.freezes and not self.training and not torch.compiler.is_compiling()
        if fixed and not transformed(*self.parameters()):
            return self._frozen(self, x, sign)
        op = self.operator(context)
        plan = self.plan(x)
        if plan is None and torch.compiler.is_compiling():
            plan = _plan_for_operator(op.scale(sign), x, self.tol)
        return self._series(op, x, sign, plan), expanded(sign * op.trace(x.shape[1:]), x)

    def _series(self, op: LinearOperator, x: Tensor, t: float, plan: SeriesPlan | int | None) -> Tensor:
        tol = None if plan else self.tol
        if torch.compiler.is_compiling():  # nobody has checked the input or switched mixed precision off
            return expm_apply(op, x, t, tol=tol, terms=plan, gradient=self.gradient)
        return apply_at(op, x, t, tol, plan, self.gradient)

    def plan(self, x: Tensor) -> SeriesPlan | int | None:
        """The number of terms if no bound need be computed: given, or, in training, derived from the constraint."""
        if self.terms is not None:
            return self.terms
        if self.coeff is not None and (self.training or torch.compiler.is_compiling()):
            if self.training and self.training_tol is not None:
                return _plan_for_norm(self.coeff * self.used() * MARGIN, self.training_tol, x.dtype)
            return _plan_for_norm(self.coeff * MARGIN, self.tol, x.dtype)
        return None

    def used(self) -> float:
        """The norm of the last operator as a share of `coeff`, rounded up; 1 if it is not known."""
        if self.constrained is None or torch.compiler.is_compiling():
            return 1.0
        constraint = self.parametrizations[self.constrained][-1]  # type: ignore[index]
        share = constraint.used if isinstance(constraint, SpectralConstraint) else 1.0
        return max(MIN_SHARE, math.ceil(MAX_PLANS * share) / MAX_PLANS)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _plan_for_norm(norm: float, tol: float | None, dtype: torch.dtype) -> SeriesPlan:
    """A search over plain numbers, whose result a compiled graph stores."""
    return plan_series(norm, tol, dtype)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _plan_for_operator(op: LinearOperator, x: Tensor, tol: float | None) -> SeriesPlan:
    """The certified plan, which reads the weights: one break in a compiled graph."""
    expect_unexported("a number of terms that follows from the graph: give the layer `terms`")
    event_shape = x.shape[1:]
    return plan_series(op.norm_bound(event_shape), tol, x.dtype, log_norm=op.log_norm_bound(event_shape))


@final
class LinearExp(Exponential):
    """z = exp(M) x for vectors `(batch, features)`.

    Args:
        features: d.
        coeff: the largest norm of M.
        skew: M = W − Wᵀ, so that exp(M) is a rotation and logdet 0.
        tol: the truncation error (follows the dtype if None); alternatively `terms`, a fixed number of terms.
        gradient: `"autograd"` (faster) or `"recompute"` (memory does not grow with the terms).

    Example:
        >>> layer = T.LinearExp(4)
        >>> z, logdet = layer(torch.randn(2, 4))
        >>> x, _ = layer.inverse(z)
    """

    weight: Tensor
    constrained: ClassVar[str | None] = "weight"

    def __init__(
        self,
        features: int,
        coeff: float = 0.9,
        *,
        skew: bool = False,
        tol: float | None = None,
        terms: int | None = None,
        gradient: Gradient = "autograd",
    ) -> None:
        super().__init__(coeff, tol, terms, gradient)
        expect_count(features, "features")
        self.features = features
        self.skew = skew
        self.weight = nn.Parameter(torch.randn(features, features) * (INITIAL_NORM / (2 * features**0.5)))
        if skew:
            parametrize.register_parametrization(self, "weight", SkewMatrix())
        constrain(self, "weight", SpectralConstraint(self.weight, coeff))

    def operator(self, context: Any = None) -> DenseOperator:
        return DenseOperator(self.weight, validate=False)

    def check_event_shape(self, event_shape: tuple[int, ...]) -> None:
        expect_vectors(event_shape, self.features)


@final
class ConvExp(Exponential):
    """z = m ⋆ₑ x: the convolution exponential, for `(batch, channels, *n)` with 1, 2 or 3 spatial axes.

    Args:
        channels: C.
        kernel_size: odd; one number for a square kernel in `dims` dimensions, or one per axis.
        coeff: the largest norm of the convolution, at any image size.
        padding: `"zeros"`, `"circular"` or `"reflect"`.
        dilation, groups: as in the operator.
        dims: the number of spatial axes, if `kernel_size` is one number.
        skew: m = w − wᵀ, so that the exponential is an orthogonal convolution with logdet 0.
        norm: `"spectral"` tracks the norm over all frequencies, and does not depend on the image size; `"power"` is
            the paper's power iteration on the operator at the size of the last training batch.
        tol: the truncation error (follows the dtype if None); alternatively `terms`, a fixed number of terms.
        training_tol: the truncation error in training; `tol` if None. 1e-3 is far below the noise there and saves
            almost half of the products, and more while the tracked norm is still below `coeff`.
        gradient: `"autograd"` (faster) or `"recompute"` (memory does not grow with the terms).

    Example:
        >>> layer = T.ConvExp(3)
        >>> z, logdet = layer(torch.randn(2, 3, 8, 8))
        >>> x, _ = layer.inverse(z)
    """

    kernel: Tensor
    constrained: ClassVar[str | None] = "kernel"

    def __init__(
        self,
        channels: int,
        kernel_size: int | Sequence[int] = 3,
        coeff: float = 0.9,
        *,
        padding: Padding = "zeros",
        dilation: int | Sequence[int] = 1,
        groups: int = 1,
        dims: int = 2,
        skew: bool = False,
        norm: Literal["spectral", "power"] = "spectral",
        tol: float | None = None,
        training_tol: float | None = None,
        terms: int | None = None,
        gradient: Gradient = "autograd",
    ) -> None:
        super().__init__(coeff, tol, terms, gradient)
        check_tol(training_tol)
        self.training_tol = training_tol
        expect_count(channels, "channels")
        expect_count(groups, "groups")
        expect(channels % groups == 0, f"groups that divide {channels} channels", groups)
        expect_one_of(padding, PADDINGS, "padding")
        expect(not (skew and padding == "reflect"), "zeros or circular padding for a skew kernel", padding)
        expect(norm in ("spectral", "power"), "norm to be 'spectral' or 'power'", repr(norm))
        sizes = (kernel_size,) * dims if isinstance(kernel_size, int) else tuple(kernel_size)
        self.channels = channels
        self.skew = skew
        fan_in = channels // groups * torch.Size(sizes).numel()
        weight = torch.randn(channels, channels // groups, *sizes) * (INITIAL_NORM / (2 * fan_in**0.5))
        checked = ConvOperator(weight, padding, dilation=dilation, groups=groups)
        self._template = checked.rebuild([weight.to("meta")])
        self.kernel = nn.Parameter(weight)
        if skew:
            parametrize.register_parametrization(self, "kernel", SkewKernel(groups))
        if norm == "power":
            constrain(self, "kernel", PowerConstraint(self._template, coeff))
        else:  # reflection adds up to √2 per axis
            limit = coeff / 2 ** (sum(k > 1 for k in sizes) / 2) if padding == "reflect" else coeff
            constrain(self, "kernel", SpectralConstraint(self.kernel, limit, groups=groups))

    def operator(self, context: Any = None) -> ConvOperator:
        return self._template.rebuild([self.kernel])

    def check_event_shape(self, event_shape: tuple[int, ...]) -> None:
        self._template.check_event_shape(event_shape)
