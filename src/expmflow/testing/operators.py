"""Tests for your own operators: each states one fact that the rest of the library relies on.

A failure is an `AssertionError` that names the fact, the difference, and how much rounding would explain.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from expmflow._validation import expect_count
from expmflow.numerics import certify, expm_apply, plan_series
from expmflow.numerics.plan import check_tol, default_tol
from expmflow.operators import LinearOperator

__all__ = ["check_operator"]

_ROUNDINGS = 100  # how many spacings of the dtype count as rounding
_REFERENCE = 10 * _ROUNDINGS * torch.finfo(torch.float64).eps  # the rounding error of the reference
_LARGEST_NORM = 10.0  # beyond it the exponential is compared at a smaller t, because the reference would lose digits
_TERMS = 24  # for operators without a norm bound, at norm 1: 1/25! is below every spacing


def check_operator(op: LinearOperator, event_shape: Sequence[int], *, batch: int = 2, tol: float | None = None) -> None:
    """Raise `AssertionError` unless `op` meets the contract of a `LinearOperator` on events of this shape.

    It is compared with its matrix: linearity, `dense`, the adjoint ⟨y, A x⟩ = ⟨Aᵀ y, x⟩, `trace`, `norm_bound` ≥ σmax,
    `log_norm_bound` ≥ λmax((A + Aᵀ)/2), `parameter_vjp` against autograd, `-A`, `c·A`, `A + B`, the exponential against
    `torch.matrix_exp` within tol·e^{max(μ, 0)}·‖x‖, its two gradients, and its inverse by negation. On constant and
    alternating events, the exponential must stay within the proven bound of `certify`. An operator without a norm bound
    is exponentiated with a fixed number of terms.

    Args:
        op: the operator; its parameters need no gradient. One without parameters is tested in torch's default dtype.
        event_shape: the shape of one event, without the batch; d entries.
        batch: the number of random events (an operator that differs within the batch has its own).
        tol: the relative error that counts as rounding; 100 spacings of the dtype if None.

    Cost:
        About d products and a dense decomposition of order d: choose small events.

    Example:
        >>> shift = ef.FunctionOperator(lambda x: x.roll(1, dims=-1), norm_bound=1.0, trace=0.0)
        >>> check_operator(shift, (5,))
        >>> check_operator(ef.FunctionOperator(shift.fn, norm_bound=0.5), (5,))
        Traceback (most recent call last):
        AssertionError: Expected norm_bound ≥ σmax of the operator; got 0.5 < 1.
    """
    expect_count(batch, "batch")
    check_tol(tol)
    op.check_event_shape(tuple(event_shape))
    dtype = _like(op).dtype
    subject = _Subject(op, tuple(event_shape), batch, _ROUNDINGS * torch.finfo(dtype).eps if tol is None else tol)
    _check_products(subject)
    _check_adjoint(subject)
    _check_trace(subject)
    _check_bounds(subject)
    _check_parameter_vjp(subject)
    _check_algebra(subject)
    _check_exponential(subject)
    _check_gradients(subject)


@dataclass(frozen=True)
class _Subject:
    """An operator, its matrix from unit vectors, and random events."""

    op: LinearOperator
    event: tuple[int, ...]
    batch: int
    tol: float
    name: str = "the operator"

    def __post_init__(self) -> None:
        if self.op.batch_size is not None:
            object.__setattr__(self, "batch", self.op.batch_size)

    @cached_property
    def matrix(self) -> Tensor:
        """`(d, d)` or `(batch, d, d)` in float64: column j is the operator applied to the j-th unit vector."""
        size = math.prod(self.event)
        units = torch.eye(size, dtype=_like(self.op).dtype, device=_like(self.op).device).reshape(size, *self.event)
        with torch.no_grad():
            if self.op.batch_size is None:
                return self.op(units).reshape(size, size).T.double()
            columns = [self.op(u.expand(self.batch, *self.event).clone()).reshape(self.batch, size) for u in units]
            return torch.stack(columns, dim=-1).double()

    @cached_property
    def norm(self) -> float:
        """σmax."""
        return float(torch.linalg.matrix_norm(self.matrix, ord=2).amax()) if self.matrix.numel() else 0.0

    @cached_property
    def log_norm(self) -> float:
        """λmax of the symmetric part."""
        symmetric = (self.matrix + self.matrix.mT) / 2
        return float(torch.linalg.eigvalsh(symmetric).amax()) if self.matrix.numel() else 0.0

    @property
    def bounded(self) -> bool:
        """Whether the operator has a norm bound."""
        try:
            self.op.norm_bound(self.event)
        except ValueError as error:
            if not str(error).startswith("Expected a norm bound"):
                raise
            return False
        return True

    def events(self, seed: int) -> Tensor:
        """`(batch, *event)` standard normal entries."""
        like = _like(self.op)
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(self.batch, *self.event, generator=generator, dtype=torch.float64, device="cpu").to(like)

    def product(self, x: Tensor) -> Tensor:
        """The matrix times events, in float64."""
        return _matmul(self.matrix, x)

    def variant(self, op: LinearOperator, name: str) -> _Subject:
        """The same tests for an operator derived from this one."""
        return _Subject(op, self.event, self.batch, self.tol, name)


def _check_products(s: _Subject) -> None:
    """The product is linear, keeps the input's shape, equals `dense`, and is independent of memory layout and batch."""
    x, y = s.events(1), s.events(2)
    with torch.no_grad():
        out = s.op(x)
        _expect(out.shape == x.shape, f"{s.name} to keep the shape {tuple(x.shape)}", tuple(out.shape))
        _expect(out.dtype == x.dtype, f"{s.name} to keep {x.dtype}", out.dtype)
        scale = s.norm * _norm(x)
        _agree(s.op(2 * x - 3 * y), 2 * out - 3 * s.op(y), 9 * scale, s.tol, f"{s.name} to be linear")
        _agree(out, s.product(x), scale, s.tol, f"{s.name} to be a product with its matrix, for each row of the batch")
        dense = s.op.dense(s.event)
        _expect(dense.shape == s.matrix.shape, f"dense of shape {tuple(s.matrix.shape)}", tuple(dense.shape))
        _agree(dense, s.matrix, s.norm, s.tol, f"dense to be the matrix of {s.name}")
        _agree(s.op.layout(x), x, 0.0, 0.0, f"layout to leave the values alone in {s.name}")
        if s.op.batch_size is None:
            empty = s.op(x[:0])
            _expect(empty.shape == x[:0].shape, "an empty batch to stay empty", tuple(empty.shape))


def _check_adjoint(s: _Subject) -> None:
    x, y = s.events(3), s.events(4)
    with torch.no_grad():
        left, right = _inner(y, s.op(x)), _inner(s.op.adjoint()(y), x)
    _agree(left, right, s.norm * _norm(x) * _norm(y), s.tol, f"⟨y, A x⟩ = ⟨Aᵀ y, x⟩ in {s.name}")


def _check_trace(s: _Subject) -> None:
    trace = s.op.trace(s.event).detach()
    expected = s.matrix.diagonal(dim1=-2, dim2=-1).sum(-1)
    _expect(trace.shape == expected.shape, f"a trace of shape {tuple(expected.shape)}", tuple(trace.shape))
    _agree(trace, expected, s.norm * s.matrix.shape[-1], s.tol, f"trace to be the trace of the matrix of {s.name}")


def _check_bounds(s: _Subject) -> None:
    if not s.bounded:
        return
    norm, log_norm = s.op.norm_bound(s.event), s.op.log_norm_bound(s.event)
    for name, bound in (("norm_bound", norm), ("log_norm_bound", log_norm)):
        _expect(bound.shape == (), f"{name} to be a scalar", f"shape {tuple(bound.shape)}")
    slack = s.tol * s.norm
    _expect(float(norm) >= s.norm - slack, f"norm_bound ≥ σmax of {s.name}", f"{float(norm):.6g} < {s.norm:.6g}")
    _expect(
        float(log_norm) >= s.log_norm - slack,
        f"log_norm_bound ≥ λmax of the symmetric part of {s.name}",
        f"{float(log_norm):.6g} < {s.log_norm:.6g}",
    )


def _check_parameter_vjp(s: _Subject) -> None:
    """`parameter_vjp` agrees with autograd; `rebuild` around the same parameters gives the same operator."""
    x, y = s.events(5), s.events(6)
    twin = s.op.rebuild([p if p.requires_grad else p.detach().requires_grad_() for p in s.op.parameters])
    out = twin.apply(x)
    _agree(out, s.product(x), s.norm * _norm(x), s.tol, f"rebuild to give {s.name} again")
    needed = [p for p in twin.parameters if p.requires_grad]
    if not needed:
        return
    expected = iter(_autograd(out, needed, y))
    grads = twin.parameter_vjp(x, y)
    _expect(len(grads) == len(twin.parameters), f"{len(twin.parameters)} gradients from parameter_vjp", len(grads))
    for i, (parameter, grad) in enumerate(zip(twin.parameters, grads, strict=True)):
        if not parameter.requires_grad:
            continue
        value = next(expected)
        got = torch.zeros_like(parameter) if grad is None else grad
        _expect(got.shape == parameter.shape, f"a gradient of shape {tuple(parameter.shape)}", tuple(got.shape))
        scale = max(float(_norm(value)), float(_norm(x) * _norm(y)))
        _agree(got, value, scale, s.tol, f"parameter_vjp of parameter {i} to be autograd's in {s.name}")


def _check_algebra(s: _Subject) -> None:
    """−A, c·A, A + B and Aᵀ are operators that meet the whole contract."""
    x, half = s.events(7), torch.tensor(0.5, dtype=_like(s.op).dtype, device=_like(s.op).device)
    variants = {
        "its negation": (-s.op, -s.matrix),
        "its half": (0.5 * s.op, 0.5 * s.matrix),
        "its half by a tensor": (half * s.op, 0.5 * s.matrix),
        "its sum with its half": (s.op + 0.5 * s.op, 1.5 * s.matrix),
        "its difference with its half": (s.op - 0.5 * s.op, 0.5 * s.matrix),
        "its adjoint": (s.op.adjoint(), s.matrix.mT),
    }
    for name, (op, matrix) in variants.items():
        variant = s.variant(op, name)
        with torch.no_grad():
            _agree(op(x), _matmul(matrix, x), s.norm * _norm(x), s.tol, f"{name} to be that of the matrix")
        _check_adjoint(variant)
        _check_trace(variant)
        _check_bounds(variant)


def _check_exponential(s: _Subject) -> None:
    """exp(tA)x has the promised accuracy, and exp(−tA) inverts it."""
    x = s.events(8)
    with torch.no_grad():
        if not s.bounded:
            t = 1 / max(s.norm, 1.0)
            z = expm_apply(s.op, x, t, terms=_TERMS)
            back = expm_apply(-s.op, z, t, terms=_TERMS)
            allowed, allowed_back = s.tol * math.e, s.tol * math.e**2
        else:
            t = min(1.0, _LARGEST_NORM / max(float(s.op.norm_bound(s.event)), 1.0))
            z, back = expm_apply(s.op, x, t), expm_apply(-s.op, expm_apply(s.op, x, t), t)
            there, home = t * s.op, -t * s.op
            allowed = _promise(there, x)
            # the inverse adds its own error, and propagates the error of z
            allowed_back = _promise(home, x) * (_growth(there, s.event) + allowed) + _growth(home, s.event) * allowed
        expected = _matmul(_exponential(t * s.matrix), x)
        if s.bounded:
            _check_proven(s, t)
    _agree_by_row(z, expected, x, allowed, f"expm_apply to be torch.matrix_exp's product for {s.name} at t = {t:g}")
    _agree_by_row(back, x, x, allowed_back, f"exp(−tA) to undo exp(tA) for {s.name} at t = {t:g}")


def _check_proven(s: _Subject, t: float) -> None:
    """Constant and alternating events, whose roundings may all go in one direction, stay within the proven bound."""
    plan = certify(s.op, s.event, t, dtype=_like(s.op).dtype)
    if not math.isfinite(plan.proven_bound):
        return
    allowed = (plan.proven_bound + _REFERENCE) * _growth(t * s.op, s.event)
    ones = torch.ones_like(s.events(0))
    signs = 1 - 2 * (torch.arange(math.prod(s.event), device=ones.device) % 2).reshape(s.event)
    for x in (ones, ones * signs):
        expected = _matmul(_exponential(t * s.matrix), x)
        _agree_by_row(
            expm_apply(s.op, x, t), expected, x, allowed, f"what is proven of expm_apply to hold for {s.name}"
        )


def _exponential(matrix: Tensor) -> Tensor:
    """torch.matrix_exp of at least two matrices: alone, one with a norm near 0.03 loses digits (seen in torch 2)."""
    return torch.matrix_exp(matrix) if matrix.ndim == 3 else torch.matrix_exp(torch.stack([matrix, matrix]))[0]


def _check_gradients(s: _Subject) -> None:
    """`gradient="recompute"` equals `gradient="autograd"`, for x and for every parameter that needs a gradient."""
    x, y, t = s.events(9).requires_grad_(), s.events(10), 1 / max(s.norm, 1.0)
    twin = s.op.rebuild([p if p.requires_grad else p.detach().requires_grad_() for p in s.op.parameters])
    needed = [x, *(p for p in twin.parameters if p.requires_grad)]
    plain = _autograd(expm_apply(twin, x, t, terms=5, gradient="autograd"), needed, y)
    saving = _autograd(expm_apply(twin, x, t, terms=5, gradient="recompute"), needed, y)
    for i, (a, b) in enumerate(zip(plain, saving, strict=True)):
        what = "x" if i == 0 else f"parameter {i - 1}"
        scale = math.e * max(float(_norm(a)), float(_norm(x) * _norm(y)))
        _agree(b, a, scale, s.tol, f"both gradients of the exponential in {what} to agree for {s.name}")


def _promise(op: LinearOperator, x: Tensor) -> float:
    """The error of `expm_apply`, relative to ‖x‖, that its documentation allows, plus the reference's own rounding."""
    event = x.shape[1:]
    plan = plan_series(op.norm_bound(event), dtype=x.dtype, log_norm=op.log_norm_bound(event))
    return (max(default_tol(x.dtype), plan.error_bound) + _REFERENCE) * _growth(op, event)


def _growth(op: LinearOperator, event: Sequence[int]) -> float:
    return math.exp(max(float(op.log_norm_bound(event)), 0.0))


def _like(op: LinearOperator) -> Tensor:
    """A tensor of the operator's dtype and device."""
    return op.parameters[0].detach() if op.parameters else torch.empty(0)


def _matmul(matrix: Tensor, x: Tensor) -> Tensor:
    return (matrix @ x.double().reshape(x.shape[0], -1, 1)).reshape(x.shape)


def _norm(x: Tensor) -> Tensor:
    return torch.linalg.vector_norm(x.detach().double())


def _inner(x: Tensor, y: Tensor) -> Tensor:
    return (x.double() * y.double()).sum()


def _autograd(out: Tensor, inputs: Sequence[Tensor], y: Tensor) -> Sequence[Tensor]:
    """The gradient of ⟨y, out⟩ in each input, zero where `out` does not depend on it."""
    if not out.requires_grad:
        return [torch.zeros_like(p) for p in inputs]
    return torch.autograd.grad(out, inputs, y, materialize_grads=True)


def _expect(condition: bool, fact: str, got: object) -> None:
    if not condition:
        raise AssertionError(f"Expected {fact}; got {got}.")


def _agree(got: Tensor, expected: Tensor, scale: float | Tensor, tol: float, fact: str) -> None:
    error, allowed = float(_norm(got.detach().double() - expected.detach().double())), tol * float(scale)
    _expect(error <= allowed, fact, f"a difference of {error:.3g}, where {allowed:.3g} is rounding")


def _agree_by_row(got: Tensor, expected: Tensor, x: Tensor, allowed: float, fact: str) -> None:
    """‖got − expected‖ ≤ allowed·‖x‖ in each row of the batch."""
    for g, e, row in zip(got, expected, x, strict=True):
        _agree(g, e, _norm(row), allowed, fact)
