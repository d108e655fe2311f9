"""The exponential of a graph convolution on an undirected sparse graph, as polynomials in its adjacency.

On an eigenvector of a symmetric Â with eigenvalue λ, the map X ↦ X θ0 + Â X θ1 multiplies by θ0 + λθ1 from the right.
So its exponential is determined by those of F × F matrices, one for each λ, and expanded in Chebyshev polynomials of λ

    exp(A) X = Σ_k T_k(Â) X C_k,    exp(θ0 + λθ1) = Σ_k T_k(λ) C_k    for −1 ≤ λ ≤ 1.

Each term costs one product with Â and one with C_k, where the power series needs two with θ0 and θ1. It also needs
fewer terms: nothing cancels in the sum, so there are no steps, and the C_k decay faster than the terms of the power
series.

The certificate. ‖T_k(Â)‖ ≤ 1, so the truncation error is at most the sum of the omitted ‖C_k‖. The C_k are computed
from the exponentials at the zeros of T_{M+1}, where M is chosen beforehand. In powers of λ the coefficients are at most
e^{‖θ0‖} ‖θ1‖^j / j!, those of e^{‖θ0‖ + ‖θ1‖λ}. Powers are sums of Chebyshev polynomials with non-negative weights, so
the same comparison holds for the C_k:

    ‖C_k‖ ≤ 2 e^{‖θ0‖} I_k(‖θ1‖) ≤ 2 e^{‖θ0‖} (‖θ1‖/2)^k / k! · e^{‖θ1‖² / (4k + 4)}.

A multiple of the identity in θ0 counts by its value instead of its norm. The error is relative to e^{max(μ, 0)} ‖x‖,
and e^μ is at least as large as any of those exponentials. The rounding error is expected, as for the power series;
`plan_graph_series` states the proven bound.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple, TypeGuard, cast

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from expmflow._transformed import transformed
from expmflow.numerics.plan import SeriesPlan, gamma, log_remainder, plan_series, tol_or_default, with_rounding
from expmflow.operators import GraphConvOperator, LinearOperator
from expmflow.operators.adjacency import SparseAdjacency

_MOST = 1024  # the largest number of exponentials of small matrices; beyond it, the power series takes over
_NOISE_OF_EXPONENTIALS = 2.5  # measured error of torch.matrix_exp, in spacings and units of the norm
_FOR_SLOPES = 2  # additional terms, so that the gradients are as accurate as the values


def has_graph_series(op: LinearOperator) -> TypeGuard[GraphConvOperator]:
    """Whether this is a convolution on an undirected sparse graph, with parameters whose values can be read."""
    return (
        isinstance(op, GraphConvOperator)
        and isinstance(op.graph, SparseAdjacency)
        and not torch.compiler.is_compiling()
        and not transformed(*op.parameters)
        and op.graph.is_symmetric()
    )


def apply_graph_series(op: GraphConvOperator, x: Tensor, tol: float | None, *, keep: bool) -> Tensor | None:
    """exp(A) x for `x` of shape `(batch, N, F)` within `tol`; None if that takes too many exponentials.

    Args:
        op: an operator that `has_graph_series`.
        x: node features.
        tol: as in `expm_apply`.
        keep: whether autograd may store every term; otherwise the backward pass recomputes them.
    """
    tolerance = max(tol_or_default(tol, x.dtype), torch.finfo(x.dtype).eps / 2)
    recording = torch.is_grad_enabled()
    learns = recording and any(tensor.requires_grad for tensor in (x, *op.parameters))
    extra = _FOR_SLOPES if learns else 0
    if recording and (op.theta0.requires_grad or op.theta1.requires_grad):
        weights = _coefficients(op, tolerance, extra, x.dtype)
    else:
        weights = op.remember(
            ("graph series", tolerance, extra), x.shape[1:], lambda _: _coefficients(op, tolerance, extra, x.dtype)
        )
    if not len(weights):
        return None
    weights, x = weights.to(x.dtype), op.layout(x)
    if not learns:
        return _sum(op, x, weights)
    if keep:
        return _record(op, x, weights)
    return cast(Tensor, checkpoint(_record, op, x, weights, use_reentrant=False, preserve_rng_state=False))


class _Expansion(NamedTuple):
    """The coefficients C_k, of which the first `terms + 1` are needed, and their error terms."""

    coefficients: Tensor
    norms: list[float]
    terms: int
    noise: float  # of each exponential
    beyond: float  # a bound on the sum of all further ones
    slope: float  # ‖θ1‖, the factor by which roundings in products with Â enter


def _coefficients(op: GraphConvOperator, tol: float, extra: int, dtype: torch.dtype) -> Tensor:
    """The C_k that are needed, and up to `extra` more: `(terms + 1, *θ.shape)`, float64; empty if there is no plan."""
    expansion = _expansion(op, tol, dtype)
    if expansion is None:
        return op.theta0.new_zeros(0, dtype=torch.float64)
    return expansion.coefficients[: expansion.terms + 1 + extra]


def plan_graph_series(op: GraphConvOperator, tol: float | None, dtype: torch.dtype) -> SeriesPlan | None:
    """The plan of `apply_graph_series`; None where it does not apply.

    Rounding, proven: a term is off by at most 3γ k(k+1)/2, with γ ≈ n u for sums of n numbers, because the recurrence
    propagates the error of each product by Chebyshev polynomials of the second kind. The proof assumes that Â is
    bitwise symmetric, and that the error of `torch.matrix_exp` is at most four times the measured one.
    """
    tolerance = max(tol_or_default(tol, dtype), torch.finfo(dtype).eps / 2)
    expansion = _expansion(op, tolerance, dtype)
    if expansion is None:
        return None
    _, norms, terms, noise, beyond, slope = expansion
    event, unit = (op.graph.num_nodes, op.theta0.shape[-1]), torch.finfo(dtype).eps / 2
    growth = math.exp(min(max(float(op.log_norm_bound(event)), 0.0), 700.0))
    first_norms = norms[: terms + 1]
    truncation = (sum(norms[terms + 1 :]) + beyond) / growth
    expected = (_expected_rounding(norms, unit) + noise) / growth + slope * unit * (2 + op.graph.sum_length() / 16)
    product, sums = 3 * gamma(op.graph.sum_length() + 4, unit), gamma(event[1] + terms + 3, unit)
    reach = product * terms * (terms + 1) / 2
    worst = math.inf
    if reach < 1:
        carried = sum(product * k * (k + 1) / 2 * norm for k, norm in enumerate(first_norms)) + sums * sum(first_norms)
        worst = (carried / (1 - reach) + 8 * noise * len(norms)) / growth
    return with_rounding(SeriesPlan(1, terms, truncation + expected, truncation, expected_rounding=expected), worst)


def _expansion(op: GraphConvOperator, tol: float, dtype: torch.dtype) -> _Expansion | None:
    theta0, theta1 = op.theta0.double(), op.theta1.double() * op.radius
    shift, apart, norm = _sizes_of(theta0.detach(), theta1.detach())
    degree = _degree(shift + apart, norm, tol)
    if degree is None:
        return None
    zeros, transform = _interpolation(degree)
    ahead = (-1, *(1,) * max(theta0.ndim, theta1.ndim))
    exponents = theta0 + zeros.to(theta0.device).reshape(ahead) * theta1
    values = exponents.exp() if exponents.shape[-1] == 1 else torch.matrix_exp(exponents)
    coefficients = (transform.to(theta0.device) @ values.flatten(1)).reshape(values.shape)
    growth = max(1.0, max(_norms(values.detach())) / values.shape[-1] ** 0.5)  # one of them is at least as large
    noise = torch.finfo(torch.float64).eps * (1 + apart + norm)
    norms = _norms(coefficients.detach())
    terms = _terms(norms, tol * growth, noise * growth, torch.finfo(dtype).eps / 2)
    if terms is None or _power_series_is_better(op, tol, _NOISE_OF_EXPONENTIALS * noise, dtype):
        return None
    return _Expansion(coefficients, norms, terms, _NOISE_OF_EXPONENTIALS * noise * growth, tol / 4, norm)


def _power_series_is_better(op: GraphConvOperator, tol: float, noise: float, dtype: torch.dtype) -> bool:
    """Whether the exponentials of small matrices are too inaccurate for `tol`, and the power series is better."""
    if tol >= noise:
        return False
    event = (op.graph.num_nodes, op.theta0.shape[-1])
    plan = plan_series(op.norm_bound(event), tol, dtype, log_norm=op.log_norm_bound(event))
    return plan.error_bound < noise


def _sizes_of(theta0: Tensor, theta1: Tensor) -> tuple[float, float, float]:
    """The multiple of the identity in θ0, the norm of its remainder, and the norm of θ1: the largest over a batch."""
    shift = theta0.diagonal(dim1=-2, dim2=-1).mean(-1)
    rest = theta0 - shift[..., None, None] * torch.eye(theta0.shape[-1], dtype=theta0.dtype, device=theta0.device)
    both = torch.stack(torch.broadcast_tensors(rest, theta1))
    if not math.isfinite(float(both.sum() + shift.sum())):
        return math.nan, math.nan, math.nan
    apart, norm = torch.linalg.matrix_norm(both, ord=2).reshape(2, -1).amax(1).tolist()
    return float(shift.amax()), apart, norm


def _norms(matrices: Tensor) -> list[float]:
    """A bound of the norm of each matrix; the largest over a batch."""
    norms: list[float] = torch.linalg.vector_norm(matrices, dim=(-2, -1)).reshape(len(matrices), -1).amax(1).tolist()
    return norms


def _degree(grows: float, norm: float, tol: float) -> int | None:
    """M, beyond which the coefficients sum to less than an eighth of `tol`, which counts twice; None if too large."""
    if not (math.isfinite(grows) and math.isfinite(norm)):
        return None
    allowed = math.log(tol / 16) - grows
    return next((k for k in range(1, _MOST) if log_remainder(norm / 2, k) + norm**2 / (4 * k + 8) <= allowed), None)


def _terms(norms: list[float], tol: float, noise: float, unit: float) -> int | None:
    """The degree beyond which the coefficients sum to less than the part of `tol` that rounding leaves; None for NaN.

    Coefficients are as accurate as the exponentials that they come from: those below `noise` count as zero.
    """
    rounding = _expected_rounding(norms, unit)
    if not math.isfinite(rounding):
        return None
    allowed, left_out = max(0.75 * tol - rounding, rounding / 8), 0.0
    for k in range(len(norms) - 1, 0, -1):
        left_out += max(norms[k] - noise, 0.0)
        if left_out > allowed:
            return k
    return 0


def _expected_rounding(norms: list[float], unit: float) -> float:
    return 2 * unit * sum(math.sqrt(k + 1) * norm for k, norm in enumerate(norms))


@lru_cache(maxsize=64)
@torch.inference_mode(False)  # the cached tensors must also work in training
def _interpolation(degree: int) -> tuple[Tensor, Tensor]:
    """The zeros of T_{M+1}, and the matrix that maps values there to coefficients; exact for polynomials."""
    count = degree + 1
    orders, points = torch.arange(count).unsqueeze(1), 2 * torch.arange(count) + 1
    waves = _cosines(orders * points, count) * (2 / count)
    waves[0] /= 2
    return _cosines(points, count), waves


def _cosines(multiples: Tensor, count: int) -> Tensor:
    """cos(mπ / 2n) for whole m, reduced by symmetry to m between 0 and n: large angles would lose digits to
    rounding."""
    m = multiples % (4 * count)
    m = torch.minimum(m, 4 * count - m)
    values = torch.cos(torch.minimum(m, 2 * count - m).double() * (math.pi / (2 * count)))
    return torch.where(m > count, -values, values)


def _sum(op: GraphConvOperator, x: Tensor, weights: Tensor) -> Tensor:
    """Σ_k T_k(Â) x C_k in few buffers, none of which is `x`; no gradient."""
    matrix, (batch, nodes, features) = cast(SparseAdjacency, op.graph).matrix, x.shape
    before = p = x.transpose(0, 1).flatten(1)  # nodes first, and the columns of all rows of the batch side by side
    shape = (nodes * batch, features) if weights.ndim == 3 else (nodes, batch, 1, features)
    z = p.reshape(shape) @ weights[0]
    for k, weight in enumerate(weights[1:]):
        if k == 0:
            p = matrix.add_to(torch.zeros_like(p), p, alpha=1 / op.radius)
        else:  # into the memory of the term before
            given_up = before.clone() if k == 1 else before
            before, p = p, matrix.add_to(given_up, p, alpha=2 / op.radius, beta=-1.0)
        if weights.ndim == 3:
            z.addmm_(p.reshape(shape), weight)
        else:  # another θ for each row of the batch
            z += p.reshape(shape) @ weight
    return z.reshape(nodes, batch, features).transpose(0, 1)


def _record(op: GraphConvOperator, x: Tensor, weights: Tensor) -> Tensor:
    """The same, recorded by autograd."""
    z, before, p = x @ weights[0], x, x
    for k, weight in enumerate(weights[1:]):
        product = op.graph.matmul(p)
        before, p = p, product / op.radius if k == 0 else product * (2 / op.radius) - before
        z = z + p @ weight
    return z
