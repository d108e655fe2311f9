"""The exact gradient of the series, in memory that does not grow with the number of terms.

With p_i = A p_{i-1} / i the series is z = Σ p_i. Backwards, with g the gradient of z,

    a_T = g,    a_i = g + Aᵀ a_{i+1} / (i+1),

a_0 is the gradient of x, and the gradient of a parameter θ is Σ_i ⟨a_i, (∂A/∂θ) p_{i-1}⟩ / i. The backward pass
recomputes the p_i, so between the passes only x and the parameters are stored. Multiplying the two truncated sums
Σ a_i and Σ p_i instead would be cheaper, and wrong.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from expmflow.numerics.plan import SeriesPlan
from expmflow.operators import LinearOperator


def series_vjp(
    op: LinearOperator,
    multiples: Sequence[LinearOperator],
    starts: list[Tensor],
    plan: SeriesPlan,
    grad: Tensor,
    with_parameters: bool,
) -> tuple[Tensor, list[Tensor | None]]:
    """The gradients of ⟨grad, z⟩ in x and in each parameter.

    Args:
        op: A.
        multiples: A / (s·i) for i = 1 … T.
        starts: x before each of the s steps; the list is emptied on the way, to release memory.
        plan: s and T.
        grad: the gradient of z.
        with_parameters: whether to compute the gradients of the parameters.
    """
    adjoint = op.adjoint_product()
    totals: list[Tensor | None] = [None] * len(op.parameters)
    grad = with_strides(grad, torch.empty_like(starts[0], device="meta").stride())  # without overlapping memory
    while starts:
        terms = [starts.pop()]
        if with_parameters:
            for factor in multiples[:-1]:
                terms.append(factor.apply(terms[-1]))
        a = grad
        for i in range(plan.terms, 0, -1):
            if with_parameters:
                _accumulate(totals, op.parameter_vjp(terms.pop(), a), 1 / (plan.steps * i))
            a = _add_scaled(grad, adjoint(a), 1 / (plan.steps * i))
        grad = a
    return grad, totals


def _add_scaled(total: Tensor, more: Tensor, factor: float) -> Tensor:
    if torch.compiler.is_compiling():  # inductor fuses the sum and the product, and drops alpha
        return total + more * factor
    return torch.add(total, more, alpha=factor)


def with_strides(grad: Tensor, strides: tuple[int, ...]) -> Tensor:
    """A copy of `grad` in the memory layout that all products after it use."""
    if grad.stride() == strides:
        return grad
    return grad.new_empty_strided(grad.shape, strides).copy_(grad)


def _accumulate(totals: list[Tensor | None], grads: tuple[Tensor | None, ...], factor: float) -> None:
    for k, grad in enumerate(grads):
        if grad is not None:
            total = totals[k]
            totals[k] = grad * factor if total is None else _add_scaled(total, grad, factor)
