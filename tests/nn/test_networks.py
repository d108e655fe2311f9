"""The networks inside couplings: where they start, what they see, and that they see it right."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from expmflow import nn
from expmflow import transforms as T
from transform_registry import draw, randomise

F64 = torch.float64

COUPLINGS = {
    "densenet": (lambda: T.AffineCoupling(nn.DenseNet(2, 4, growth=4), 4), (4, 3, 3), None),
    "densenet context": (
        lambda: T.AffineCoupling(nn.DenseNet(2, 4, growth=4, context_channels=2), 4),
        (4, 3, 3),
        draw("map", 3, 2, 3, 3),
    ),
    "mlp": (lambda: T.AffineCoupling(nn.MLP(2, 4), 4), (4,), None),
    "mlp context": (lambda: T.AffineCoupling(nn.MLP(2, 4, context_features=2), 4), (4,), draw("vector", 3, 2)),
    "graph": (lambda: T.AffineCoupling(nn.GraphNetwork(2, 4), 4, dim=-1), (5, 4), None),
}


@pytest.mark.parametrize("name", COUPLINGS)
class TestCouplings:
    def made(self, name):
        torch.manual_seed(0)
        make, event, context = COUPLINGS[name]
        return make().double(), draw(name, 3, *event), context

    def test_start_as_the_identity(self, name):
        layer, x, context = self.made(name)
        z, logdet = layer(x, context)
        assert torch.equal(z, x)
        assert torch.equal(logdet, torch.zeros(3, dtype=F64))

    def test_learn_from_there(self, name):
        """Zero outputs, not zero gradients: the last layer moves first."""
        layer, x, context = self.made(name)
        z, logdet = layer(x, context)
        (z.square().sum() - logdet.sum()).backward()
        assert (layer.net.get_submodule("last" if hasattr(layer.net, "last") else "layers.2").weight.grad != 0).any()

    def test_keep_one_half_and_move_the_other(self, name):
        layer, x, context = self.made(name)
        randomise(layer)
        z, _ = layer(x, context)
        kept, moved = z.chunk(2, dim=layer.dim), x.chunk(2, dim=layer.dim)
        assert torch.equal(kept[0], moved[0])
        assert (kept[1] != moved[1]).all()

    def test_scales_are_bounded(self, name):
        """e^±2 per entry, whatever the network says."""
        layer, x, context = self.made(name)
        with torch.no_grad():
            for parameter in layer.parameters():
                parameter.normal_(std=30.0)
        _, logdet = layer(x, context)
        entries = x[0].numel() // 2
        assert logdet.detach().abs().max() <= 2 * entries
        assert logdet.detach().abs().max() > 0.1 * entries


def test_a_vector_context_is_the_same_at_every_point():
    net = nn.DenseNet(2, 3, growth=4, context_channels=2).double()
    randomise(net)
    x, vector = draw("x", 3, 2, 4, 4), draw("vector", 3, 2)
    constant = vector[:, :, None, None].expand(3, 2, 4, 4)
    torch.testing.assert_close(net(x, vector), net(x, constant), rtol=0, atol=1e-13)
    assert (net(x, vector) - net(x, 2 * vector)).abs().min() > 0


def test_a_densenet_sees_its_neighbourhood():
    """Two layers of 3×3 reach two points far, and no further."""
    net = nn.DenseNet(1, 1, growth=4, depth=2).double()
    randomise(net)
    x = draw("image", 1, 1, 9, 9).requires_grad_()
    (grad,) = torch.autograd.grad(net(x)[0, 0, 4, 4], x)
    seen = grad[0, 0] != 0
    assert seen[2:7, 2:7].sum() == seen.sum()
    assert seen.sum() >= 20


def by_hand(net: nn.GraphNetwork, x: Tensor, adjacency: Tensor) -> Tensor:
    """Message by message, edge by edge, for one graph."""
    hidden = net.edge.in_features
    rows = []
    for i in range(len(x)):
        received = torch.zeros(hidden, dtype=F64)
        for j in range(len(x)):
            pair = torch.relu(net.receive(x[i]) + x[j] @ net.send.weight.T)
            received = received + adjacency[i, j] * net.message(torch.relu(net.edge(pair)))
        rows.append(net.last(torch.relu(net.node(torch.cat([x[i], received])))))
    return torch.stack(rows)


class TestGraphNetwork:
    def made(self) -> nn.GraphNetwork:
        torch.manual_seed(0)
        net = nn.GraphNetwork(2, 3, hidden=6).double()
        randomise(net)
        return net

    def adjacency(self, nodes: int) -> Tensor:
        weights = draw("edges", nodes, nodes).abs() * (draw("which", nodes, nodes) > 0)
        return weights + weights.T

    def test_is_what_it_says(self):
        net, x, adjacency = self.made(), draw("nodes", 2, 5, 2), self.adjacency(5)
        expected = torch.stack([by_hand(net, row, adjacency) for row in x])
        torch.testing.assert_close(net(x, adjacency), expected, rtol=0, atol=1e-12)
        batched = adjacency.expand(2, 5, 5)
        torch.testing.assert_close(net(x, batched), expected, rtol=0, atol=1e-12)

    def test_no_graph_is_the_complete_graph(self):
        net, x = self.made(), draw("nodes", 2, 5, 2)
        torch.testing.assert_close(net(x), net(x, 1 - torch.eye(5, dtype=F64)))

    def test_renumbering_the_nodes_renumbers_the_result(self):
        net, x, adjacency = self.made(), draw("nodes", 2, 5, 2), self.adjacency(5)
        order = [3, 0, 4, 1, 2]
        torch.testing.assert_close(net(x[:, order], adjacency[order][:, order]), net(x, adjacency)[:, order])

    @pytest.mark.parametrize("graph", ["given", "complete"])
    def test_padding_changes_nothing(self, graph):
        net, x, mask = self.made(), draw("nodes", 2, 6, 2), torch.ones(2, 6, dtype=torch.bool)
        mask[0, 4:] = mask[1, 5:] = False
        adjacency = torch.ones(6, 6, dtype=F64) if graph == "given" else None
        out = net(x, (adjacency, mask))
        for i, n in enumerate((4, 5)):
            alone = net(x[i : i + 1, :n], None if adjacency is None else adjacency[:n, :n])
            torch.testing.assert_close(out[i : i + 1, :n], alone, rtol=0, atol=1e-12)
            assert (out[i, n:] == 0).all()


def test_an_mlp_takes_one_context_for_all_points():
    """A context `(batch, features)` beside node features `(batch, N, features)`."""
    net = nn.MLP(2, 3, hidden=(5,), context_features=4).double()
    randomise(net)
    x, context = draw("nodes", 2, 6, 2), draw("context", 2, 4)
    expected = torch.stack([net(x[:, i], context) for i in range(6)], dim=1)
    torch.testing.assert_close(net(x, context), expected, rtol=0, atol=1e-13)


@pytest.mark.parametrize("activation", ["relu", "leaky_relu", "elu"])
def test_an_mlp_is_not_linear(activation):
    net = nn.MLP(2, 2, hidden=(8,), activation=activation).double()
    randomise(net)
    x, y = draw("x", 5, 2), draw("y", 5, 2)
    assert (net(x + y) - net(x) - net(y) + net(torch.zeros_like(x))).abs().max() > 1e-2
