"""Heat kernels of graphs against dense exponentials in extended precision, and what heat must do whatever the graph."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import expmflow as ef
from expmflow.numerics import heat
from expmflow.numerics.decay import terms_needed, weights
from expmflow.numerics.heat_plan import plan_heat
from heat_cases import DTYPES, KINDS, dense_kernel, edges_of, graphs

F64 = torch.float64
DEFAULT = {torch.float64: 1e-14, torch.float32: 1e-6}


def certified(adjacency: Tensor, kind: str, t: float, tol: float | None) -> float:
    """What the docstring promises, where the dtype can hold it; else what the plan says."""
    dtype, directed = adjacency.dtype, not torch.equal(adjacency, adjacency.T)
    a = adjacency.double() * (1 - torch.eye(len(adjacency)))
    degree = a.sum(1)
    tau = t
    if kind == "comb":
        divisor = torch.where(degree == 0, 1.0, degree)
        bound = degree.amax() if directed else ((a @ degree) / divisor + degree).amax() / 2
        tau = t * max(float(bound), 1e-30) * (1 + 1e-6)
    plan = plan_heat(tau, tol, dtype, "powers" if directed else "chebyshev")
    return max(DEFAULT[dtype] if tol is None else tol, plan.error_bound)


def relative_error(z: Tensor, x: Tensor, adjacency: Tensor, kind: str, t: float) -> float:
    """The worst column in the norm that is certified."""
    exact = dense_kernel(adjacency, kind, t) @ x.double().numpy().astype(np.longdouble)
    off = torch.from_numpy((z.double().numpy() - exact).astype(np.float64))
    degree = adjacency.double().sum(1)
    root = torch.where(degree == 0, 1.0, degree).sqrt().unsqueeze(-1)
    if torch.equal(adjacency, adjacency.T):
        scale, order = root if kind == "rw" else torch.ones_like(root), 2
    else:
        scale, order = 1 / root if kind == "sym" else torch.ones_like(root), torch.inf
    size = torch.linalg.vector_norm(scale * x.double(), order, dim=0)
    return float((torch.linalg.vector_norm(scale * off, order, dim=0) / size).max())


@settings(max_examples=80)
@given(graphs(), st.sampled_from(KINDS), st.sampled_from([0.0, 1e-3, 0.3, 1.0, 7.0, 50.0, 200.0]))
def test_any_graph_any_time(graph, kind, t):
    adjacency, x = graph
    index, weight = edges_of(adjacency)
    for tol in (None, 1e-4):
        z = ef.heat_kernel(index, x, t, kind, weight, tol=tol)
        assert relative_error(z, x, adjacency, kind, t) <= certified(adjacency, kind, t, tol)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", ["star", "ring", "complete", "random", "directed"])
def test_certificate(shape, kind, dtype):
    """Shapes on which all entries round alike, and vectors that do not decay."""
    nodes = 12
    ring = torch.eye(nodes, dtype=dtype).roll(1, 0)
    adjacency = {
        "star": torch.zeros(nodes, nodes, dtype=dtype).index_fill(0, torch.tensor(0), 1.0),
        "ring": ring,
        "complete": 0.5 - 0.5 * torch.eye(nodes, dtype=dtype),
        "random": torch.rand(nodes, nodes, generator=torch.Generator().manual_seed(1), dtype=F64).to(dtype),
        "directed": ring + 0.1 * torch.eye(nodes, dtype=dtype).roll(5, 0),
    }[shape]
    if shape != "directed":
        adjacency = (adjacency + adjacency.T) * (1 - torch.eye(nodes, dtype=dtype))
    index, weight = edges_of(adjacency)
    degree = adjacency.sum(1, keepdim=True)
    generator = torch.Generator().manual_seed(2)
    x = torch.cat([torch.randn(nodes, 2, generator=generator, dtype=dtype), torch.ones_like(degree), degree.sqrt()], 1)
    for t in (0.0, 0.01, 1.0, 10.0, 50.0, 300.0):
        for tol in (None, 1e-3, 1e-5):
            z = ef.heat_kernel(index, x, t, kind, weight, tol=tol)
            assert relative_error(z, x, adjacency, kind, t) <= certified(adjacency, kind, t, tol), (t, tol)


@pytest.mark.parametrize("basis", ["chebyshev", "powers"])
def test_the_terms_are_needed(basis):
    """Half of them leave out far more than the tolerance, at every time."""
    for tau in (0.5, 5.0, 50.0, 5000.0):
        terms, left_out = terms_needed(basis, tau, 1e-10)
        assert left_out <= 1e-10
        kept = weights(basis, torch.tensor([tau], dtype=F64), terms)
        assert bool((kept >= 0).all())
        assert float(kept.sum()) == pytest.approx(1, abs=1e-9)
        lost = 1 - float(kept[0, : int(0.8 * terms)].sum())
        assert lost > 1e-9


def test_chebyshev_needs_the_root_of_what_powers_need():
    few, many = (terms_needed(basis, 1000.0, 1e-8)[0] for basis in ("chebyshev", "powers"))
    assert few < 200
    assert many > 1000


# --- what heat does --------------------------------------------------------------------------------------------------


@given(graphs(symmetric=True), st.sampled_from(KINDS))
def test_semigroup(graph, kind):
    adjacency, x = graph
    index, weight = edges_of(adjacency)
    at_once = ef.heat_kernel(index, x, 2.5, kind, weight)
    in_turn = ef.heat_kernel(index, ef.heat_kernel(index, x, 0.7, kind, weight), 1.8, kind, weight)
    torch.testing.assert_close(
        in_turn, at_once, rtol=0, atol=300 * torch.finfo(x.dtype).eps * (1 + float(x.abs().max()))
    )


@given(graphs(), st.sampled_from(["rw", "comb"]), st.sampled_from([0.1, 3.0, 100.0]))
def test_constants_stay_and_nothing_exceeds_its_range(graph, kind, t):
    """Both are averages over the graph, directed or not."""
    adjacency, x = graph
    index, weight = edges_of(adjacency)
    slack = 2e4 * torch.finfo(x.dtype).eps
    ones = torch.ones(len(x), dtype=x.dtype)
    torch.testing.assert_close(ef.heat_kernel(index, ones, t, kind, weight), ones, rtol=0, atol=slack)
    z = ef.heat_kernel(index, x, t, kind, weight)
    assert bool((z <= x.amax(0) + slack).all())
    assert bool((z >= x.amin(0) - slack).all())


@given(graphs(symmetric=True), st.sampled_from([0.1, 3.0, 100.0]))
def test_mass_is_conserved_and_norms_shrink(graph, t):
    adjacency, x = graph
    index, weight = edges_of(adjacency)
    slack = 2e4 * torch.finfo(x.dtype).eps
    degree = adjacency.sum(1, keepdim=True)
    mass = torch.where(degree == 0, 1, degree)
    z = {kind: ef.heat_kernel(index, x, t, kind, weight) for kind in KINDS}
    size = 1 + float(x.abs().sum() * mass.sum())
    torch.testing.assert_close(z["comb"].sum(0), x.sum(0), rtol=0, atol=slack * size)
    torch.testing.assert_close((mass * z["rw"]).sum(0), (mass * x).sum(0), rtol=0, atol=slack * size)
    torch.testing.assert_close((mass.sqrt() * z["sym"]).sum(0), (mass.sqrt() * x).sum(0), rtol=0, atol=slack * size)
    for kind in ("sym", "comb"):
        assert bool((z[kind].norm(dim=0) <= x.norm(dim=0) * (1 + slack)).all())


@given(graphs(), st.sampled_from(KINDS))
def test_permutation_equivariance(graph, kind):
    adjacency, x = graph
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    index, weight = edges_of(adjacency)
    moved_index, moved_weight = edges_of(adjacency[order][:, order])
    z, moved = (
        ef.heat_kernel(index, x, 2.0, kind, weight),
        ef.heat_kernel(moved_index, x[order], 2.0, kind, moved_weight),
    )
    torch.testing.assert_close(
        moved, z[order], rtol=0, atol=300 * torch.finfo(x.dtype).eps * (1 + float(x.abs().max()))
    )


def test_sym_is_the_exponential_of_the_graph_convolution():
    adjacency = torch.rand(8, 8, dtype=F64)
    index, weight = edges_of(adjacency + adjacency.T)
    one = torch.ones(1, 1, dtype=F64)
    op = ef.GraphConvOperator.from_edge_index(-one, one, index, 8, weight)
    x = torch.randn(2, 8, 1, dtype=F64)
    torch.testing.assert_close(ef.heat_kernel(index, x, 1.7, "sym", weight), ef.expm_apply(op, x, 1.7))


def test_a_ring_is_known_in_closed_form():
    """On Z the kernel is e^{-2t} I_k(2t); a long ring feels no difference in a short time."""
    nodes, t = 10_000, 3.0
    ring = torch.arange(nodes)
    index = torch.cat([torch.stack([ring, ring.roll(1)]), torch.stack([ring.roll(1), ring])], dim=1)
    spike = torch.zeros(nodes, dtype=F64)
    spike[0] = 1
    z = ef.heat_kernel(index, spike, t, "comb")
    expected = torch.special.i0e(torch.tensor(2 * t, dtype=F64)), torch.special.i1e(torch.tensor(2 * t, dtype=F64))
    torch.testing.assert_close(z[:2], torch.stack(expected), rtol=0, atol=1e-14)


# --- shapes and times ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_shapes(kind):
    adjacency = torch.rand(5, 5, dtype=F64)
    for matrix in (adjacency, adjacency + adjacency.T):
        index, weight = edges_of(matrix)
        x = torch.randn(4, 5, 3, dtype=F64)
        z = ef.heat_kernel(index, x, 0.8, kind, weight)
        several = ef.heat_kernel(index, x, [0.8, 0.0, 2.0], kind, weight)
        assert z.shape == x.shape
        assert several.shape == (3, *x.shape)
        torch.testing.assert_close(several[0], z)
        torch.testing.assert_close(several[1], x)
        for row, value in zip(x, z, strict=True):
            torch.testing.assert_close(ef.heat_kernel(index, row, 0.8, kind, weight), value)
            torch.testing.assert_close(ef.heat_kernel(index, row[:, 0], 0.8, kind, weight), value[:, 0])
        assert ef.heat_kernel(index, x[0, :, 0], [1.0, 2.0], kind, weight).shape == (2, 5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("times", [[0.3, 4.0], [4.0, 0.3, 0.3], [0.0], [0.0, 20.0, 1.0]])
def test_several_times_are_separate_calls(times, kind):
    adjacency = torch.rand(6, 6, dtype=F64)
    index, weight = edges_of(adjacency + adjacency.T)
    x = torch.randn(6, 2, dtype=F64)
    together = ef.heat_kernel(index, x, torch.tensor(times), kind, weight)
    alone = torch.stack([ef.heat_kernel(index, x, torch.tensor(t), kind, weight) for t in times])
    torch.testing.assert_close(together, alone, rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_small_graphs(kind):
    none = torch.zeros(2, 0, dtype=torch.int64)
    for shape in ((0,), (0, 3), (2, 0, 3), (4, 0), (1,), (1, 2), (3, 2)):
        x = torch.randn(shape, dtype=F64, requires_grad=True)
        z = ef.heat_kernel(none, x, 3.0, kind)
        torch.testing.assert_close(z, x)
        torch.testing.assert_close(torch.autograd.grad(z.sum(), x)[0], torch.ones_like(x))
        assert ef.heat_kernel(none, x, [1.0, 2.0], kind).shape == (2, *shape)
    loop = torch.zeros(2, 1, dtype=torch.int64)
    torch.testing.assert_close(ef.heat_kernel(loop, torch.ones(1, 2), 5.0, kind), torch.ones(1, 2))


@pytest.mark.parametrize("kind", KINDS)
def test_a_node_without_edges_keeps_its_value_and_its_gradient(kind):
    edges = torch.tensor([[0, 1], [1, 0]])
    x = torch.randn(4, 2, dtype=F64, requires_grad=True)
    z = ef.heat_kernel(edges, x, [2.0, 30.0], kind)
    assert torch.equal(z[:, 2:], x[2:].expand(2, 2, 2))
    (grad,) = torch.autograd.grad(z[0, 2:].sum(), x)
    assert torch.equal(grad, torch.tensor([0.0, 0, 1, 1], dtype=F64)[:, None].expand(4, 2))


def test_a_sink_is_heard():
    """0 → 1: node 1 keeps its value, node 0 relaxes towards it."""
    x = torch.tensor([1.0, 0.0], dtype=F64)
    for kind in KINDS:
        z = ef.heat_kernel(torch.tensor([[0], [1]]), x, 2.0, kind)
        torch.testing.assert_close(z, torch.tensor([math.exp(-2), 0.0], dtype=F64))


def test_parallel_edges_add_up_and_order_does_not_matter():
    x = torch.randn(3, 2, dtype=F64)
    twice = torch.tensor([[2, 0, 1, 1, 0, 1], [1, 1, 2, 0, 1, 0]])
    once, weight = torch.tensor([[0, 1, 1, 2], [1, 0, 2, 1]]), torch.tensor([2.0, 2, 1, 1], dtype=F64)
    for kind in KINDS:
        torch.testing.assert_close(ef.heat_kernel(twice, x, 1.0, kind), ef.heat_kernel(once, x, 1.0, kind, weight))


class TestTheGraphThatIsRemembered:
    """A graph that was seen before saves work, and is never taken for another."""

    RING = torch.stack([torch.arange(6), torch.arange(1, 7) % 6])
    X = torch.eye(6, dtype=F64)

    def fresh(self, edges: torch.Tensor, x: torch.Tensor = X, t: float = 0.7, *args, **options) -> torch.Tensor:
        ef.heat_kernel(torch.tensor([[0, 1], [1, 0]]), torch.ones(2), 1.0)  # another graph in between
        return ef.heat_kernel(edges, x, t, *args, **options)

    def test_saves_the_work(self, monkeypatch):
        expected = self.fresh(self.RING)
        monkeypatch.setattr(heat, "_problem", None)
        assert torch.equal(ef.heat_kernel(self.RING.clone(), self.X, 0.7), expected)

    def test_edges_and_weights_may_change_in_place(self):
        array = self.RING.numpy().copy()  # which torch does not hear of
        edges, weight = torch.from_numpy(array), torch.ones(6, dtype=F64)
        first = self.fresh(edges, self.X, 0.7, "rw", weight)
        array[:, 0] = [0, 3]
        assert torch.equal(ef.heat_kernel(edges, self.X, 0.7, "rw", weight), self.fresh(edges, self.X, 0.7, "rw"))
        weight[0] = 5.0
        expected = self.fresh(edges.clone(), self.X, 0.7, "rw", weight.clone())
        ef.heat_kernel(edges, self.X, 0.7, "rw", torch.ones(6, dtype=F64))
        assert torch.equal(ef.heat_kernel(edges, self.X, 0.7, "rw", weight), expected)
        assert torch.equal(ef.heat_kernel(self.RING, self.X, 0.7, "rw", torch.ones(6, dtype=F64)), first)

    def test_laplacian_dtype_and_nodes_are_part_of_it(self):
        calls = [(self.X, "sym"), (self.X, "comb"), (self.X.float(), "comb"), (torch.eye(7, dtype=F64), "comb")]
        expected = [self.fresh(self.RING, x, 0.7, kind) for x, kind in calls]
        for (x, kind), z in zip(calls, expected, strict=True):
            assert torch.equal(ef.heat_kernel(self.RING, x, 0.7, kind), z)

    def test_weights_with_a_gradient_keep_it(self):
        weight = torch.ones(6, dtype=F64)
        ef.heat_kernel(self.RING, self.X, 0.7, edge_weight=weight)
        z = ef.heat_kernel(self.RING, self.X, 0.7, edge_weight=weight.requires_grad_())
        (grad,) = torch.autograd.grad(z[0, 1], weight)
        assert float(grad.abs().sum()) > 0

    def test_gradients_after_inference(self):
        with torch.inference_mode():
            self.fresh(self.RING)
        x = self.X.clone().requires_grad_()
        ef.heat_kernel(self.RING, x, 0.7).sum().backward()
        torch.testing.assert_close(x.grad, self.fresh(self.RING.flip(0), torch.ones_like(x)))

    def test_large_graphs_are_forgotten(self, monkeypatch):
        monkeypatch.setattr(heat, "REMEMBERED", 5)
        self.fresh(self.RING)
        monkeypatch.setattr(heat, "_problem", lambda *args: pytest.fail("asked again"))
        with pytest.raises(pytest.fail.Exception):
            ef.heat_kernel(self.RING, self.X, 0.7)


def test_neither_the_input_nor_the_weights_are_written_to():
    index, weight = edges_of(torch.ones(4, 4, dtype=F64))
    x = torch.randn(4, 2, dtype=F64, requires_grad=True)
    before, weight_before = x.detach().clone(), weight.clone()
    z = ef.heat_kernel(index, x, [0.0, 3.0], "rw", weight)
    for _ in range(2):  # what is saved for the backward pass survives it, too
        first = torch.autograd.grad(z.square().sum(), x, retain_graph=True)[0]
    torch.testing.assert_close(torch.autograd.grad(z.square().sum(), x)[0], first, rtol=0, atol=0)
    assert torch.equal(x, before)
    assert torch.equal(weight, weight_before)


# --- refusals --------------------------------------------------------------------------------------------------------

EDGES = torch.tensor([[0, 1], [1, 0]])
X = torch.ones(2, 1)


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((EDGES, X, 1.0, "normal"), {}, "Expected laplacian to be one of sym, rw, comb; got 'normal'."),
        ((EDGES, X, -1.0), {}, "Expected a finite time t of at least 0; got -1.0."),
        ((EDGES, X, float("nan")), {}, "Expected a finite time t of at least 0; got nan."),
        ((EDGES, X, [1.0, -1.0]), {}, "Expected finite times t of at least 0; got -1 among them."),
        ((EDGES, X, []), {}, "Expected t to be a number or a vector of times; got shape (0,)."),
        ((EDGES, X, "1"), {}, "Expected t to be a number, a tensor or a list of times; got str."),
        ((EDGES + 1, X, 1.0), {}, "Expected node indices from 0 to 1; got 1 to 2."),
        ((EDGES - 1, X, 1.0), {}, "Expected node indices from 0 to 1; got -1 to 0."),
        ((EDGES.int(), X, 1.0), {}, "Expected edge_index of dtype torch.int64; got torch.int32."),
        ((EDGES[0], X, 1.0), {}, "Expected edge_index of shape (2, E); got (2,)."),
        ((EDGES, X.long(), 1.0), {}, "Expected x of a real floating-point dtype; got torch.int64."),
        ((EDGES, X.half(), 1.0), {}, "Expected x of dtype torch.float32 or torch.float64; got torch.float16."),
        ((EDGES, X[..., None, None], 1.0), {}, "Expected x of shape (N,), (N, F) or (batch, N, F); got (2, 1, 1, 1)."),
        ((EDGES, X / 0, 1.0), {}, "Expected x to be finite; got NaN or infinity in it."),
        ((EDGES, X, 1.0, "sym", -torch.ones(2)), {}, "Expected non-negative edge weights; got negative ones."),
        ((EDGES, X, 1.0, "sym", torch.ones(3)), {}, "Expected edge_weight of shape (2,); got (3,)."),
        (
            (EDGES, X, 1.0, "sym", torch.ones(2) / 0),
            {},
            "Expected the edge weights to be finite; got NaN or infinity in it.",
        ),
        ((EDGES, X, 1.0, "sym", torch.ones(2).double()), {}, "Expected edge_weight of dtype torch.float32, as x; got"),
        (
            (EDGES, X.double(), 1.0, "sym", torch.full((2,), 1e-200, dtype=F64)),
            {},
            "Expected sums of edge weights between 1e-150 and 1e150; got 1e-200 to 1e-200.",
        ),
        ((EDGES, X, 1.0), {"tol": -1.0}, "Expected a finite tol of at least 0; got -1.0."),
        ((EDGES, X, 1.0), {"gradient": "none"}, "Expected gradient to be one of recompute, autograd; got 'none'."),
    ],
)
def test_refusals(arguments, options, message):
    with pytest.raises((ValueError, TypeError)) as caught:
        ef.heat_kernel(*arguments, **options)
    assert str(caught.value).startswith(message)
