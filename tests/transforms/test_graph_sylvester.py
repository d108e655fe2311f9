"""The Sylvester flow on graphs: what its inner function sees, equivariance, padding, and its inverse."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor, nn

from expmflow import transforms as T
from expmflow.nn import GraphInner
from expmflow.nn.graph_autoregressive import graph_degrees
from graph_sylvester_cases import CASES
from transform_registry import draw, points, randomise

F64 = torch.float64
FEATURES = 3


def graph(name: str, n: int, *, symmetric: bool = True, loops: bool = False) -> Tensor:
    """Weighted edges between about half of the pairs."""
    weights = draw(name, n, n).abs() * (draw(f"{name} edges", n, n) > 0)
    weights = weights + weights.T if symmetric else weights
    return weights if loops else weights * (1 - torch.eye(n, dtype=F64))


GRAPHS = {
    "weighted": graph("weighted", 5),
    "directed": graph("directed", 4, symmetric=False),
    "self-loops": graph("self-loops", 4, loops=True),
    "directed with self-loops": graph("both", 3, symmetric=False, loops=True),
    "complete": 1 - torch.eye(4, dtype=F64),
    "no edges": torch.zeros(3, 3, dtype=F64),
    "pair and isolated node": torch.tensor([[0, 2, 0], [2, 0, 0], [0, 0, 0]], dtype=F64),
    "one node": torch.zeros(1, 1, dtype=F64),
    "one node with a self-loop": torch.ones(1, 1, dtype=F64),
}


def layer(features: int = FEATURES, hidden: int = 8, **options) -> T.GraphSylvester:
    """Weights away from where they start."""
    torch.manual_seed(0)
    made = T.GraphSylvester(features, hidden, **options).double().eval()
    randomise(made)
    return made


def dependence(inner: GraphInner, adjacency: Tensor | None, nodes: int, features: int) -> Tensor:
    """Whether f of a node's feature depends on a node's feature: `(N, F, N, F)`, at a few generic points."""
    event = (nodes, features)
    seen = torch.zeros(*event, *event, dtype=torch.bool)
    for x in draw("points", 5, 1, *event):
        seen |= torch.autograd.functional.jacobian(lambda x: inner(x, adjacency)[0][0], x)[:, :, 0] != 0
    return seen


class TestInner:
    @pytest.mark.parametrize("reverse", [False, True])
    @pytest.mark.parametrize("name", GRAPHS)
    def test_a_feature_sees_those_before_it_of_all_neighbours(self, name, reverse):
        """All of them, nothing else, and of its own kind only itself."""
        adjacency = GRAPHS[name]
        n = len(adjacency)
        inner = layer(hidden=32, reverse=reverse).inner  # wide, so that not all units that know an entry are off
        seen = dependence(inner, adjacency, n, FEATURES)
        for i, k, j, m in itertools.product(range(n), range(FEATURES), range(n), range(FEATURES)):
            earlier = m > k if reverse else m < k
            near = i == j or bool(adjacency[i, j] > 0)
            assert bool(seen[i, k, j, m]) == ((earlier and near) or (i, k) == (j, m)), (i, k, j, m)

    @pytest.mark.parametrize("name", GRAPHS)
    def test_is_one_that_theorem_2_allows(self, name):
        layer().check_inner(draw("u", 4, len(GRAPHS[name]), FEATURES), GRAPHS[name])

    def test_is_one_that_theorem_2_allows_graph_by_graph(self):
        adjacency = torch.stack([graph(f"graph {i}", 4) for i in range(4)])  # as many graphs as nodes
        u, mask = draw("u", 4, 4, FEATURES), draw("mask", 4, 4) > -0.5
        for context in (adjacency, adjacency[0], (adjacency, mask), (adjacency[0], mask), (None, mask), None):
            layer().check_inner(u, context)

    @pytest.mark.parametrize("features", range(1, 12))
    def test_hidden_units_know_every_number_of_features(self, features):
        degrees = graph_degrees(features, 40)
        assert set(degrees.tolist()) == set(range(features))

    def test_one_feature_depends_on_itself_and_the_number_of_neighbours(self):
        inner, path = layer(1).inner, torch.tensor([[0, 1, 0], [1, 0, 1], [0, 1, 0]], dtype=F64)
        seen = dependence(inner, path, 3, 1).reshape(3, 3)
        assert torch.equal(seen, torch.eye(3, dtype=torch.bool))
        ends_middle = inner(torch.zeros(1, 3, 1, dtype=F64), path)[0].flatten()
        assert ends_middle[0] == ends_middle[2] != ends_middle[1]

    @pytest.mark.parametrize("gamma", [0.1, 0.5, 0.99])
    def test_diagonal_is_bounded_by_gamma(self, gamma):
        inner = GraphInner(2, 8, gamma=gamma).double()
        with torch.no_grad():
            for parameter in inner.parameters():
                parameter.normal_(std=3.0)
        _, diagonal = inner(3 * draw("u", 500, 3, 2))
        assert gamma * 0.5 < diagonal.detach().abs().max() <= gamma


@pytest.mark.parametrize("name", GRAPHS)
def test_renumbering_the_nodes_renumbers_the_result(name):
    adjacency = GRAPHS[name]
    n, made = len(adjacency), layer()
    x = draw("equivariance", 2, n, FEATURES)
    for direction in (made, made.inverse):
        z, logdet = direction(x, adjacency)
        for order in itertools.islice(itertools.permutations(range(n)), 1, 6):
            order = list(order)
            renumbered, same = direction(x[:, order], adjacency[order][:, order])
            torch.testing.assert_close(renumbered, z[:, order], rtol=0, atol=1e-11)
            torch.testing.assert_close(same, logdet, rtol=0, atol=1e-11)


def test_no_graph_is_the_complete_graph():
    made, x = layer(), draw("complete", 2, 4, FEATURES)
    for direction in (made, made.inverse):
        torch.testing.assert_close(direction(x), direction(x, GRAPHS["complete"]), rtol=0, atol=1e-12)


def padded(names: list[str], nodes: int) -> tuple[Tensor, Tensor, Tensor]:
    """Features, adjacencies and mask of graphs in one batch; the padding is filled with features and edges."""
    x = draw("padded features", len(names), nodes, FEATURES)
    adjacency, mask = torch.ones(len(names), nodes, nodes, dtype=F64), torch.zeros(len(names), nodes, dtype=torch.bool)
    for i, name in enumerate(names):
        n = len(GRAPHS[name])
        adjacency[i, :n, :n] = GRAPHS[name]
        mask[i, :n] = True
    return x, adjacency, mask


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("nodes", [5, 7, 9])
def test_a_graph_does_not_know_its_companions_nor_its_padding(nodes, training):
    """Alone it gives the same nodes, the same log-determinant and the same inverse; nine graphs of up to nine nodes."""
    names = list(GRAPHS)
    x, adjacency, mask = padded(names, nodes)
    made = layer().train(training)
    for direction in (made, made.inverse):
        z, logdet = direction(x, (adjacency, mask))
        for i, name in enumerate(names):
            n = len(GRAPHS[name])
            alone, own = direction(x[i : i + 1, :n], GRAPHS[name])
            torch.testing.assert_close(z[i : i + 1, :n], alone, rtol=0, atol=1e-11)
            torch.testing.assert_close(logdet[i : i + 1], own, rtol=0, atol=1e-11)
            assert torch.equal(z[i, n:], x[i, n:])


def test_padding_gets_no_gradient_and_gives_none():
    x, adjacency, mask = padded(["weighted", "pair and isolated node"], 7)
    made = layer()
    x.requires_grad_()
    for direction in (made, made.inverse):
        grads = []
        for filling in (x[~mask].detach(), 100.0):
            x.data[~mask] = filling
            z, logdet = direction(x, (adjacency, mask))
            grads.append(torch.autograd.grad(z[mask].square().sum() + logdet.sum(), [x, *made.parameters()]))
        torch.testing.assert_close(grads[1], grads[0], rtol=1e-9, atol=1e-9)
        assert (grads[0][0][~mask] == 0).all()
        assert (grads[0][0][mask] != 0).all()


class TestInverse:
    def test_a_shared_graph_of_as_many_nodes_as_rows_is_not_cut(self):
        adjacency, made = graph("directed", 4, symmetric=False), layer()
        x = draw("x", 4, 4, FEATURES)
        x[1:3] *= 1e-3
        with torch.no_grad():
            z, _ = made(x, adjacency)
            back, _ = made.inverse(z, adjacency)
        torch.testing.assert_close(back, x, rtol=0, atol=1e-11)

    @pytest.mark.parametrize("kind", ["batched", "masked", "complete masked"])
    def test_rows_that_are_still_sought_keep_their_own_graph(self, kind):
        """Far out f is flat, and the row is found sooner than others."""

        class Watched(nn.Module):
            def __init__(self, inner: GraphInner) -> None:
                super().__init__()
                self.inner, self.rows = inner, []
                self.context_rows = inner.context_rows

            def forward(self, u, context):
                self.rows.append(len(u))
                return self.inner(u, context)

        adjacency = torch.stack([graph(f"graph {i}", 4) for i in range(6)])
        mask = torch.ones(6, 4, dtype=torch.bool)
        mask[2, 1:] = mask[5, 2:] = False
        context = {"batched": adjacency, "masked": (adjacency, mask), "complete masked": (None, mask)}[kind]
        made = layer()
        watched = made.inner = Watched(made.inner)
        x = draw("x", 6, 4, FEATURES) * torch.tensor([1, 300, 1, 1, 300, 1], dtype=F64)[:, None, None]
        with torch.no_grad():
            z, _ = made(x, context)
            watched.rows.clear()
            back, _ = made.inverse(z, context)
        torch.testing.assert_close(back, x, rtol=1e-11, atol=1e-9)
        assert len(set(watched.rows)) > 1  # not all were sought to the end

    @pytest.mark.parametrize("features", [1, 2, 3])
    def test_takes_a_few_iterations_per_feature(self, features):
        """In the coordinates of the basis each feature is a scalar equation once those before it are known."""
        made = layer(features)
        with torch.no_grad():
            z, _ = made(draw("x", 50, 6, features))
            made.inverse(z)
        assert made.last_iterations <= 8 * features

    @pytest.mark.parametrize("name", ["graph-sylvester-batched", "graph-sylvester-masked", "graph-sylvester-complete"])
    def test_gradients_in_z_and_in_every_parameter(self, name):
        case = CASES.ready(name)
        with torch.no_grad():
            z, _ = case.layer(points(name, case), case.context)
        keys = [f"layer.{key}" for key, _ in case.layer.named_parameters()]

        def inverse(z: Tensor, *values: Tensor) -> tuple[Tensor, Tensor]:
            parameters = dict(zip(keys, values, strict=True))
            return torch.func.functional_call(_Inverse(case.layer), parameters, (z, case.context))

        values = [value.detach().clone().requires_grad_() for value in case.layer.parameters()]
        assert torch.autograd.gradcheck(inverse, (z.requires_grad_(), *values), fast_mode=True)

    def test_gradients_in_the_edge_weights(self):
        made, adjacency = layer(2), (graph("weighted", 4, symmetric=False, loops=True) + 0.1).requires_grad_()
        z = draw("z", 2, 4, 2)
        for direction in (made, made.inverse):
            assert torch.autograd.gradcheck(lambda a, run=direction: run(z, a), adjacency, fast_mode=True)


class _Inverse(nn.Module):
    def __init__(self, layer: T.Transform) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, z: Tensor, context: object) -> tuple[Tensor, Tensor]:
        return self.layer.inverse(z, context)


@pytest.mark.parametrize("features", [2, 3])
def test_starts_near_the_identity_and_learns_from_there(features):
    torch.manual_seed(0)
    made, x = T.GraphSylvester(features, 16), draw("start", 8, 5, features).float()
    z, logdet = made(x)
    assert 0 < (z - x).detach().norm() < 0.1 * x.norm()
    (z.square().sum() - logdet.sum()).backward()
    assert all((parameter.grad != 0).any() for parameter in made.parameters())


def test_float32_through_ten_layers_and_back():
    torch.manual_seed(0)
    chain = T.Chain([T.GraphSylvester(2, 16, reverse=i % 2 == 1) for i in range(10)])
    randomise(chain)
    x = draw("ten layers", 16, 5, 2).float()
    with torch.no_grad():
        z, logdet = chain.eval()(x)
        back, logdet_back = chain.inverse(z)
        again, _ = chain(back)
    assert (z - x).norm() > x.norm()
    assert (again - z).norm() <= 1e-5 * z.norm()
    assert (back - x).norm() <= 3e-3 * x.norm()  # these layers stretch what is off in z by several hundred
    torch.testing.assert_close(logdet_back, -logdet, rtol=1e-3, atol=1e-3)


def test_no_nodes_are_nothing_to_change():
    z, logdet = layer()(torch.zeros(2, 0, FEATURES, dtype=F64), torch.zeros(0, 0, dtype=F64))
    assert z.shape == (2, 0, FEATURES)
    assert torch.equal(logdet, torch.zeros(2, dtype=F64))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: T.GraphSylvester(0), "features of at least 1"),
        (lambda: T.GraphSylvester(2, 0), "hidden of at least 1"),
        (lambda: T.GraphSylvester(2, gamma=1.0), "gamma between 0 and 1"),
        (lambda: T.GraphSylvester(2, reflections=0), "reflections of at least 1"),
        (lambda: T.GraphSylvester(2, max_neighbours=0), "max_neighbours of at least 1"),
        (lambda: T.GraphSylvester(2, max_iterations=0), "max_iterations of at least 1"),
    ],
)
def test_wrong_arguments(make, message):
    with pytest.raises(ValueError, match=f"^Expected {message}; got "):
        make()


@pytest.mark.parametrize("context", [torch.ones(4, 4), (torch.ones(4, 4), torch.ones(2, 4, dtype=torch.bool))])
def test_graph_of_another_dtype(context):
    with pytest.raises(TypeError, match=r"^GraphSylvester: Expected .*float64.*; got torch.float32"):
        layer()(draw("graph dtype", 2, 4, FEATURES), context)
