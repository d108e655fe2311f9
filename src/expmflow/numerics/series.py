"""exp(tA)x by its power series: the paper's Algorithms 1 and 2, with a plan that bounds the error."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal, cast, get_args

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from expmflow._precision import without_autocast
from expmflow._transformed import batched, largest_of_all, transformed
from expmflow._validation import expect, expect_count, expect_one_of, expect_tensor, expect_type, expect_untraced
from expmflow.numerics.gradient import series_vjp, with_strides
from expmflow.numerics.graph_series import apply_graph_series, has_graph_series
from expmflow.numerics.plan import SeriesPlan, check_plan, check_tol, plan_series, tol_or_default
from expmflow.numerics.sweep import Planner, plan_sweep
from expmflow.numerics.times import vector_of_times
from expmflow.operators import LinearOperator

Gradient = Literal["recompute", "autograd"]

_CHEAPER = (
    "Where events are small torch.matrix_exp(t * op.dense(event_shape)) takes less, and so does heat_kernel for "
    "diffusion on an undirected graph; else take a smaller t, or a tighter norm bound."
)


def expm_apply(
    op: LinearOperator,
    x: Tensor,
    t: float | Tensor | Sequence[float] = 1.0,
    *,
    tol: float | None = None,
    terms: int | SeriesPlan | None = None,
    gradient: Gradient = "recompute",
) -> Tensor:
    """exp(t·A) x for an operator A that only needs to be applied, never stored; exp(−t·A) inverts it.

    With `tol` the number of products follows from the norm bound, and the error is expected to be at most tol ·
    e^{max(μ, 0)} · ‖x‖, with μ the log-norm bound of t·A. The truncation error is proven. Rounding can be larger for
    numbers of one sign; `certify` states its worst case. With `terms` it is the paper's series, truncated after that
    many terms.

    Args:
        op: the operator A.
        x: `(batch, *event)`, of the operator's dtype.
        t: a number, a scalar tensor (its gradient flows), or K times at once, which add a leading axis of length K.
        tol: the tolerance; follows the dtype if None, and is never below what the dtype can hold (see `plan_series`).
        terms: a fixed number of terms, or a whole `SeriesPlan`, instead of a tolerance.
        gradient: `"recompute"` stores only `x` and the parameters between the passes, and recomputes the terms in the
            backward pass, which holds O(steps + terms) buffers. `"autograd"` stores every term, is faster where memory
            allows, and can be differentiated twice. Both give the same gradient to rounding.

    A `t` of which the dtype keeps no digit is refused, and one that takes more than 100,000 products is warned of.

    Cost:
        `plan.products` applications of the operator; a backward pass costs about three times that
        (`"autograd"`: twice).

    Example:
        >>> quarter_turn = ef.DenseOperator(torch.tensor([[0.0, -1.0], [1.0, 0.0]]))
        >>> expm_apply(quarter_turn, torch.tensor([[1.0, 0.0]]), t=torch.pi / 2).round(decimals=5).abs()
        tensor([[0., 1.]])
    """
    _check_arguments(op, tol, terms, gradient)
    device_type = _device_type(op, x)
    coarse = isinstance(x, Tensor) and x.is_floating_point() and torch.is_autocast_enabled(device_type)
    if coarse and op.parameters:
        x = x.to(op.parameters[0].dtype)  # networks may run in half precision, the series must not
    with without_autocast(device_type):
        op.check_input(x)
        times = _as_times(t, x)
        if isinstance(times, list):
            z = _at_times(op, x, times, tol, terms, gradient)
        else:
            z = apply_at(op, x, times, tol, terms, gradient)
        _check_overflow(z, x)
        return z


def truncated_series(multiples: Sequence[LinearOperator], x: Tensor) -> Tensor:
    """The paper's Algorithm 2: z = Σ_{i ≤ T} Aⁱx / i!, by p_0 = x, p_i = A p_{i−1} / i.

    `multiples` are A/1, A/2, …, A/T: dividing the parameters once is cheaper than dividing every product.
    """
    p = z = x
    for multiple in multiples:
        p = multiple.apply(p)
        z = z + p if z is x or torch.compiler.is_compiling() else z.add_(p)  # in place, which is faster
    return z


def _multiples(op: LinearOperator, plan: SeriesPlan) -> list[LinearOperator]:
    """A/(s·i) for i = 1 … T."""
    return op.multiples([1 / (plan.steps * i) for i in range(1, plan.terms + 1)])


def apply_series(op: LinearOperator, x: Tensor, plan: SeriesPlan) -> Tensor:
    """`plan.steps` times the series of A / steps; every term stays in memory if autograd records it."""
    whole = None if torch.is_grad_enabled() else op.collapsed(plan.steps, plan.terms, x.shape[0])
    if whole is not None:
        return whole.apply(x)
    multiples = _multiples(op, plan)
    for _ in range(plan.steps):
        x = truncated_series(multiples, x)
    return x


def apply_recording(op: LinearOperator, x: Tensor, plan: SeriesPlan) -> Tensor:
    """The series as autograd records it; the gradient arrives in the memory layout of the products."""
    z = apply_series(op, x, plan)
    if z.requires_grad and not torch.compiler.is_compiling():
        strides = z.stride()
        z.register_hook(lambda grad: None if grad is None else with_strides(grad, strides))
    return z


def apply_recomputing(op: LinearOperator, x: Tensor, plan: SeriesPlan) -> Tensor:
    """The same with the gradient of `numerics/gradient.py`, which stores only x and the parameters."""
    if torch.compiler.is_compiling() and not op.traceable:
        return cast(Tensor, checkpoint(apply_series, op, x, plan, use_reentrant=False))
    return _Recompute.apply(op, plan, x, *op.parameters)


class _Recompute(torch.autograd.Function):
    @staticmethod
    def forward(op: LinearOperator, plan: SeriesPlan, x: Tensor, *parameters: Tensor) -> Tensor:
        return apply_series(op.rebuild(parameters), x, plan)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.op, ctx.plan, x, *parameters = inputs
        ctx.save_for_backward(x, *parameters)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise RuntimeError("Expected gradient='autograd' for a second derivative; got gradient='recompute'.")
        x, *parameters = ctx.saved_tensors
        with without_autocast(x.device.type):
            op, plan, starts = ctx.op.rebuild(parameters), ctx.plan, [x]
            multiples = _multiples(op, plan)
            for _ in range(plan.steps - 1):
                starts.append(truncated_series(multiples, starts[-1]))
            wanted = any(ctx.needs_input_grad[3:])
            grad_x, grad_parameters = series_vjp(op, multiples, starts, plan, grads[0], wanted)
        return None, None, grad_x, *grad_parameters


def apply_at(
    op: LinearOperator,
    x: Tensor,
    t: float | Tensor,
    tol: float | None,
    terms: int | SeriesPlan | None,
    gradient: Gradient,
    *,
    checked: bool = False,
) -> Tensor:
    """`expm_apply` at one time, its input unchecked: for layers, which have done that; `checked`: so is its plan."""
    expect_untraced("an exponential, whose terms follow from its weights")
    folded = op.folded(tuple(x.shape[1:]))
    scaled = folded if isinstance(t, float) and t == 1.0 else folded.scale(t)
    if terms is None and not transformed(x) and has_graph_series(scaled):
        z = apply_graph_series(scaled, x, tol, keep=gradient == "autograd")
        if z is not None:
            return z
    if isinstance(terms, SeriesPlan):
        plan = terms
    elif terms is not None:
        plan = SeriesPlan(1, terms, math.nan)
    else:
        plan = plan_for(op, t, x.shape[1:], x.dtype, tol)
        if not checked and not torch.compiler.is_compiling():
            check_plan(plan, float(torch.as_tensor(t).detach()), tol, x.dtype, _CHEAPER, stacklevel=3)
    recorded = gradient == "autograd" or not torch.is_grad_enabled() or transformed(x, *op.parameters)
    run = apply_recording if recorded else apply_recomputing
    return run(scaled, scaled.layout(x), plan)


def plan_for(
    op: LinearOperator, t: float | Tensor, event_shape: Sequence[int], dtype: torch.dtype, tol: float | None
) -> SeriesPlan:
    """The plan for t·A. The bounds of A are cached, so those of t·A are derived from them."""
    factor = torch.as_tensor(t, dtype=torch.float64).detach()
    norm = op.norm_bound(event_shape) * factor.abs()
    plan = plan_series(norm, tol, dtype)
    if plan.steps == 1 and plan.error_bound <= tol_or_default(tol, dtype):
        return plan  # the log-norm costs as much as the norm, and would save a term
    return plan_series(norm, tol, dtype, log_norm=log_norm_at(op, factor, event_shape))


def log_norm_at(op: LinearOperator, t: Tensor, event_shape: Sequence[int]) -> Tensor:
    """The log-norm bound of t·A."""
    if t >= 0:
        return op.log_norm_bound(event_shape) * t
    return op.remember("log_norm of −A", event_shape, lambda shape: (-op).log_norm_bound(shape)) * t.abs()


def _at_times(
    op: LinearOperator,
    x: Tensor,
    times: list[Tensor],
    tol: float | None,
    terms: int | SeriesPlan | None,
    gradient: Gradient,
) -> Tensor:
    """All times in one sweep: each starts from the result of its predecessor on the same side of zero, or again from x.

    `plan_sweep` decides which.
    """
    if terms is not None:
        return torch.stack([apply_at(op, x, t, tol, terms, gradient) for t in times])
    tolerance = tol_or_default(tol, x.dtype)
    values = [float(t.detach()) for t in times]
    # at time zero the value is x, and the derivative A x
    results = [
        apply_at(op, x, t, tolerance / 2, None, gradient) if v == 0 else x for t, v in zip(times, values, strict=True)
    ]
    order = sorted(range(len(times)), key=lambda k: abs(values[k]))
    for side in (1.0, -1.0):
        ahead = [k for k in order if values[k] * side > 0]
        if not ahead:
            continue
        planner, distances = _planner(op, side, x), [abs(values[k]) for k in ahead]
        whole = planner(distances[-1], tolerance / 2)
        check_plan(whole, side * distances[-1], tol, x.dtype, _CHEAPER, stacklevel=3)
        for leg in plan_sweep(distances, planner, tolerance):
            stop = ahead[leg.stop]
            if leg.start is None:
                start, step = x, times[stop]
            else:
                start, step = results[ahead[leg.start]], times[stop] - times[ahead[leg.start]]
            results[stop] = apply_at(op, start, step, leg.tol, None, gradient, checked=True)
    return torch.stack(results)


def _planner(op: LinearOperator, side: float, x: Tensor) -> Planner:
    """The plan for side·t·A, t ≥ 0, within a tolerance, from numbers alone."""
    event_shape = x.shape[1:]
    norm = largest_of_all(op.norm_bound(event_shape))
    log_norm = largest_of_all(log_norm_at(op, torch.tensor(side, dtype=torch.float64), event_shape))
    return lambda t, tol: plan_series(norm * t, tol, x.dtype, log_norm=log_norm * t)


def _check_overflow(z: Tensor, x: Tensor) -> None:
    """Raise if a finite `x` has a result that is not finite."""
    if torch.compiler.is_compiling() or transformed(z) or _is_finite(z.detach()) or not _is_finite(x.detach()):
        return
    expect(
        False, f"exp(tA) x within the range of {z.dtype}", "a result that overflows: take a smaller t, or a wider dtype"
    )


def _is_finite(x: Tensor) -> bool:
    if x.numel() == 0 or math.isfinite(float(x.sum())):
        return True
    return all(math.isfinite(float(extreme)) for extreme in torch.aminmax(x))  # the sum alone may overflow


def _as_times(t: float | Tensor | Sequence[float], x: Tensor) -> float | Tensor | list[Tensor]:
    """One time (a float, or a scalar tensor in the dtype of `x`), or a list of several."""
    if isinstance(t, int | float) and not isinstance(t, bool):
        expect(math.isfinite(t), "a finite t", t)
        return float(t)
    if isinstance(t, list | tuple):
        t = vector_of_times(t, x.dtype, x.device)
    expect_type(isinstance(t, Tensor), "t to be a number, a tensor or a list of times", type(t).__name__)
    expect_tensor(t, "t")
    several = torch.as_tensor(t).to(dtype=x.dtype, device=x.device)
    fits = several.ndim == 0 or (several.ndim == 1 and several.shape[0] > 0)
    expect(fits, "t to be a number or a vector of times", f"shape {tuple(several.shape)}")
    if not torch.compiler.is_compiling():
        expect(not batched(several), "one t for all that torch.vmap maps over, or a vector of times", "one for each")
        expect(bool(torch.isfinite(several).all()), "finite times t", "NaN or infinity in them")
    return several if several.ndim == 0 else list(several.unbind())


def _device_type(op: LinearOperator, x: object) -> str:
    tensors = [t for t in (*op.parameters, x) if isinstance(t, Tensor)]
    return tensors[0].device.type if tensors else "cpu"


def _check_arguments(op: object, tol: float | None, terms: int | SeriesPlan | None, gradient: str) -> None:
    expect_type(isinstance(op, LinearOperator), "a LinearOperator", type(op).__name__)
    expect_one_of(gradient, get_args(Gradient), "gradient")
    expect(tol is None or terms is None, "either tol or terms", "both")
    check_tol(tol)
    if terms is not None and not isinstance(terms, SeriesPlan):
        expect_count(terms, "terms")
