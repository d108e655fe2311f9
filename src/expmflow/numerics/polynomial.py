"""Σ_k w_k T_k(M) x or Σ_k w_k M^k x, with exact gradients.

Chebyshev's terms follow from p_{k+1} = 2 M p_k − p_{k−1}, p_1 = M x, p_0 = x. Backwards, g being the sum's gradient,

    a_k = w_k g + 2 M a_{k+1} − a_{k+2},    a_0 = w_0 g + M a_1 − a_2,

a_0 is the gradient of x, that of w_k is ⟨g, p_k⟩, and that of a parameter θ of M is Σ_k ⟨a_{k+1}, (∂M/∂θ) p_k⟩, twice
for k > 0. The recurrence runs backwards as well as forwards: the last two terms determine all others, in the order in
which the backward pass needs them. So its memory does not grow with the number of terms.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from expmflow.numerics.decay import Basis
from expmflow.operators.diffusion import Diffusion


def apply_recomputing(op: Diffusion, x: Tensor, weights: Tensor, basis: Basis) -> Tensor:
    """`(K, *x.shape)`, one sum for each row of `weights`, `(K, terms + 1)`; stores almost nothing between the passes.

    Chebyshev's sum stores its last two terms, and needs a symmetric operator; the sum of powers stores `x`.
    """
    if basis == "powers":
        return cast(Tensor, checkpoint(apply_recording, op, x, weights, basis, use_reentrant=False))
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (x, weights, *op.parameters)):
        return _Chebyshev.apply(op, x, weights, *op.parameters)
    return _chebyshev(op, x, weights)[0]


def apply_recording(op: Diffusion, x: Tensor, weights: Tensor, basis: Basis) -> Tensor:
    """The same, recorded by autograd: every term stays in memory."""
    columns = weights.to(x.dtype)[..., None, None].unbind(1)
    before, p, z = x, x, columns[0] * x
    for k, column in enumerate(columns[1:]):
        product = op.apply(p)
        before, p = p, product if k == 0 or basis == "powers" else 2 * product - before
        z = z + column * p
    return z


def _chebyshev(op: Diffusion, x: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The sum and its last two terms; without gradients, and in few buffers."""
    rows = weights.T.tolist()
    z = torch.stack([weight * x for weight in rows[0]])
    sums, before, p = z.unbind(), x, x
    for k, row in enumerate(rows[1:]):
        if k == 0:
            p = op.apply_into(torch.zeros_like(x), x)
        else:  # into the memory of the term before, but never into x
            before, p = p, op.apply_into(before.clone() if k == 1 else before, p, alpha=2.0, beta=-1.0)
        for total, weight in zip(sums, row, strict=True):
            total.add_(p, alpha=weight)
    return z, before, p


class _Chebyshev(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, op: Diffusion, x: Tensor, weights: Tensor, *parameters: Tensor) -> Tensor:
        op = op.rebuild(parameters)
        z, before, p = _chebyshev(op, x, weights)
        ctx.op = op
        ctx.save_for_backward(weights, before, p, *parameters)
        return z

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError("Expected gradient='autograd' for a second derivative; got gradient='recompute'.")
        weights, before, p, *parameters = ctx.saved_tensors
        (grad,), op = grads, ctx.op.rebuild(parameters)
        needs_weights, needs_parameters = ctx.needs_input_grad[2], any(ctx.needs_input_grad[3:])
        grad_weights, totals = torch.zeros_like(weights), [torch.zeros_like(parameter) for parameter in parameters]
        rows = weights.T.tolist()
        last = len(rows) - 1
        a, after = torch.zeros_like(p), torch.zeros_like(p)  # a_{k+1} and a_{k+2}
        for k in range(last, -1, -1):
            factor = 2.0 if k > 0 else 1.0
            if needs_weights:
                grad_weights[:, k] = (grad * p).flatten(1).sum(1)
            if k < last:
                if needs_parameters:
                    for total, share in zip(totals, op.parameter_vjp(p, a), strict=True):
                        total.add_(share, alpha=factor)
                a, after = op.apply_into(after, a, alpha=factor, beta=-1.0), a
            for g, weight in zip(grad, rows[k], strict=True):
                a.add_(g, alpha=weight)
            if k > 1 and (needs_weights or needs_parameters):  # saved tensors must not change
                p = p.clone() if k >= last - 1 else p
                before, p = op.apply_into(p, before, alpha=2.0, beta=-1.0), before
            else:
                p = before
        return None, a, grad_weights, *totals
