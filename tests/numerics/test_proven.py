"""What is called proven holds for the data people have: constant, positive, alternating, hubs, not only random."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

import expmflow as ef
from expmflow.numerics.heat_plan import plan_heat
from heat_cases import DATA, DTYPES, KINDS, LARGE, sparse_kernel
from operator_cases import CASES
from reference import expm_product, matrix_of

UNIT = {torch.float32: 2.0**-24, torch.float64: 2.0**-53}


def events(batch: int, shape: tuple[int, ...], dtype: torch.dtype) -> list[Tensor]:
    """Random, constant, positive and alternating ones."""
    generator = torch.Generator().manual_seed(0)
    signs = 1.0 - 2 * (torch.arange(math.prod(shape)) % 2).reshape(shape)
    kinds = [torch.randn(shape, generator=generator), torch.ones(shape), torch.rand(shape, generator=generator), signs]
    return [kind.to(dtype).expand(batch, *shape).contiguous() for kind in kinds]


def exact_operator(op: ef.LinearOperator, event: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """`(batch or 1, d, d)`: the matrix of the very numbers that the operator holds, in float64."""
    doubled = op.rebuild([p.detach().double() for p in op.parameters])
    matrix = matrix_of(doubled if not isinstance(doubled, ef.FunctionOperator) else op, event, dtype).double()
    return matrix if matrix.ndim == 3 else matrix.unsqueeze(0)


CERTIFIED = [name for name in CASES if "function" not in name and "scaled-twice" not in name]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CERTIFIED)
def test_every_operator_on_every_kind_of_data(name, dtype):
    """error ≤ proven_bound · e^{max(μ, 0)} · ‖x‖ in extended precision, whatever the path that computes it."""
    op, event = CASES[name](dtype)
    matrices = exact_operator(op, event, torch.float64)
    for t, tol in ((1.0, None), (-0.5, None), (3.0, 1e-3)):
        plan = ef.certify(op, event, t, tol=tol)
        growth = math.exp(max(float((t * op).log_norm_bound(event)), 0.0))
        assert plan.truncation_bound <= plan.error_bound <= plan.proven_bound < math.inf
        for x in events(op.batch_size or 40, event, dtype):  # many rows may be computed in another way
            with torch.no_grad():
                results = [
                    ef.expm_apply(op, x, t, tol=tol),
                    ef.expm_apply(op, x[:1] if len(matrices) == 1 else x, t, tol=tol),
                ]
            rows = [expm_product(t * matrix, x[:1].flatten(1))[0] for matrix in matrices]
            allowed = plan.proven_bound * growth * float(x[0].double().norm())
            for z in results:
                for k, row in enumerate(z.double().flatten(1)):
                    assert float((row - rows[k % len(rows)]).norm()) <= allowed + 4 * UNIT[torch.float64] * float(
                        rows[0].norm()
                    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("norm", [0.9, 3.7])
@pytest.mark.parametrize("channels", [16, 256])
def test_constant_kernels_on_constant_images(channels, norm, dtype):
    """On a torus the exponential of a constant kernel multiplies a constant image by e^norm."""
    kernel = torch.full((channels, channels, 3, 3), norm / (9 * channels), dtype=dtype)
    op, event = ef.ConvOperator(kernel, "circular"), (channels, 3, 3)
    exact = np.exp(np.longdouble(9 * channels) * np.longdouble(float(kernel[0, 0, 0, 0])))
    plan = ef.certify(op, event)
    assert op.sum_length(event) == 9 * channels
    assert float(op.absolute_norm_bound(event)) == pytest.approx(float(op.norm_bound(event)))
    for x in (torch.ones(1, *event, dtype=dtype), torch.ones(1, *event, dtype=dtype, requires_grad=True)):
        z = ef.expm_apply(op, x).detach().double().numpy()
        off = float(np.abs(z - exact).max() / exact)
        assert off <= plan.proven_bound
    assert plan.proven_bound < 100 * 9 * channels * UNIT[dtype]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("graph", LARGE)
def test_heat(graph, kind):
    """For longer times too, in which biased roundings are felt τ times."""
    edges = LARGE[graph]()
    nodes = int(edges.max()) + 1
    degree = torch.bincount(edges[0], minlength=nodes).double()
    t = 10 / float(degree.max()) if kind == "comb" else 10.0
    x = torch.stack([data(nodes) for data in DATA.values()], dim=1)
    exact = sparse_kernel(edges, x, kind, t)
    scale = degree.sqrt().unsqueeze(1).numpy() if kind == "rw" else 1.0
    for dtype in DTYPES:
        plan = ef.certify_heat(edges, x.to(dtype), t, kind)
        z = ef.heat_kernel(edges, x.to(dtype), t, kind).double().numpy()
        off = np.linalg.norm((scale * (z - exact)).astype(np.float64), axis=0)
        size = np.linalg.norm(scale * x.double().numpy(), axis=0)
        assert float((off / size).max()) <= plan.error_bound <= plan.proven_bound < 1e5 * UNIT[dtype]


def test_directed_heat():
    ring = torch.stack([torch.arange(50), (torch.arange(50) + 1) % 50])
    hub = torch.stack([torch.zeros(49, dtype=torch.int64), torch.arange(1, 50)])
    edges = torch.unique(torch.cat([ring, hub], dim=1), dim=1)
    x = torch.stack([data(50) for data in DATA.values()], dim=1)
    exact = sparse_kernel(edges, x, "rw", 5.0)
    for dtype in DTYPES:
        plan = ef.certify_heat(edges, x.to(dtype), 5.0, "rw")
        off = np.abs(ef.heat_kernel(edges, x.to(dtype), 5.0, "rw").double().numpy() - exact).max(0)
        assert bool((off <= plan.proven_bound * x.abs().amax(0).numpy()).all())


# --- what operators say of their sums --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CERTIFIED)
def test_absolute_norms_are_bounds(name):
    op, event = CASES[name](torch.float64)
    norm = torch.linalg.matrix_norm(exact_operator(op, event, torch.float64).abs(), ord=2).amax()
    assert float(op.absolute_norm_bound(event)) >= float(norm) * (1 - 1e-12)
    assert float(op.absolute_norm_bound(event)) >= float(
        torch.linalg.matrix_norm(op.dense(event).detach(), ord=2).amax()
    ) * (1 - 1e-12)


@pytest.mark.parametrize("name", CERTIFIED)
def test_no_sum_is_longer_than_it_says(name):
    """At least as long as a row of the matrix has entries."""
    op, event = CASES[name](torch.float64)
    entries = int((exact_operator(op, event, torch.float64) != 0).sum(-1).amax())
    if "graph" not in name:
        assert op.sum_length(event) >= entries
    elif "hub" not in name:  # first over features, then over neighbours
        assert (event[1] + 1) * (op.sum_length(event) - event[1]) >= entries
    assert op.adjoint().sum_length(event) is not None
    assert (op.adjoint() + op).sum_length(event) > op.sum_length(event)


def test_a_products_error_is_within_its_sum_length():
    """|computed − A x| ≤ γ_n |A||x| for every entry."""
    for name in CERTIFIED:
        op, event = CASES[name](torch.float32)
        matrices = exact_operator(op, event, torch.float64)
        for made, transposed in ((op, False), (op.adjoint(), True)):
            length = made.sum_length(event)
            for x in events(op.batch_size or 1, event, torch.float32):
                with torch.no_grad():
                    z = made(x).double().flatten(1)
                for k, matrix in enumerate(matrices):
                    a = matrix.T if transposed else matrix
                    flat = x[k].double().flatten()
                    allowed = (length + 1) * 1.01 * UNIT[torch.float32] * (a.abs() @ flat.abs())
                    assert bool(((z[k] - a @ flat).abs() <= allowed + 1e-12).all()), name


def test_functions_know_what_they_are_told():
    roll = ef.FunctionOperator(lambda x: x.roll(1, -1), norm_bound=1.0)
    assert roll.sum_length((4,)) is None
    assert math.isinf(ef.certify(roll, (4,)).proven_bound)
    told = ef.FunctionOperator(lambda x: x.roll(1, -1), norm_bound=1.0, sum_length=1)
    plan = ef.certify(told, (4,), dtype=torch.float64)
    assert plan.proven_bound < 1e-13
    assert told.adjoint().sum_length((4,)) is None
    assert (0.5 * told).sum_length((4,)) == 2
    with pytest.raises(ValueError, match="Expected sum_length"):
        ef.FunctionOperator(lambda x: x, sum_length=-1)


def test_long_rows_cost_a_few_blocks():
    edges = LARGE["star-10000"]()
    one = torch.ones(1, 1)
    op = ef.GraphConvOperator.from_edge_index(-one, one, edges, 10_000)
    assert op.sum_length((10_000, 1)) <= 100
    assert ef.certify(op, (10_000, 1)).proven_bound < 1e-3


def test_certificates_are_those_of_what_runs():
    """On an undirected sparse graph of its own series; with fixed terms of those; else of the plan."""
    op, event = CASES["graph-hub-diffusion"](torch.float64)
    assert (
        ef.certify(op, event, 20.0).products
        < ef.plan_series(20 * op.norm_bound(event), None, torch.float64).products / 5
    )
    dense, shape = CASES["dense"](torch.float64)
    plan = ef.certify(dense, shape)
    assert (plan.steps, plan.terms) == (ef.plan_series(dense.norm_bound(shape), None, torch.float64).steps, plan.terms)
    fixed = ef.certify(dense, shape, terms=3)
    assert (fixed.steps, fixed.terms) == (1, 3)
    assert fixed.truncation_bound > 1e-4
    with pytest.raises(ValueError, match="Expected either tol or terms"):
        ef.certify(dense, shape, tol=1e-3, terms=3)
    with pytest.raises(TypeError, match="Expected a LinearOperator"):
        ef.certify(torch.eye(3), shape)


def test_plans_without_sums_prove_truncation_only():
    plan = ef.plan_series(0.9)
    assert plan.error_bound == plan.truncation_bound + plan.expected_rounding
    assert math.isinf(plan.proven_bound)
    longer, shorter = ef.plan_series(0.9, sum_length=1000), ef.plan_series(0.9, sum_length=10)
    assert plan.error_bound == longer.error_bound
    assert math.inf > longer.rounding_bound > 50 * shorter.rounding_bound > 50 * plan.expected_rounding
    assert ef.plan_series(0.9, sum_length=1000, absolute_norm=0.9).rounding_bound < longer.rounding_bound / 10
    assert plan_heat(1.0, None, torch.float32).rounding_bound == math.inf
