"""The graph convolution against I ⊗ θ0ᵀ + Â ⊗ θ1ᵀ, in all the ways a graph can be given."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import expmflow as ef
from expmflow.operators.sparse import Pattern
from graph_cases import csr
from reference import graph_matrix, lambda_max, matrix_of, normalised_adjacency, sigma_max


@st.composite
def graphs(draw):
    """θ0, θ1 and an adjacency `(N, N)`: weighted or not, directed or not, with self-loops and isolated nodes."""
    nodes, features = draw(st.integers(1, 6)), draw(st.integers(1, 3))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    dtype = draw(st.sampled_from([torch.float64, torch.float32]))
    present = torch.rand(nodes, nodes, generator=generator) < draw(st.sampled_from([0.2, 0.5, 1.0]))
    adjacency = present.to(dtype)
    if draw(st.booleans()):
        adjacency = adjacency * torch.rand(nodes, nodes, generator=generator, dtype=dtype)
    if draw(st.booleans()):
        adjacency = adjacency + adjacency.T
    if draw(st.booleans()):
        adjacency = adjacency * (1 - torch.eye(nodes, dtype=dtype))
    theta0, theta1 = torch.randn(2, features, features, generator=generator, dtype=dtype)
    return theta0, theta1, adjacency


def in_every_form(theta0, theta1, adjacency):
    """The same operator from a dense, a sparse (two layouts), a batched and a masked adjacency, and from edges."""
    edges = adjacency.nonzero().T
    every = torch.ones(1, len(adjacency), dtype=torch.bool)
    return {
        "dense": ef.GraphConvOperator(theta0, theta1, adjacency),
        "coo": ef.GraphConvOperator(theta0, theta1, adjacency.to_sparse()),
        "csr": ef.GraphConvOperator(theta0, theta1, csr(adjacency)),
        "batched": ef.GraphConvOperator(theta0, theta1, adjacency.unsqueeze(0)),
        "masked": ef.GraphConvOperator(theta0, theta1, adjacency, mask=every),
        "edges": ef.GraphConvOperator.from_edge_index(
            theta0, theta1, edges, len(adjacency), adjacency[edges[0], edges[1]]
        ),
    }


@given(graphs())
def test_products_trace_and_bounds(graph):
    theta0, theta1, adjacency = graph
    dtype, event = theta0.dtype, (len(adjacency), len(theta0))
    expected = graph_matrix(theta0, theta1, normalised_adjacency(adjacency))
    rounding = 20 * torch.finfo(dtype).eps * float(theta0.double().norm() + theta1.double().norm())
    for op in in_every_form(*graph).values():
        for operator, matrix in ((op, expected), (op.adjoint(), expected.T)):
            twin = matrix_of(operator, event, dtype).double().reshape(expected.shape)
            torch.testing.assert_close(twin, matrix, rtol=0, atol=rounding)
        trace = float(op.trace(event).reshape(()))
        assert trace == pytest.approx(float(expected.trace()), abs=rounding * len(expected))
        rounded = op.graph.matmul(torch.eye(event[0], dtype=dtype)[None])[0]  # Â as this very operator holds it
        exact = graph_matrix(theta0, theta1, rounded)
        assert float(op.norm_bound(event)) >= sigma_max(exact) * (1 - 1e-13)
        assert float(op.log_norm_bound(event)) >= lambda_max(exact) - 1e-13 * sigma_max(exact)


@given(graphs())
def test_symmetric_graphs_have_tight_bounds(graph):
    """‖Â‖ ≤ 1, so neither weights nor degrees loosen the bound ‖θ0‖ + ‖θ1‖."""
    theta0, theta1, adjacency = graph
    limit = (sigma_max(theta0) + sigma_max(theta1)) * (1 + 1e-11 + 10 * torch.finfo(theta0.dtype).eps)
    for op in in_every_form(theta0, theta1, adjacency + adjacency.T).values():
        assert float(op.norm_bound((len(adjacency), len(theta0)))) <= limit


def test_asymmetric_graphs_can_exceed_one():
    """Node 0 hears of all others, each of which has a single edge: ‖Â‖ > 1, and the bound knows."""
    adjacency = torch.zeros(5, 5, dtype=torch.float64)
    adjacency[1:, 0] = 1
    adjacency[0, 0] = 1
    one = torch.ones(1, 1, dtype=torch.float64)
    op = ef.GraphConvOperator(0 * one, one, adjacency)
    truth = sigma_max(normalised_adjacency(adjacency))
    assert truth == pytest.approx(5**0.5)
    assert float(op.norm_bound((5, 1))) >= truth


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("change", ["none", "an edge missing", "a weight off"])
def test_one_edge_decides_whether_a_sparse_graph_is_symmetric(dtype, change):
    generator = torch.Generator().manual_seed(0)
    upper = torch.triu(torch.rand(40, 40, generator=generator, dtype=dtype), 1)
    adjacency = torch.where(upper > 0.7, upper, 0)
    adjacency = adjacency + adjacency.T
    row, col = adjacency.nonzero()[17]
    if change == "an edge missing":
        adjacency[row, col] = 0
    if change == "a weight off":
        adjacency[row, col] *= 1.001
    rows, cols = adjacency.nonzero().unbind(1)
    sums, symmetric = Pattern(rows, cols, 40).row_sums(adjacency[rows, cols])
    assert symmetric == (change == "none")
    torch.testing.assert_close(sums, adjacency.double().sum(1))


def test_parallel_edges_add_up_and_order_does_not_matter():
    theta0, theta1 = torch.randn(2, 2, 2, dtype=torch.float64)
    adjacency = torch.tensor([[0.0, 3.0, 0.0], [1.0, 0.0, 0.5], [0.0, 0.0, 2.0]], dtype=torch.float64)
    edges = torch.tensor([[2, 0, 1, 1, 0], [2, 1, 2, 0, 1]])
    weight = torch.tensor([2.0, 1.0, 0.5, 1.0, 2.0], dtype=torch.float64)
    op = ef.GraphConvOperator.from_edge_index(theta0, theta1, edges, 3, weight)
    expected = graph_matrix(theta0, theta1, normalised_adjacency(adjacency))
    torch.testing.assert_close(matrix_of(op, (3, 2), torch.float64), expected)


def test_edges_without_weights_weigh_one():
    theta0, theta1 = torch.randn(2, 2, 2)
    edges = torch.tensor([[0, 1, 1, 2], [1, 0, 2, 1]])
    bare = ef.GraphConvOperator.from_edge_index(theta0, theta1, edges, 4)
    ones = ef.GraphConvOperator.from_edge_index(theta0, theta1, edges, 4, torch.ones(4))
    x = torch.randn(3, 4, 2)
    torch.testing.assert_close(bare(x), ones(x), rtol=0, atol=0)


def test_padded_batch_is_its_graphs_one_by_one():
    """Products, traces and exponentials of graphs of 2, 4 and 3 nodes in one batch; padding stays as it was."""
    sizes, dtype = [2, 4, 3], torch.float64
    theta0, theta1 = 0.5 * torch.randn(2, 2, 2, dtype=dtype)
    adjacency = torch.rand(3, 4, 4, dtype=dtype)  # with weights in the padding too: the mask removes them
    mask = torch.arange(4) < torch.tensor(sizes)[:, None]
    op = ef.GraphConvOperator(theta0, theta1, adjacency, mask=mask)
    x = torch.randn(3, 4, 2, dtype=dtype)
    y, z, traces = op(x), ef.expm_apply(op, x), op.trace((4, 2))
    for i, n in enumerate(sizes):
        alone = ef.GraphConvOperator(theta0, theta1, adjacency[i, :n, :n])
        torch.testing.assert_close(y[i, :n], alone(x[i : i + 1, :n])[0])
        torch.testing.assert_close(z[i, :n], ef.expm_apply(alone, x[i : i + 1, :n])[0])
        torch.testing.assert_close(traces[i], alone.trace((n, 2)))
        assert torch.equal(y[i, n:], torch.zeros_like(y[i, n:]))
        assert torch.equal(z[i, n:], x[i, n:])


@pytest.mark.parametrize("form", ["dense", "edges"])
def test_gradients_reach_the_edge_weights(form):
    theta0, theta1 = torch.randn(2, 2, 2, dtype=torch.float64)
    edges = torch.tensor([[0, 1, 1, 2, 2], [1, 0, 2, 1, 2]])
    weight = torch.rand(5, dtype=torch.float64).add(0.1).requires_grad_()
    x = torch.randn(2, 4, 2, dtype=torch.float64)

    def exponential(w):
        if form == "edges":
            return ef.expm_apply(ef.GraphConvOperator.from_edge_index(theta0, theta1, edges, 4, w), x, terms=4)
        adjacency = torch.zeros(4, 4, dtype=torch.float64).index_put((edges[0], edges[1]), w)
        return ef.expm_apply(ef.GraphConvOperator(theta0, theta1, adjacency), x, terms=4)

    assert torch.autograd.gradcheck(exponential, weight)


def test_sparse_memory_is_linear_in_the_edges():
    """A million nodes in a ring: their dense adjacency would take four terabytes."""
    nodes = 1_000_000
    ring = torch.arange(nodes)
    edges = torch.stack([ring, ring.roll(1)])
    one = torch.ones(1, 1)
    op = ef.GraphConvOperator.from_edge_index(-one, one, torch.cat([edges, edges.flip(0)], dim=1), nodes)
    warm = torch.zeros(1, nodes, 1)
    warm[0, 0] = 1.0
    cooled = ef.expm_apply(op, warm)
    assert float(cooled.sum()) == pytest.approx(1, abs=1e-5)
    assert float(cooled.min()) >= 0
    assert float(op.trace((nodes, 1))) == -nodes


def test_sparse_graphs_without_nodes_and_in_other_dtypes():
    theta = torch.eye(2)
    none = ef.GraphConvOperator.from_edge_index(theta, theta, torch.zeros(2, 0, dtype=torch.int64), 0)
    with torch.no_grad():
        assert none(torch.zeros(3, 0, 2)).shape == (3, 0, 2)
    coarse, edges = theta.bfloat16(), torch.tensor([[0, 1], [1, 0]])
    with pytest.raises(TypeError, match=r"Expected a sparse graph in torch.float32 or torch.float64; got"):
        ef.GraphConvOperator.from_edge_index(coarse, coarse, edges, 2)
