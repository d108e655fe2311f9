"""Sums of one sign over many neighbours, where roundings do not average out: heat on graphs with hubs."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import expmflow as ef
from expmflow.numerics.heat_plan import plan_heat
from heat_cases import DATA, DTYPES, KINDS, LARGE, sparse_kernel, star

DEFAULT = {torch.float64: 1e-14, torch.float32: 1e-6}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("graph", LARGE)
def test_heat(graph, kind):
    """Constant, positive and alternating vectors, and the hub alone, in eight columns: the error that is expected."""
    edges = LARGE[graph]()
    nodes = int(edges.max()) + 1
    degree = torch.bincount(edges[0], minlength=nodes).double()
    t = 3 / float(degree.max()) if kind == "comb" else 1.0
    tau = 6.0 if kind == "comb" else t
    x = torch.stack([data(nodes) for data in DATA.values()], dim=1).repeat(1, 2)
    exact = sparse_kernel(edges, x, kind, t)
    scale = degree.sqrt().unsqueeze(1).numpy() if kind == "rw" else 1.0
    for dtype in DTYPES:
        z = ef.heat_kernel(edges, x.to(dtype), t, kind).double().numpy()
        off = np.linalg.norm((scale * (z - exact)).astype(np.float64), axis=0)
        size = np.linalg.norm(scale * x.double().numpy(), axis=0)
        assert float((off / size).max()) <= max(DEFAULT[dtype], plan_heat(tau, None, dtype).error_bound)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("nodes", [1000, 100_000])
def test_a_star_is_known_in_closed_form(nodes, dtype):
    """Â of a star swaps two unit vectors: exp(Â − 1) is made of cosh 1 and sinh 1."""
    one = torch.eye(1, dtype=dtype)
    x = torch.ones(1, nodes, 1, dtype=dtype)
    root = math.sqrt(nodes - 1)
    hub = math.exp(-1) * (math.cosh(1) + math.sinh(1) * root)
    leaf = math.exp(-1) * (math.cosh(1) + math.sinh(1) / root)
    exact = torch.full((1, nodes, 1), leaf, dtype=torch.float64).index_fill(1, torch.tensor(0), hub)
    op = ef.GraphConvOperator.from_edge_index(-one, one, star(nodes), nodes)
    for result in (
        ef.expm_apply(op, x),
        ef.expm_apply(op, x.clone().requires_grad_()).detach(),
        ef.expm_apply(op, x, terms=ef.plan_series(op.norm_bound((nodes, 1)), dtype=dtype)),  # the power series
        ef.heat_kernel(star(nodes), x, 1.0),
    ):
        assert float((result.double() - exact).norm()) <= DEFAULT[dtype] * math.sqrt(nodes)
