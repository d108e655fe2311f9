"""Heat kernels of sparse graphs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from expmflow._identical import identical
from expmflow._precision import without_autocast
from expmflow._transformed import transformed
from expmflow._validation import expect, expect_alike, expect_finite, expect_one_of, expect_tensor, expect_type
from expmflow.numerics.decay import Basis, weights
from expmflow.numerics.heat_plan import plan_heat
from expmflow.numerics.plan import SeriesPlan, check_plan, check_tol
from expmflow.numerics.polynomial import apply_recomputing, apply_recording
from expmflow.numerics.series import Gradient
from expmflow.numerics.times import vector_of_times
from expmflow.operators.adjacency import coalesced, degrees
from expmflow.operators.diffusion import Diffusion
from expmflow.operators.sparse import Pattern

Laplacian = Literal["sym", "rw", "comb"]

_CHEAPER = "Where the graph is small torch.matrix_exp(-t * L) takes less, and so does an undirected graph."
REMEMBERED = 2**18  # the largest number of edges for which the last graph is cached: a few megabytes


@torch.compiler.disable  # type: ignore[untyped-decorator]  # compressed rows cannot be traced
def heat_kernel(
    edge_index: Tensor,
    x: Tensor,
    t: float | Tensor | Sequence[float],
    laplacian: Laplacian = "sym",
    edge_weight: Tensor | None = None,
    *,
    tol: float | None = None,
    gradient: Gradient = "recompute",
) -> Tensor:
    """exp(−tL) x: `x` after diffusing over a sparse graph for a time t; differentiable in x, t and the edge weights.

    With A the weights and D the sums of its rows, L is I − D^-½ A D^-½ (`"sym"`), I − D⁻¹ A (`"rw"`) or D − A
    (`"comb"`). A node without edges keeps its value. Self-loops count in D; in D − A they cancel.

    On an undirected graph, the error of every column is expected to be at most tol · ‖x‖: in the 2-norm, or for `"rw"`
    in the norm (Σ_i D_ii x_i²)^½, in which its Laplacian is symmetric. On a directed graph it is at most tol times the
    largest |x_i|, or for `"sym"` the largest |x_i| D_ii^-½ (both sides). The truncation error is proven; `certify_heat`
    states the proven bound on rounding.

    Args:
        edge_index: `(2, E)` integers; edge e sets `A[edge_index[0, e], edge_index[1, e]]`, parallel edges add up. An
            undirected graph lists both directions.
        x: node features `(N,)`, `(N, F)` or `(batch, N, F)`, float32 or float64.
        t: a time of at least 0, a scalar tensor (its gradient flows), or K times, which add a leading axis.
        laplacian: `"sym"`, `"rw"` or `"comb"`.
        edge_weight: `(E,)` non-negative, of the dtype of `x`; 1 if not given.
        tol: the tolerance; follows the dtype if None, and is never below what the dtype can hold (see `plan_heat`).
            A `t` at which the dtype keeps no digit of the result is refused.
        gradient: `"recompute"` stores two blocks of the size of `x` between the passes, whatever the number of terms;
            `"autograd"` stores every term, and can be differentiated twice.

    Cost:
        About √(2τ log(1/tol)) sparse products. τ is t; for `"comb"` it is t times the mean of a node's degree and its
        neighbours', at its maximum over nodes. Directed graphs take about τ products. Several times cost the products
        of the largest. No N × N matrix is formed. The preparation of a small graph is cached until the next graph
        comes.

    Example:
        >>> edges = torch.tensor([[0, 1, 1, 2], [1, 0, 2, 1]])
        >>> heat_kernel(edges, torch.tensor([1.0, 0.0, 0.0]), t=100.0, laplacian="comb")
        tensor([0.3333, 0.3333, 0.3333])
    """
    expect_one_of(laplacian, get_args(Laplacian), "laplacian")
    expect_one_of(gradient, get_args(Gradient), "gradient")
    check_tol(tol)
    _check_features(x)
    times = _as_times(t, x)
    nodes = x.shape[0] if x.ndim == 1 else x.shape[-2]
    if edge_weight is not None:
        expect_tensor(edge_weight, "edge_weight")
        expect_alike([("x", x), ("edge_weight", edge_weight)])
    with without_autocast(x.device.type):
        problem = _last_graph.problem(laplacian, edge_index, edge_weight, nodes, x)
        if x.numel() == 0:
            return x.expand(*times.shape, *x.shape).clone()
        nodes_first = x.movedim(-2, 0) if x.ndim == 3 else x
        z = _run(problem, nodes_first.reshape(nodes, -1), times.reshape(-1), tol, gradient)
        z = z.reshape(*times.shape, *nodes_first.shape)
    return z.movedim(times.ndim, -2) if x.ndim == 3 else z


def certify_heat(
    edge_index: Tensor,
    x: Tensor,
    t: float | Tensor | Sequence[float],
    laplacian: Laplacian = "sym",
    edge_weight: Tensor | None = None,
    *,
    tol: float | None = None,
) -> SeriesPlan:
    """The plan that `heat_kernel` follows with these arguments, with its proven and its expected error.

    In the norms that `heat_kernel` names, no `x` of this shape and dtype has an error above `plan.proven_bound`, at any
    of the times; this bound counts every rounding at its worst. `plan.error_bound` is the error to expect.

    Example:
        >>> edges = torch.tensor([[0, 1, 1, 2], [1, 0, 2, 1]])
        >>> plan = certify_heat(edges, torch.ones(3), t=1.0)
        >>> plan.truncation_bound < plan.error_bound < plan.proven_bound < 1e-5
        True
    """
    check_tol(tol)
    _check_features(x)
    nodes = x.shape[0] if x.ndim == 1 else x.shape[-2]
    problem = _last_graph.problem(laplacian, edge_index, edge_weight, nodes, x)
    tau = float(_as_times(t, x).detach().amax()) * problem.rate
    absolute = 3.0 if laplacian == "comb" and problem.op.symmetric else 1.0
    return plan_heat(tau, tol, x.dtype, problem.basis, problem.op.sum_length(x.shape), absolute)


class _Problem(NamedTuple):
    """exp(−tL) = S e^{rate·t·(M − 1)} S⁻¹ with M = `op`, S = diag(`scale`); `isolated` nodes keep their values."""

    op: Diffusion
    basis: Basis
    rate: float = 1.0
    scale: Tensor | None = None
    isolated: Tensor | None = None


class _LastGraph:
    """The prepared problem of the last small graph, because loops ask for the same graph again and again.

    Its edges are copied, and compared at each call, so nobody has to announce a change.
    """

    def __init__(self) -> None:
        self._last: tuple[tuple[Any, ...], Tensor, Tensor | None, _Problem] | None = None

    def problem(
        self, laplacian: Laplacian, edge_index: Tensor, edge_weight: Tensor | None, nodes: int, x: Tensor
    ) -> _Problem:
        key = laplacian, nodes, x.dtype, x.device
        constant = edge_weight is None or not (edge_weight.requires_grad or transformed(edge_weight))
        if constant and self._last is not None and self._last[0] == key:
            _, edges, weight, problem = self._last
            if identical(edges, edge_index) and identical(weight, edge_weight):
                return problem
        small = isinstance(edge_index, Tensor) and edge_index.numel() <= 2 * REMEMBERED
        if not (small and constant) or torch.is_inference_mode_enabled():
            return _problem(laplacian, *coalesced(edge_index, nodes, edge_weight, like=x), nodes)
        edges, weight = edge_index.clone(), None if edge_weight is None else edge_weight.clone()
        problem = _problem(laplacian, *coalesced(edges, nodes, weight, like=x), nodes)
        self._last = key, edges, weight, problem
        return problem


_last_graph = _LastGraph()


def _problem(laplacian: Laplacian, rows: Tensor, cols: Tensor, weight: Tensor, nodes: int) -> _Problem:
    """The diffusion M of each Laplacian: 1 − L/rate for `"comb"`; for the others D^-½ A D^-½ if A is symmetric, so that
    M is, too, and otherwise D⁻¹ A, which is stochastic; `scale` leads from it to the one that L names.
    """
    if laplacian == "comb":
        other = rows != cols
        if not bool(other.all()):
            rows, cols, weight = rows[other], cols[other], weight[other]
    pattern = Pattern(rows, cols, nodes)
    degree, symmetric = pattern.row_sums(weight)
    if weight.requires_grad:
        degree = degrees(pattern, weight)
    basis: Basis = "chebyshev" if symmetric else "powers"
    isolated, divisor = None, degree
    if _check_range(degree.detach()) == 0:
        alone = degree == 0
        isolated, divisor = alone.nonzero().squeeze(-1), torch.where(alone, 1.0, degree)
    if laplacian == "comb":
        rate = _rate(pattern, weight.detach(), degree.detach(), symmetric)
        diagonal = (1 - degree / rate).to(weight.dtype)
        isolated = None if weight.requires_grad else isolated  # such weights may grow from zero
        op = Diffusion(pattern, weight / rate, diagonal, symmetric=symmetric)
        return _Problem(op, basis, rate, isolated=isolated)
    ones: Tensor | None = None
    if symmetric:  # D^-½ A D^-½; for "rw" it stands between D^-½ and D^½
        root = divisor.sqrt()
        divisors = _product(root.index_select(0, pattern.rows), root.index_select(0, pattern.cols))
        scale = divisor.rsqrt() if laplacian == "rw" else None
    else:  # D⁻¹ A; for "sym" it stands between D^½ and D^-½
        divisors = divisor.index_select(0, pattern.rows)
        scale = divisor.sqrt() if laplacian == "sym" else None
        ones = None if isolated is None else (degree == 0).to(weight.dtype)  # others may read what these nodes hold
    values = (weight / divisors if weight.requires_grad else divisors.reciprocal_().mul_(weight)).to(weight.dtype)
    return _Problem(Diffusion(pattern, values, ones, symmetric=symmetric), basis, scale=scale, isolated=isolated)


def _product(fresh: Tensor, other: Tensor) -> Tensor:
    """The product, in the memory of `fresh` unless a gradient needs it: new memory costs more than the product."""
    return fresh * other if fresh.requires_grad else fresh.mul_(other)


def _run(problem: _Problem, x: Tensor, times: Tensor, tol: float | None, gradient: Gradient) -> Tensor:
    """`(K, N, columns)`."""
    op, basis, rate, scale, isolated = problem
    tau, last = times * rate, float(times.detach().amax())
    plan = plan_heat(float(tau.detach().amax()), tol, x.dtype, basis)
    check_plan(plan, last, tol, x.dtype, _CHEAPER, stacklevel=4)
    extra = int(times.requires_grad)  # slopes are differences of weights, and need one more for the accuracy of values
    run = apply_recording if gradient == "autograd" else apply_recomputing
    start = x if scale is None else x / scale.to(x.dtype).unsqueeze(-1)
    z = run(op, start, weights(basis, tau, plan.terms + extra), basis)
    z = z if scale is None else z * scale.to(x.dtype).unsqueeze(-1)
    return z if isolated is None else z.index_copy_(1, isolated, x[isolated].expand(len(times), -1, -1))


def _rate(pattern: Pattern, weight: Tensor, degree: Tensor, symmetric: bool) -> float:
    """A rate c such that 1 − L/c has its spectrum in [−1, 1] if it is symmetric, and is stochastic otherwise.

    The former because λmax(D − A) ≤ λmax(D + A) ≤ ‖D⁻¹ (D + A) D‖∞, for any weights.
    """
    if not bool((degree > 0).any()):
        return 1.0
    if not symmetric:
        return float(degree.amax())
    neighbours = (pattern.matrix(weight.double()) @ degree.unsqueeze(1)).squeeze(1)
    sums = degree + neighbours / torch.where(degree > 0, degree, 1.0)
    return float(sums.amax()) / 2 * (1 + 4 * torch.finfo(weight.dtype).eps)


def _check_range(degree: Tensor) -> float:
    """The least degree; products and quotients of two non-zero degrees must neither over- nor underflow."""
    least, largest = map(float, torch.aminmax(degree)) if degree.numel() else (1.0, 1.0)
    if least > 1e-150 and largest < 1e150:
        return least
    above = degree[degree != 0]
    smallest = float(above.amin()) if above.numel() else 1.0
    fits = smallest > 1e-150 and largest < 1e150
    expect(fits, "sums of edge weights between 1e-150 and 1e150", f"{smallest:g} to {largest:g}")
    return least


def _as_times(t: float | Tensor | Sequence[float], x: Tensor) -> Tensor:
    """A scalar, or a vector of times, in float64."""
    if isinstance(t, int | float) and not isinstance(t, bool):
        expect(math.isfinite(t) and t >= 0, "a finite time t of at least 0", t)
        return torch.full((), t, dtype=torch.float64, device=x.device)
    known = isinstance(t, Tensor | list | tuple)
    expect_type(known, "t to be a number, a tensor or a list of times", type(t).__name__)
    if isinstance(t, list | tuple):
        times = vector_of_times(t, torch.float64, x.device)
    else:
        times = torch.as_tensor(t, dtype=torch.float64, device=x.device)
    fits = times.ndim == 0 or (times.ndim == 1 and times.shape[0] > 0)
    expect(fits, "t to be a number or a vector of times", f"shape {tuple(times.shape)}")
    for value in times.detach().reshape(-1).tolist():
        expect(math.isfinite(value) and value >= 0, "finite times t of at least 0", f"{value:g} among them")
    return times


def _check_features(x: Tensor) -> None:
    expect_tensor(x, "x")
    expect_type(x.dtype in (torch.float32, torch.float64), "x of dtype torch.float32 or torch.float64", x.dtype)
    expect(x.ndim in (1, 2, 3), "x of shape (N,), (N, F) or (batch, N, F)", tuple(x.shape))
    expect_finite(x, "x")
