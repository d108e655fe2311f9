"""The graph convolution exponential: its norm rule, graph by graph, and batches that do not mix."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from expmflow import transforms as T
from expmflow.nn import MLP, GraphNetwork
from transform_registry import draw, randomise

F64 = torch.float64
FEATURES = 3


def path(n: int) -> Tensor:
    line = torch.diag(torch.ones(n - 1, dtype=F64), 1)
    return line + line.T


def complete(n: int) -> Tensor:
    return 1 - torch.eye(n, dtype=F64)


def star(n: int) -> Tensor:
    graph = torch.zeros(n, n, dtype=F64)
    graph[0, 1:] = graph[1:, 0] = 1
    return graph


def weighted(n: int) -> Tensor:
    graph = draw("weighted graph", n, n).abs().triu(1) * (draw("edges", n, n) > 0)
    return graph + graph.T


GRAPHS = {  # and the largest number of neighbours
    "path": (path(5), 2),
    "complete": (complete(4), 3),
    "star": (star(6), 5),
    "pair": (complete(2), 1),
    "no edges": (torch.zeros(3, 3, dtype=F64), 1),
    "weighted": (weighted(6), int((weighted(6) > 0).sum(1).max())),
}


def layer(size: float = 4.0, **options) -> T.GraphConvExp:
    """Weights far beyond the rule, or below it."""
    made = T.GraphConvExp(FEATURES, **options).double().eval()
    with torch.no_grad():
        made.theta0.copy_(size * draw("theta0", FEATURES, FEATURES))
        made.theta1.copy_(size * draw("theta1", FEATURES, FEATURES))
    return made


def norm(theta: Tensor) -> float:
    return float(torch.linalg.matrix_norm(theta.detach(), ord=2))


@pytest.mark.parametrize("name", GRAPHS)
def test_norm_rule(name):
    """‖θ0‖ ≤ 1 / max neighbours and ‖θ1‖ ≤ 1, met with equality by weights that are too large."""
    graph, neighbours = GRAPHS[name]
    op = layer().operator(graph)
    assert norm(op.theta0) == pytest.approx(1 / neighbours)
    assert norm(op.theta1) == pytest.approx(1)
    true = torch.linalg.matrix_norm(op.dense((len(graph), FEATURES)).detach(), ord=2)
    assert float(true) <= 1 / neighbours + 1 + 1e-12


def test_small_weights_are_only_divided():
    made = layer(size=0.1)
    op = made.operator(path(4))
    torch.testing.assert_close(op.theta0, made.theta0 / 2)
    torch.testing.assert_close(op.theta1, made.theta1)


@pytest.mark.parametrize("given", [2, 7])
def test_a_given_maximum_replaces_the_count(given):
    for graph in (path(5), complete(4), torch.stack([path(4), complete(4)])):
        op = layer(max_neighbours=given).operator(graph)
        assert op.theta0.ndim == 2
        assert norm(op.theta0) == pytest.approx(1 / given)


def test_the_rule_is_each_graphs_own():
    batch = torch.stack([path(4), complete(4), torch.zeros(4, 4, dtype=F64)])
    theta0 = layer().operator(batch).theta0
    assert [norm(theta) for theta in theta0] == pytest.approx([1 / 2, 1 / 3, 1])


def padded(names: list[str], nodes: int) -> tuple[Tensor, Tensor, Tensor]:
    """Features, adjacencies and mask of graphs in one batch; the padding is filled with features and edges."""
    x = draw("padded features", len(names), nodes, FEATURES)
    adjacency, mask = torch.ones(len(names), nodes, nodes, dtype=F64), torch.zeros(len(names), nodes, dtype=torch.bool)
    for i, name in enumerate(names):
        graph = GRAPHS[name][0]
        adjacency[i, : len(graph), : len(graph)] = graph
        mask[i, : len(graph)] = True
    return x, adjacency, mask


@pytest.mark.parametrize("options", [{}, {"max_neighbours": 3}, {"gradient": "recompute"}], ids=str)
@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
def test_a_graph_does_not_know_its_companions(training, options):
    """Alone and without padding it gives the same nodes, the same log-determinant and the same inverse."""
    names = list(GRAPHS)
    x, adjacency, mask = padded(names, 7)
    made = layer(**options).train(training)
    z, logdet = made(x, (adjacency, mask))
    back, logdet_back = made.inverse(x, (adjacency, mask))
    for i, name in enumerate(names):
        graph = GRAPHS[name][0]
        n = len(graph)
        alone, own = x[i : i + 1, :n], graph[None]
        for (batch, det), (one, one_det) in (
            ((z, logdet), made(alone, own)),
            ((back, logdet_back), made.inverse(alone, own)),
        ):
            torch.testing.assert_close(batch[i : i + 1, :n], one, rtol=0, atol=1e-12)
            torch.testing.assert_close(det[i : i + 1], one_det, rtol=0, atol=1e-12)
            assert torch.equal(batch[i, n:], x[i, n:])  # padding is left as it was


def test_padding_gets_no_gradient_and_gives_none():
    x, adjacency, mask = padded(["path", "pair"], 7)
    made = layer()
    x.requires_grad_()
    made(x, (adjacency, mask))[0][mask].square().sum().backward()
    assert (x.grad[~mask] == 0).all()
    assert (x.grad[mask] != 0).all()
    grads = [p.grad.clone() for p in made.parameters()]
    made.zero_grad()
    x.data[~mask] = 100.0
    made(x, (adjacency, mask))[0][mask].square().sum().backward()
    torch.testing.assert_close([p.grad for p in made.parameters()], grads, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", GRAPHS)
def test_renumbering_the_nodes_renumbers_the_result(name):
    graph = GRAPHS[name][0]
    n = len(graph)
    x, made = draw("equivariance", 2, n, FEATURES), layer()
    z, logdet = made(x, graph)
    for order in itertools.islice(itertools.permutations(range(n)), 1, 6):
        order = list(order)
        renumbered, same = made(x[:, order], graph[order][:, order])
        torch.testing.assert_close(renumbered, z[:, order], rtol=0, atol=1e-12)
        torch.testing.assert_close(same, logdet, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", GRAPHS)
def test_logdet_is_the_number_of_nodes_times_the_trace(name):
    """The paper's rule, for graphs without self-loops."""
    graph, neighbours = GRAPHS[name]
    made = layer()
    _, logdet = made(draw("trace", 2, len(graph), FEATURES), graph)
    theta0 = (made.theta0 / norm(made.theta0) / neighbours).trace()
    torch.testing.assert_close(logdet, (len(graph) * theta0).expand(2), rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", GRAPHS)
def test_sparse_and_dense_graphs_agree(name):
    graph = GRAPHS[name][0]
    x, made = draw("sparse", 2, len(graph), FEATURES), layer()
    for direction in (made, made.inverse):
        torch.testing.assert_close(direction(x, graph.to_sparse()), direction(x, graph), rtol=0, atol=1e-12)


def test_an_empty_graph_has_no_nodes_to_change():
    z, logdet = layer()(torch.zeros(2, 0, FEATURES, dtype=F64), torch.zeros(0, 0, dtype=F64))
    assert z.shape == (2, 0, FEATURES)
    assert torch.equal(logdet, torch.zeros(2, dtype=F64))


@pytest.mark.parametrize("terms", [None, 4])
@pytest.mark.parametrize("gradient", ["autograd", "recompute"])
def test_many_rows_of_a_small_graph_are_each_row_by_itself(gradient, terms):
    """A large batch goes through one matrix, a small one through products with the graph."""
    layer = T.GraphConvExp(2, gradient=gradient, terms=terms).double()
    randomise(layer)
    x, weights = draw("many rows", 20, 4, 2).requires_grad_(), list(layer.parameters())
    direction = draw("direction", 20, 4, 2)
    for context in (None, path(4), star(4).triu()):
        together = layer(x, context)[0]
        apart = torch.cat([layer(row, context)[0] for row in x.split(5)])
        torch.testing.assert_close(together, apart, rtol=1e-12, atol=1e-12)
        grads = [torch.autograd.grad((z * direction).sum(), [x, *weights]) for z in (together, apart)]
        torch.testing.assert_close(*grads, rtol=1e-11, atol=1e-11)
        if terms is None:  # a series cut short is not inverted by another
            torch.testing.assert_close(layer.inverse(together, context)[0], x, rtol=0, atol=1e-11)


def test_stored_zeros_are_no_edges():
    index, values = torch.tensor([[0, 0, 0, 1, 2, 3], [1, 2, 3, 0, 0, 0]]), torch.tensor([1.0, 0.0, 0.0, 1.0, 0.0, 0.0])
    sparse, x = torch.sparse_coo_tensor(index, values, (4, 4), check_invariants=True), draw("x", 2, 4, 2).float()
    exponential = T.GraphConvExp(2)
    randomise(exponential)
    for found, expected in zip(exponential(x, sparse), exponential(x, sparse.to_dense()), strict=True):
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(
    "coupling",
    [
        lambda: T.AffineCoupling(MLP(1, 4, hidden=(8,)), 3, dim=-1),
        lambda: T.MixtureCoupling(GraphNetwork(1, 16, hidden=6), 3, components=2, dim=-1),
    ],
    ids=["affine", "mixture"],
)
def test_padding_does_not_move_whatever_the_network_says(coupling):
    moving, x = coupling().double(), draw("x", 2, 9, 3)
    randomise(moving)
    mask = torch.arange(9) < torch.tensor([[4], [9]])
    if isinstance(moving.net, MLP):
        moving.net.forward = lambda x, context, run=moving.net.forward: run(x)  # type: ignore[method-assign]
    for run in (moving, moving.inverse):
        padded, logdet = run(x, (None, mask))
        alone, its = run(x[:1, :4], (None, mask[:1, :4]))
        torch.testing.assert_close(padded[0, :4], alone[0])
        torch.testing.assert_close(logdet[0], its[0])
        assert torch.equal(padded[0, 4:], x[0, 4:])
