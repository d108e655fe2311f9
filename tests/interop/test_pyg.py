"""Graphs of PyTorch Geometric: in, out, and their likelihoods."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import expmflow as ef
from expmflow import nn
from expmflow import transforms as T
from expmflow.interop import pyg
from expmflow.models import graph_flow

pytest.importorskip("torch_geometric")
from torch_geometric.data import Batch, Data
from torch_geometric.utils import get_laplacian, to_dense_adj, to_dense_batch

F64 = torch.float64


def random_graph(nodes: int, generator: torch.Generator, *, weighted: bool = False, symmetric: bool = True) -> Data:
    adjacency = torch.rand(nodes, nodes, generator=generator, dtype=F64) * (
        torch.rand(nodes, nodes, generator=generator) < 0.5
    )
    adjacency = adjacency + adjacency.T if symmetric else adjacency
    index = adjacency.nonzero().T
    data = Data(x=torch.randn(nodes, 2, generator=generator, dtype=F64), edge_index=index)
    if weighted:
        data.edge_weight = adjacency[index[0], index[1]]
    return data


@st.composite
def batches(draw):
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    sizes, weighted = draw(st.lists(st.integers(1, 6), min_size=1, max_size=4)), draw(st.booleans())
    symmetric = draw(st.booleans())
    return [random_graph(n, generator, weighted=weighted, symmetric=symmetric) for n in sizes]


def trained_like(flow: ef.Flow) -> ef.Flow:
    """Weights away from their first values, and nothing left to initialise."""
    torch.manual_seed(0)
    flow = flow.double()
    for parameter in flow.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return flow.eval()


def small_flow() -> ef.Flow:
    layers = [T.GraphConvExp(2), T.AffineCoupling(nn.GraphNetwork(1, 2, hidden=8), 2, dim=-1)]
    return trained_like(ef.Flow(T.Chain(layers), ef.distributions.NodeNormal((1, 2))))


@given(batches())
def test_agrees_with_the_other_librarys_own_padding(graphs):
    batch = Batch.from_data_list(graphs)
    x, (adjacency, mask) = pyg.from_pyg(batch)
    weight = batch.edge_weight if "edge_weight" in batch else torch.ones(batch.num_edges, dtype=F64)
    dense, real = to_dense_batch(batch.x, batch.batch, batch_size=len(graphs))
    assert torch.equal(x, dense)
    assert torch.equal(mask, real)
    expected = to_dense_adj(batch.edge_index, batch.batch, weight, batch_size=len(graphs), max_num_nodes=x.shape[1])
    torch.testing.assert_close(adjacency, expected)


@given(batches())
def test_round_trip(graphs):
    batch = Batch.from_data_list(graphs)
    back = pyg.to_pyg(*pyg.from_pyg(batch))
    assert torch.equal(back.x, batch.x)
    assert torch.equal(back.edge_index, batch.edge_index)
    assert torch.equal(back.batch, batch.batch)
    assert torch.equal(back.ptr, batch.ptr)
    expected = batch.edge_weight if "edge_weight" in batch else torch.ones(batch.num_edges, dtype=F64)
    torch.testing.assert_close(back.edge_weight, expected)
    for one, original in zip(back.to_data_list(), graphs, strict=True):
        assert torch.equal(one.x, original.x)


def test_a_copy_keeps_everything_but_the_features():
    data = random_graph(5, torch.Generator().manual_seed(0))
    data.y = torch.tensor([3.0])
    for original in (data, Batch.from_data_list([data, data])):
        x, _ = pyg.from_pyg(original)
        copy = pyg.to_pyg(2 * x, like=original)
        assert type(copy) is type(original)
        assert torch.equal(copy.x, 2 * original.x)
        assert torch.equal(copy.edge_index, original.edge_index)
        assert copy.y.tolist() == original.y.tolist()


@settings(max_examples=20)
@given(batches())
def test_a_batch_is_its_graphs_one_by_one(graphs):
    together = pyg.log_prob(FLOW, Batch.from_data_list(graphs))
    alone = torch.cat([pyg.log_prob(FLOW, graph) for graph in graphs])
    assert together.shape == (len(graphs),)
    torch.testing.assert_close(together, alone)


FLOW = small_flow()


def test_likelihoods_of_a_whole_model():
    """ActNorm, 1×1 and base included, the padded batch gives what dense graphs alone give."""
    generator = torch.Generator().manual_seed(0)
    graphs = [random_graph(n, generator, weighted=True) for n in (4, 1, 6)]
    flow = trained_like(graph_flow(6, 2, hidden=8, subflows=2))
    together = pyg.log_prob(flow, Batch.from_data_list(graphs))
    for graph, value in zip(graphs, together, strict=True):
        adjacency = to_dense_adj(graph.edge_index, edge_attr=graph.edge_weight, max_num_nodes=graph.num_nodes)
        torch.testing.assert_close(flow.log_prob(graph.x.unsqueeze(0), adjacency).squeeze(0), value)


def test_samples_come_back_as_graphs():
    generator = torch.Generator().manual_seed(0)
    batch = Batch.from_data_list([random_graph(n, generator) for n in (4, 2)])
    _, context = pyg.from_pyg(batch)
    samples = pyg.to_pyg(FLOW.sample(2, context), like=batch)
    assert samples.x.shape == batch.x.shape
    assert pyg.log_prob(FLOW, samples).isfinite().all()


def test_gradients_reach_features_and_weights():
    data = random_graph(4, torch.Generator().manual_seed(0), weighted=True)

    def likelihood(x, weight):
        return pyg.log_prob(FLOW, Data(x=x, edge_index=data.edge_index, edge_weight=weight))

    assert torch.autograd.gradcheck(likelihood, (data.x.requires_grad_(), data.edge_weight.requires_grad_()))


@settings(max_examples=20)
@given(batches())
def test_one_sparse_operator_is_the_padded_one(graphs):
    batch = Batch.from_data_list(graphs)
    theta0, theta1 = torch.randn(2, 2, 2, dtype=F64, generator=torch.Generator().manual_seed(0))
    sparse = ef.expm_apply(pyg.graph_operator(theta0, theta1, batch), batch.x.unsqueeze(0)).squeeze(0)
    x, (adjacency, mask) = pyg.from_pyg(batch)
    dense = ef.expm_apply(ef.GraphConvOperator(theta0, theta1, adjacency, mask=mask), x)
    torch.testing.assert_close(pyg.to_pyg(dense, like=batch).x, sparse)


@pytest.mark.parametrize("kind", ["sym", "rw", "comb"])
def test_heat_kernels_know_the_same_laplacians(kind):
    """Without self-loops and isolated nodes, where the other library decides differently."""
    index = torch.tensor([[0, 1, 1, 2, 2, 3, 3, 0], [1, 0, 2, 1, 3, 2, 0, 3]])
    weight = torch.tensor([1.0, 1, 2, 2, 0.5, 0.5, 3, 3], dtype=F64)
    other = get_laplacian(index, weight, None if kind == "comb" else kind, num_nodes=4)
    matrix = to_dense_adj(other[0], edge_attr=other[1])[0]
    x = torch.randn(4, 3, dtype=F64)
    torch.testing.assert_close(ef.heat_kernel(index, x, 1.3, kind, weight), torch.matrix_exp(-1.3 * matrix) @ x)


def test_heat_on_a_batch_is_heat_on_its_graphs():
    generator = torch.Generator().manual_seed(0)
    graphs = [random_graph(n, generator) for n in (4, 1, 6)]
    batch = Batch.from_data_list(graphs)
    z = ef.heat_kernel(batch.edge_index, batch.x, 2.0)
    alone = torch.cat([ef.heat_kernel(graph.edge_index, graph.x, 2.0) for graph in graphs])
    torch.testing.assert_close(z, alone)


def test_empty_graphs():
    none = torch.zeros(2, 0, dtype=torch.int64)
    lone, nobody = Data(x=torch.ones(1, 2), edge_index=none), Data(x=torch.ones(0, 2), edge_index=none)
    x, (adjacency, mask) = pyg.from_pyg(Batch.from_data_list([lone, nobody]))
    assert mask.tolist() == [[True], [False]]
    assert torch.equal(adjacency, torch.zeros(2, 1, 1))
    assert torch.equal(pyg.to_pyg(x, (adjacency, mask)).x, lone.x)


def test_the_package_does_not_need_the_other_library():
    code = "import sys; sys.modules['torch_geometric'] = None; import expmflow; expmflow.interop.pyg.from_pyg"
    subprocess.run([sys.executable, "-c", code], check=True)


EDGES = torch.tensor([[0, 1], [1, 0]])
X = torch.ones(2, 1)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (X, "Expected a Data or Batch with tensors x and edge_index; got Tensor."),
        (Data(x=X), "Expected a Data or Batch with tensors x and edge_index; got Data."),
        (Data(x=X.long(), edge_index=EDGES), "Expected the node features x of a real floating-point dtype; got"),
        (Data(x=X[:, 0], edge_index=EDGES), r"Expected node features x of shape \(nodes, F\); got \(2,\)."),
        (Data(x=X, edge_index=EDGES + 1), "Expected node indices from 0 to 1; got 1 to 2."),
        (Data(x=X, edge_index=EDGES[0]), r"Expected edge_index of shape \(2, E\) and dtype torch.int64; got"),
        (Data(x=X, edge_index=EDGES, edge_weight=torch.ones(3)), r"Expected edge_weight of shape \(2,\); got \(3,\)."),
        (Data(x=X, edge_index=EDGES, edge_weight=X[:, 0] / 0), "Expected edge_weight to be finite; got NaN"),
        (Data(x=X, edge_index=EDGES, batch=torch.tensor([0, 1])), "Expected edges within one graph of the batch; got"),
        (Data(x=X, edge_index=EDGES, batch=torch.tensor([1, 0])), "Expected a batch vector in ascending order; got"),
        (Data(x=X, edge_index=EDGES, batch=torch.tensor([0])), r"Expected a batch vector of shape \(2,\); got \(1,\)."),
    ],
)
def test_refusals(data, message):
    with pytest.raises((ValueError, TypeError), match=message):
        pyg.from_pyg(data)


def test_refusals_on_the_way_back():
    x, context = pyg.from_pyg(Data(x=X, edge_index=EDGES))
    for arguments, options, message in (
        ((X, context), {}, r"Expected x of shape \(graphs, N, F\); got \(2, 1\)."),
        ((x,), {}, "Expected either a context or like; got none."),
        ((x, context), {"like": Data(x=X, edge_index=EDGES)}, "Expected either a context or like; got both."),
        ((x, (context[0][:, :1], context[1])), {}, r"Expected an adjacency of shape \(1, 2, 2\); got \(1, 1, 2\)."),
        ((x, (context[0], None)), {}, r"Expected a mask of shape \(1, 2\); got NoneType."),
        ((x[:, :1],), {"like": Data(x=X, edge_index=EDGES)}, "Expected x for the nodes of 1 graphs; got shape"),
    ):
        with pytest.raises((ValueError, TypeError), match=message):
            pyg.to_pyg(*arguments, **options)


def test_a_base_that_counts_padding_is_refused():
    flow = ef.Flow(T.GraphConvExp(2), ef.distributions.StandardNormal((3, 2)))
    generator = torch.Generator().manual_seed(0)
    batch = Batch.from_data_list([random_graph(3, generator), random_graph(2, generator)])
    with pytest.raises(ValueError, match="Expected a base that knows of padding, as NodeNormal; got"):
        pyg.log_prob(flow.double(), batch)
