"""The series itself, and its exact gradient in memory that does not grow with the number of terms.

With p_i = A p_{i-1} / i the series is z = Σ p_i. Backwards, with g the gradient of z,

    a_T = g,    a_i = g + Aᵀ a_{i+1} / (i+1),

a_0 is the gradient of x, and the gradient of a parameter θ is Σ_i ⟨a_i, (∂A/∂θ) p_{i-1}⟩ / i. The p_i are recomputed in
the backward pass, so that between the passes only x and the parameters are alive. Multiplying the two truncated sums
Σ a_i and Σ p_i instead would be cheaper, and wrong.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from expmflow._precision import without_autocast
from expmflow.numerics.plan import SeriesPlan
from expmflow.operators import LinearOperator


def apply_series(op: LinearOperator, x: Tensor, plan: SeriesPlan) -> Tensor:
    """`plan.steps` times the series of A / steps; every term stays alive if autograd records it."""
    whole = None if torch.is_grad_enabled() else op.collapsed(plan.steps, plan.terms, x.shape[0])
    if whole is not None:
        return whole.apply(x)
    factors = _factors(op, plan)
    for _ in range(plan.steps):
        x = _step(factors, x)
    return x


def apply_recording(op: LinearOperator, x: Tensor, plan: SeriesPlan) -> Tensor:
    """The series as autograd records it; the gradient comes in with the layout that the products have."""
    z = apply_series(op, x, plan)
    if z.requires_grad and not torch.compiler.is_compiling():
        strides = z.stride()
        z.register_hook(lambda grad: None if grad is None else _with_strides(grad, strides))
    return z


def apply_recomputing(op: LinearOperator, x: Tensor, plan: SeriesPlan) -> Tensor:
    """The same with the gradient above."""
    if torch.compiler.is_compiling() and not op.traceable:
        return cast(Tensor, checkpoint(apply_series, op, x, plan, use_reentrant=False))
    return _Recompute.apply(op, plan, x, *op.parameters)


def _factors(op: LinearOperator, plan: SeriesPlan) -> list[LinearOperator]:
    """A/(s·i) for i = 1 … T: dividing the parameters is cheaper than dividing every product."""
    return op.multiples([1 / (plan.steps * i) for i in range(1, plan.terms + 1)])


def _step(factors: list[LinearOperator], x: Tensor) -> Tensor:
    p = z = x
    for factor in factors:
        p = factor.apply(p)
        z = z + p if z is x or torch.compiler.is_compiling() else z.add_(p)  # sums cost less where they already are
    return z


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
            grad_x, grad_parameters = _series_vjp(
                ctx.op.rebuild(parameters), x, ctx.plan, grads[0], any(ctx.needs_input_grad[3:])
            )
        return None, None, grad_x, *grad_parameters


def _series_vjp(
    op: LinearOperator, x: Tensor, plan: SeriesPlan, grad: Tensor, with_parameters: bool
) -> tuple[Tensor, list[Tensor | None]]:
    """The gradients of ⟨grad, z⟩ in x and in each parameter."""
    factors, adjoint = _factors(op, plan), op.adjoint_product()
    totals: list[Tensor | None] = [None] * len(op.parameters)
    starts = [x]
    for _ in range(plan.steps - 1):
        starts.append(_step(factors, starts[-1]))
    grad = _with_strides(grad, torch.empty_like(x, device="meta").stride())  # whose memory does not overlap
    while starts:
        terms = [starts.pop()]
        if with_parameters:
            for factor in factors[:-1]:
                terms.append(factor.apply(terms[-1]))
        a = grad
        for i in range(plan.terms, 0, -1):
            if with_parameters:
                _accumulate(totals, op.parameter_vjp(terms.pop(), a), 1 / (plan.steps * i))
            a = _add_scaled(grad, adjoint(a), 1 / (plan.steps * i))
        grad = a
    return grad, totals


def _add_scaled(total: Tensor, more: Tensor, factor: float) -> Tensor:
    if torch.compiler.is_compiling():  # inductor makes one product of a sum and a matrix product, and forgets alpha
        return total + more * factor
    return torch.add(total, more, alpha=factor)


def _with_strides(grad: Tensor, strides: tuple[int, ...]) -> Tensor:
    """One layout for all that follows."""
    if grad.stride() == strides:
        return grad
    return grad.new_empty_strided(grad.shape, strides).copy_(grad)


def _accumulate(totals: list[Tensor | None], grads: tuple[Tensor | None, ...], factor: float) -> None:
    for k, grad in enumerate(grads):
        if grad is not None:
            total = totals[k]
            totals[k] = grad * factor if total is None else _add_scaled(total, grad, factor)
