"""e^{τ(M − 1)} as a weighted mean of polynomials in M: the weights, how many are needed, and their derivatives.

With non-negative weights w_k(τ) that sum to one,

    e^{τ(M − 1)} = Σ_k w_k(τ) T_k(M),    w_k = 2 e^{-τ} I_k(τ)  (half of it for k = 0),    or
    e^{τ(M − 1)} = Σ_k w_k(τ) M^k,       w_k = e^{-τ} τ^k / k!,

with T_k the Chebyshev polynomials and I_k the modified Bessel functions. If no polynomial is larger than one, the
truncation error is at most the sum of the omitted weights. The first expansion needs about √(2τ log(1/tol)) weights and
‖T_k(M)‖ ≤ 1, which holds for a symmetric M with spectrum in [−1, 1]. The second needs about τ, and ‖M‖ ≤ 1 in any norm.
"""

from __future__ import annotations

import math
from functools import lru_cache
from itertools import accumulate
from typing import Any, Literal

import torch
from torch import Tensor

Basis = Literal["chebyshev", "powers"]


def terms_needed(basis: Basis, tau: float, tol: float) -> tuple[int, float]:
    """The degree beyond which the weights sum to at most `tol`, and that sum."""
    left_out, terms = 0.0, 0
    for k, weight in reversed(list(enumerate(_weights(basis, tau)))):
        if left_out + weight > tol:
            terms = k
            break
        left_out += weight
    return terms, left_out


def weights(basis: Basis, tau: Tensor, terms: int) -> Tensor:
    """`(K, terms + 1)`: the weights at K times `tau`, float64, differentiable to any order."""
    return _Weights.apply(basis, tau, terms) if tau.requires_grad else _values(basis, tau, terms)


def _values(basis: Basis, tau: Tensor, terms: int) -> Tensor:
    rows = []
    for value in tau.tolist():
        known = _weights(basis, value)[: terms + 1]
        rows.append(known + (0.0,) * (terms + 1 - len(known)))
    return tau.new_tensor(rows).reshape(len(rows), terms + 1)


class _Weights(torch.autograd.Function):
    @staticmethod
    def forward(basis: Basis, tau: Tensor, terms: int) -> Tensor:
        return _values(basis, tau, terms)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.basis, tau, ctx.terms = inputs
        ctx.save_for_backward(tau)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor, None]:
        (tau,) = ctx.saved_tensors
        return None, (grads[0] * _slopes(ctx.basis, weights(ctx.basis, tau, ctx.terms + 1))).sum(-1), None


def _slopes(basis: Basis, longer: Tensor) -> Tensor:
    """The derivatives of the weights in τ, which are differences of weights."""
    now = longer[:, :-1]
    before = torch.nn.functional.pad(now[:, :-1], (1, 0))
    if basis == "powers":
        return before - now
    # 2 I_k' = I_{k−1} + I_{k+1}, with I_{−1} = I_1; the weight of k = 0 counts once, all others twice
    once = torch.full_like(now, 0.5)
    once[:, 1:2] = 1.0
    return once * before + 0.5 * longer[:, 1:] - now


@lru_cache(maxsize=64)
def _weights(basis: Basis, tau: float) -> tuple[float, ...]:
    """All weights except those beyond τ + s (powers) or s (Chebyshev), s = 30 + 10√τ.

    They are the distribution of a Poisson variable, or of the distance of a random walk in continuous time. So by
    Bernstein's inequality, the omitted weights sum to less than 2 exp(−s² / (2τ + 2s/3)) < 1e-19. Each weight is
    computed from its neighbour, and the sum is then set to one, so none of them over- or underflows too early.
    """
    reach = 30 + math.ceil(10 * math.sqrt(tau))
    if basis == "chebyshev":
        ratios, ratio = [0.0] * (reach + 1), 0.0  # I_k / I_{k−1}, by the continued fraction of Gauss
        for k in range(reach, 0, -1):
            ratio = tau / (2 * k + tau * ratio)
            ratios[k] = ratio
        ratios[1] *= 2
        raw = list(accumulate(ratios[1:], lambda weight, ratio: weight * ratio, initial=1.0))
    else:
        mode = int(tau)
        below = list(accumulate(range(mode, 0, -1), lambda weight, k: weight * k / tau, initial=1.0))
        above = list(accumulate(range(mode + 1, mode + reach + 1), lambda weight, k: weight * tau / k, initial=1.0))
        raw = below[::-1] + above[1:]
    total = math.fsum(raw)
    return tuple(weight / total for weight in raw)
