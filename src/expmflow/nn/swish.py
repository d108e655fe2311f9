"""x · σ(βx) / 1.1 as one function, which stores only its input for the backward passes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from expmflow._transformed import transformed
from expmflow.nn.fused import must_record, recorded_vjp

STEEPEST = 1.1  # the largest slope of x σ(x) is 1.0998


def lip_swish(x: Tensor, beta: Tensor) -> Tensor:
    """x · σ(βx) / 1.1 for a number β > 0, whose slope stays within ±1.

    Residual blocks differentiate it twice, for which autograd would store a dozen tensors of the size of `x`.
    """
    return _formula(x, beta) if must_record(x, beta) else _Swish.apply(x, beta)


def _formula(x: Tensor, beta: Tensor) -> Tensor:
    return F.silu(beta * x) / (STEEPEST * beta)


def _gradient(grad: Tensor, x: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients in x and β for the output's gradient `grad`."""
    sigma = torch.sigmoid(beta * x)
    bend = sigma * (1 - sigma)
    return grad * (sigma + beta * x * bend) / STEEPEST, (grad * x * x * bend).sum() / STEEPEST


class _Swish(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, beta: Tensor) -> Tensor:
        ctx.save_for_backward(x, beta)
        return _formula(x, beta)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, beta = ctx.saved_tensors
        if transformed(grad):
            return recorded_vjp(_formula, (x, beta), ctx.needs_input_grad, grad)
        return _SwishGradient.apply(grad, x, beta)


class _SwishGradient(torch.autograd.Function):
    """The derivative of `_gradient`, written out only for the gradient in x: training needs no other."""

    @staticmethod
    def forward(ctx: Any, grad: Tensor, x: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(grad, x, beta)
        scaled = beta * x
        to_x = torch.ops.aten.silu_backward(grad, scaled).div_(STEEPEST)
        y = F.silu(scaled, inplace=True).div_(STEEPEST * beta)
        return to_x, torch.addcmul(to_x * x, grad, y, value=-1).sum() / beta

    @staticmethod
    def backward(ctx: Any, to_x: Tensor | None, to_beta: Tensor | None) -> tuple[Tensor | None, ...]:
        grad, x, beta = ctx.saved_tensors
        if to_beta is None and to_x is not None and not torch.is_grad_enabled():
            scaled = beta * x
            sigma = torch.sigmoid(scaled)
            bend = sigma * (1 - sigma)
            curve = (2 + scaled * (1 - 2 * sigma)).mul_(bend).mul_(to_x).mul_(grad).mul_(beta / STEEPEST)
            slope = scaled.mul_(bend).add_(sigma).mul_(to_x).div_(STEEPEST)
            return slope, curve, (curve * x).sum() / beta
        return _recorded(ctx.saved_tensors, (to_x, to_beta))


def _recorded(given: Sequence[Tensor], grads: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
    """The gradients of `_gradient` in operations that autograd knows."""
    again = torch.is_grad_enabled()
    with torch.enable_grad():
        leaves = [t if again and t.requires_grad else t.detach().requires_grad_() for t in given]
        outputs = [(out, grad) for out, grad in zip(_gradient(*leaves), grads, strict=True) if grad is not None]
        if not outputs:
            return None, None, None
        values, given_grads = zip(*outputs, strict=True)
        return torch.autograd.grad(values, leaves, given_grads, create_graph=again)
