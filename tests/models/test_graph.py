"""Graph flows: blind to the order of the nodes and to padding, and exact on any graph."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from expmflow import transforms as T
from expmflow.distributions import Flow, NonFiniteError
from expmflow.models import graph_flow
from expmflow.testing import check_transform
from transform_registry import draw, randomise

F64 = torch.float64
GNFS = ("gnf", "gnf-exp")
NETWORKS = ("coupling", *GNFS)


def edges(name: str, nodes: int, *, symmetric: bool = True, loops: bool = False) -> Tensor:
    """Weighted edges between about half of the pairs."""
    weights = draw(name, nodes, nodes).abs() * (draw(f"{name} which", nodes, nodes) > 0)
    weights = weights + weights.T if symmetric else weights
    return weights if loops else weights * (1 - torch.eye(nodes, dtype=F64))


ISOLATED = torch.tensor([[0, 2, 0, 0], [2, 0, 0.5, 0], [0, 0.5, 0, 0], [0, 0, 0, 0]], dtype=F64)
GRAPHS = {
    "complete": 1 - torch.eye(4, dtype=F64),
    "weighted": edges("weighted", 4),
    "directed": edges("directed", 4, symmetric=False),
    "self-loops": edges("self-loops", 3, loops=True),
    "isolated node": ISOLATED,
    "no edges": torch.zeros(3, 3, dtype=F64),
    "one node": torch.zeros(1, 1, dtype=F64),
    "one node with a self-loop": torch.ones(1, 1, dtype=F64),
}


def made(network: str, features: int = 2, *, nodes: int = 4, subflows: int = 2) -> Flow:
    """With weights away from where they start; in evaluation mode."""
    torch.manual_seed(0)
    flow = graph_flow(nodes, features, network=network, subflows=subflows, hidden=6).double().eval()
    randomise(flow)
    return flow


def by_jacobian(flow: Flow, x: Tensor, context=None) -> Tensor:
    """log p of one graph `(N, F)`: the normal density of its noise, and a dense determinant."""
    noise = flow.encode(x[None], context)[0].detach()
    jacobian = torch.autograd.functional.jacobian(lambda x: flow.encode(x[None], context)[0], x)
    normal = -0.5 * noise.square().sum() - noise.numel() / 2 * math.log(2 * math.pi)
    return normal + torch.linalg.slogdet(jacobian.reshape(x.numel(), x.numel()))[1]


def padded(sizes: list[int], nodes: int) -> Tensor:
    return torch.arange(nodes) < torch.tensor(sizes)[:, None]


class TestLayers:
    @pytest.mark.parametrize("network", NETWORKS)
    def test_are_those_of_the_paper(self, network):
        """ActNorm, 1×1, coupling; three times unless told otherwise.

        Graph networks move both halves of the features; an exponential, if there are any, precedes each coupling.
        """
        coupling = [T.GraphConvExp, T.AffineCoupling] if network == "gnf-exp" else [T.AffineCoupling]
        again = [] if network == "coupling" else [T.Permute, *coupling]
        expected = [T.ActNorm, T.Conv1x1, *coupling, *again]
        assert [type(layer) for layer in graph_flow(4, 2, network=network).transform] == 3 * expected

    @pytest.mark.parametrize("graph", ["weighted", "directed", "self-loops", "one node"])
    @pytest.mark.parametrize("network", GNFS)
    def test_keep_what_layers_promise(self, network, graph):
        """The log-determinant of each direction is that of autograd's Jacobian, and both undo each other."""
        adjacency = GRAPHS[graph]
        check_transform(made(network, subflows=1).transform, draw("x", 2, len(adjacency), 2), adjacency)

    @pytest.mark.parametrize("features", [2, 3])
    @pytest.mark.parametrize("network", NETWORKS)
    def test_keep_what_layers_promise_without_a_graph(self, network, features):
        check_transform(made(network, features, nodes=3, subflows=1).transform, draw("x", 2, 3, features))

    @pytest.mark.parametrize("network", GNFS)
    @pytest.mark.parametrize("graph", ["given", "complete"])
    def test_are_equivariant_each(self, network, graph):
        """Renumbering the nodes and the graph renumbers what every layer puts out, and leaves its logdet."""
        flow, x, order = made(network), draw("x", 3, 5, 2), torch.tensor([3, 0, 4, 1, 2])
        adjacency = edges("given", 5, symmetric=False, loops=True) if graph == "given" else None
        other = None if adjacency is None else adjacency[order][:, order]
        y = x[:, order]
        for layer in flow.transform:
            (x, logdet), (y, other_logdet) = layer(x, adjacency), layer(y, other)
            torch.testing.assert_close(y, x[:, order], rtol=0, atol=1e-12)
            torch.testing.assert_close(other_logdet, logdet, rtol=0, atol=1e-11)


class TestLikelihood:
    @pytest.mark.parametrize("graph", GRAPHS)
    @pytest.mark.parametrize("network", GNFS)
    def test_is_the_density_of_the_noise_and_a_determinant(self, network, graph):
        flow, adjacency = made(network), GRAPHS[graph]
        x = draw("x", 2, len(adjacency), 2)
        expected = torch.stack([by_jacobian(flow, row, adjacency) for row in x])
        torch.testing.assert_close(flow.log_prob(x, adjacency), expected, rtol=0, atol=1e-10)

    @pytest.mark.parametrize("network", NETWORKS)
    def test_is_so_without_a_graph(self, network):
        flow, x = made(network, 3), draw("x", 2, 4, 3)
        expected = torch.stack([by_jacobian(flow, row) for row in x])
        torch.testing.assert_close(flow.log_prob(x), expected, rtol=0, atol=1e-10)

    @pytest.mark.parametrize("network", GNFS)
    def test_does_not_change_with_the_order_of_the_nodes(self, network):
        flow, x = made(network), draw("x", 2, 4, 2)
        adjacency = torch.stack([GRAPHS["weighted"], GRAPHS["directed"]])
        for order in ([1, 0, 2, 3], [3, 0, 1, 2]):  # which generate all others
            found = flow.log_prob(x[:, order], adjacency[:, order][:, :, order])
            torch.testing.assert_close(found, flow.log_prob(x, adjacency), rtol=0, atol=1e-11)
            torch.testing.assert_close(flow.log_prob(x[:, order]), flow.log_prob(x), rtol=0, atol=1e-11)

    def test_of_the_coupling_model_does(self):
        flow, x = made("coupling"), draw("x", 2, 4, 2)
        assert (flow.log_prob(x[:, [1, 0, 2, 3]]) - flow.log_prob(x)).abs().min() > 1e-6

    @pytest.mark.parametrize("nodes", [1, 2, 7])
    @pytest.mark.parametrize("network", GNFS)
    def test_without_a_graph_is_that_of_the_complete_graph(self, network, nodes):
        """For any number of nodes, whatever was said when the flow was made."""
        flow, x, complete = made(network), draw("x", 3, nodes, 2), 1 - torch.eye(nodes, dtype=F64)
        expected = flow.log_prob(x)
        for same in (complete, complete.expand(3, -1, -1), (complete, None), (None, None)):
            torch.testing.assert_close(flow.log_prob(x, same), expected, rtol=0, atol=1e-12)

    @pytest.mark.parametrize("network", GNFS)
    def test_depends_on_the_graph(self, network):
        flow, x = made(network), draw("x", 3, 4, 2)
        found = torch.stack([flow.log_prob(x, GRAPHS[name]) for name in ("complete", "weighted", "directed")])
        assert (found[:, None] - found).abs().flatten(0, 1)[[1, 2, 5]].min() > 1e-6

    @pytest.mark.parametrize("network", GNFS)
    def test_of_a_graph_without_edges_is_that_of_its_nodes(self, network):
        """Nodes that do not hear of each other are independent."""
        flow, x = made(network), draw("x", 3, 4, 2)
        together = flow.log_prob(x, torch.zeros(4, 4, dtype=F64))
        apart = flow.log_prob(x.reshape(12, 1, 2), torch.zeros(1, 1, dtype=F64)).reshape(3, 4).sum(1)
        torch.testing.assert_close(together, apart, rtol=0, atol=1e-11)

    @pytest.mark.parametrize("network", GNFS)
    def test_of_two_graphs_side_by_side_is_the_sum(self, network):
        """As long as the largest number of neighbours, on which the norm rule depends, is that of both."""
        flow, x, graph = made(network), draw("x", 2, 6, 2), 1 - torch.eye(3, dtype=F64)
        together = flow.log_prob(x, torch.block_diag(graph, graph))
        apart = flow.log_prob(x[:, :3], graph) + flow.log_prob(x[:, 3:], graph)
        torch.testing.assert_close(together, apart, rtol=0, atol=1e-11)

    @pytest.mark.parametrize("network", NETWORKS)
    def test_integrates_to_one(self, network):
        """One node in the plane: a sum over a fine grid."""
        flow = made(network, nodes=1, subflows=1)
        with torch.no_grad():
            centre, reach = flow.sample(2000).mean(0), 10 * float(flow.sample(2000).std())
            line = torch.linspace(-reach, reach, 251, dtype=F64)
            points = torch.cartesian_prod(line, line)[:, None] + centre
            mass = flow.log_prob(points).exp().sum() * float(line[1] - line[0]) ** 2
        assert float(mass) == pytest.approx(1, abs=3e-3)

    def test_of_a_new_flow_is_near_the_normal_one(self):
        """The networks start at zero; 1×1 is a rotation; the exponential starts near the identity."""
        for network in NETWORKS:
            torch.manual_seed(0)
            flow = graph_flow(4, 2, network=network, hidden=6).double().eval()
            x = draw("x", 3, 4, 2)
            normal = -0.5 * x.square().sum((1, 2)) - 4 * math.log(2 * math.pi)
            torch.testing.assert_close(flow.log_prob(x), normal, rtol=0, atol=0.05 if network == "gnf-exp" else 1e-5)


class TestPadding:
    SIZES = (3, 5, 1, 4)

    def batch(self) -> tuple[Tensor, Tensor, Tensor]:
        x, mask = draw("x", 4, 5, 2), padded(list(self.SIZES), 5)
        adjacency = torch.stack([edges(f"graph {k}", 5, symmetric=k != 1, loops=k == 3) for k in range(4)])
        return x, adjacency, mask

    @pytest.mark.parametrize("network", GNFS)
    def test_changes_nothing(self, network):
        """A padded batch has the likelihoods of the graphs one by one, whatever the padding holds."""
        flow, (x, adjacency, mask) = made(network), self.batch()
        shared = adjacency[0]
        for graphs in (adjacency, shared, None):
            rows = graphs if graphs is None or graphs.ndim == 3 else graphs.expand(4, 5, 5)
            alone = [
                flow.log_prob(x[k : k + 1, :n], None if rows is None else rows[k, :n, :n])
                for k, n in enumerate(self.SIZES)
            ]
            for filling in (x, 1e3 * draw("garbage", 4, 5, 2), torch.full_like(x, 1e200)):
                given = torch.where(mask[..., None], x, filling)
                found = flow.log_prob(given, (graphs, mask))
                torch.testing.assert_close(found, torch.cat(alone), rtol=0, atol=1e-10)

    @pytest.mark.parametrize("network", GNFS)
    def test_stands_anywhere(self, network):
        flow, (x, adjacency, mask) = made(network), self.batch()
        order = torch.tensor([4, 2, 0, 3, 1])
        moved = flow.log_prob(x[:, order], (adjacency[:, order][:, :, order], mask[:, order]))
        torch.testing.assert_close(moved, flow.log_prob(x, (adjacency, mask)), rtol=0, atol=1e-11)

    @pytest.mark.parametrize("network", GNFS)
    def test_is_left_as_it_is_in_both_directions(self, network):
        flow, (x, adjacency, mask) = made(network), self.batch()
        z = flow.encode(x, (adjacency, mask))
        assert torch.equal(z[~mask], x[~mask])
        back = flow.decode(z, (adjacency, mask))
        assert torch.equal(back[~mask], x[~mask])
        torch.testing.assert_close(back, x, rtol=0, atol=1e-10)

    @pytest.mark.parametrize("network", GNFS)
    def test_has_no_gradient(self, network):
        flow, (x, adjacency, mask) = made(network), self.batch()
        x.requires_grad_()
        (grad,) = torch.autograd.grad(flow.log_prob(x, (adjacency, mask)).sum(), x)
        assert (grad[~mask] == 0).all()
        assert (grad[mask].abs().amax(-1) > 0).all()

    @pytest.mark.parametrize("network", GNFS)
    def test_of_a_whole_row_leaves_no_density(self, network):
        flow, mask = made(network), padded([4, 0], 4)
        found = flow.log_prob(draw("x", 2, 4, 2), (None, mask))
        torch.testing.assert_close(found[1], torch.zeros((), dtype=F64))

    @pytest.mark.parametrize("network", GNFS)
    def test_with_a_full_mask_there_is_none(self, network):
        flow, (x, adjacency, _) = made(network), self.batch()
        full = torch.ones(4, 5, dtype=torch.bool)
        torch.testing.assert_close(flow.log_prob(x, (adjacency, full)), flow.log_prob(x, adjacency), rtol=0, atol=1e-12)

    @pytest.mark.parametrize("network", GNFS)
    def test_does_not_count_when_actnorm_starts(self, network):
        """The first batch sets it from the real nodes."""
        x, _, mask = self.batch()
        torch.manual_seed(0)
        flow = graph_flow(4, 2, network=network, subflows=1, hidden=6).double().train()
        flow.log_prob(torch.where(mask[..., None], x, 1e3), (None, mask))
        first = next(iter(flow.transform))
        real = x[mask]
        torch.testing.assert_close(first.shift.detach(), real.mean(0))
        torch.testing.assert_close(first.log_scale.detach(), -real.std(0, correction=0).log())

    def test_every_actnorm_starts_from_real_nodes(self):
        """Without edges nodes do not see each other: padded or flat, deeper layers begin with the same numbers."""
        x, _, mask = self.batch()
        found = []
        for rows, context in (
            (torch.where(mask[..., None], x, 1e3), (torch.zeros(5, 5, dtype=F64), mask)),
            (x[mask][:, None], torch.zeros(1, 1, dtype=F64)),
        ):
            torch.manual_seed(0)
            flow = graph_flow(4, 2, network="gnf-exp", hidden=6).double().train()
            flow.log_prob(rows, context)
            found.append([v for layer in flow.transform if isinstance(layer, T.ActNorm) for v in layer.parameters()])
        torch.testing.assert_close(found[0], found[1], rtol=0, atol=1e-11)


class TestSampling:
    @pytest.mark.parametrize("network", NETWORKS)
    def test_shapes_without_a_graph(self, network):
        assert made(network, 3).sample(5).shape == (5, 4, 3)

    @pytest.mark.parametrize("network", GNFS)
    def test_the_graph_says_how_many_nodes(self, network):
        flow, shared, mask = made(network), edges("shared", 6), padded([6, 2, 3], 6)
        for context in (shared, shared.expand(3, 6, 6), (shared, mask), (shared, None), (None, mask)):
            drawn, log_prob = flow.sample_and_log_prob(3, context)
            assert drawn.shape == (3, 6, 2)
            torch.testing.assert_close(flow.log_prob(drawn, context), log_prob, rtol=0, atol=1e-10)

    @pytest.mark.parametrize("network", GNFS)
    def test_what_is_drawn_follows_the_density(self, network):
        """The mean of p over q, of two contexts, is one: E_q[p / q] = 1 for densities of the same support."""
        torch.manual_seed(0)
        flow = graph_flow(2, 2, network=network, subflows=1, hidden=6).double().eval()
        with torch.no_grad():
            for parameter in flow.parameters():
                parameter.add_(0.05 * torch.randn_like(parameter))
            drawn, log_q = flow.sample_and_log_prob(4000, 0.95 * (1 - torch.eye(2, dtype=F64)))
            ratio = (flow.log_prob(drawn) - log_q).exp()
        error = float(ratio.std()) / 4000**0.5
        assert 1e-4 < error < 0.05
        assert float(ratio.mean()) == pytest.approx(1, abs=4 * error)

    @pytest.mark.parametrize("network", GNFS)
    def test_noise_becomes_the_same_graph_alone_and_padded(self, network):
        flow, noise, graph = made(network), draw("noise", 1, 5, 2), edges("graph", 5)
        alone = flow.sample(1, graph[:3, :3], noise=noise[:, :3])
        together = flow.sample(1, (graph, padded([3], 5)), noise=noise)
        torch.testing.assert_close(together[:, :3], alone, rtol=0, atol=1e-11)


class TestRefusals:
    @pytest.mark.parametrize("context", [GRAPHS["complete"], (GRAPHS["complete"], None), (None, padded([4, 3], 4))])
    def test_the_coupling_model_has_no_context(self, context):
        flow = made("coupling")
        for run in (lambda: flow.log_prob(draw("x", 2, 4, 2), context), lambda: flow.sample(2, context)):
            with pytest.raises(ValueError, match="Expected no context for a coupling flow of whole graphs; got"):
                run()

    @pytest.mark.parametrize("nodes", [1, 3, 5])
    def test_and_one_number_of_nodes(self, nodes):
        with pytest.raises(ValueError, match=rf"AffineCoupling: Expected 4 nodes; got {nodes}\."):
            made("coupling").log_prob(draw("x", 2, nodes, 2))

    @pytest.mark.parametrize("network", GNFS)
    def test_edges_that_are_no_weights(self, network):
        flow, x = made(network), draw("x", 2, 4, 2)
        negative = GRAPHS["complete"].clone()
        negative[0, 1] = -1
        with pytest.raises(ValueError, match="Expected non-negative edge weights; got negative ones"):
            flow.log_prob(x, negative)
        for bad in (math.nan, math.inf):
            negative[0, 1] = bad
            with pytest.raises(ValueError, match="Expected the edge weights to be finite; got NaN or infinity"):
                flow.log_prob(x, negative)

    @pytest.mark.parametrize("network", GNFS)
    @pytest.mark.parametrize(
        ("context", "expected"),
        [
            (torch.ones(3, 3, dtype=F64), r"Expected an adjacency of 4 nodes; got one of shape \(3, 3\)"),
            (torch.ones(4, 5, dtype=F64), "Expected an adjacency of 4 nodes"),
            (torch.ones(4, dtype=F64), "Expected an adjacency of 4 nodes"),
            (torch.ones(1, 1, 4, 4, dtype=F64), "Expected an adjacency of 4 nodes"),
            (torch.ones(3, 4, 4, dtype=F64), "Expected an adjacency for each of 2 rows"),
            ([[1.0]], "Expected an adjacency of 4 nodes; got list"),
            ("graph", "Expected an adjacency of 4 nodes; got str"),
            ((torch.ones(4, 4, dtype=F64),), r"Expected a pair \(adjacency, mask\); got 1 things"),
            ((None, torch.ones(2, 3, dtype=torch.bool)), r"Expected a node mask of shape \(2, 4\)"),
            ((None, torch.ones(4, dtype=torch.bool)), r"Expected a node mask of shape \(2, 4\)"),
            ((None, [True]), r"Expected a node mask of shape \(2, 4\); got list"),
            (torch.ones(4, 4, dtype=F64).to_sparse(), "Expected a dense adjacency; got a sparse one"),
        ],
    )
    def test_contexts_that_are_no_graphs(self, network, context, expected):
        flow = made(network)
        with pytest.raises(ValueError, match=expected):
            flow.log_prob(draw("x", 2, 4, 2), context)
        with pytest.raises(ValueError, match="Expected"):
            flow.sample(2, context, noise=draw("noise", 2, 4, 2))

    @pytest.mark.parametrize("network", GNFS)
    def test_contexts_of_other_kinds_of_numbers(self, network):
        flow, x = made(network), draw("x", 2, 4, 2)
        with pytest.raises(
            TypeError, match=r"Expected an adjacency of dtype torch.float64, as the input; got torch.int"
        ):
            flow.log_prob(x, torch.ones(4, 4, dtype=torch.int64))
        with pytest.raises(TypeError, match=r"Expected a node mask of dtype torch\.bool; got torch\.float64"):
            flow.log_prob(x, (None, torch.ones(2, 4, dtype=F64)))

    @pytest.mark.parametrize("network", NETWORKS)
    def test_node_features_that_do_not_fit(self, network):
        with pytest.raises(ValueError, match="ActNorm: Expected 2 channels on axis -1; got 3"):
            made(network).log_prob(draw("x", 2, 4, 3))
        with pytest.raises(NonFiniteError, match="first in the input"):
            made(network).log_prob(torch.full((2, 4, 2), math.nan, dtype=F64))

    @pytest.mark.parametrize(
        ("arguments", "expected"),
        [
            ({"nodes": 0}, "nodes of at least 1"),
            ({"features": 1}, "features of at least 2"),
            ({"subflows": 0}, "subflows of at least 1"),
            ({"hidden": 0}, "hidden of at least 1"),
            ({"network": "gcn"}, "network to be one of coupling, gnf, gnf-exp, sorted; got 'gcn'"),
        ],
    )
    def test_models_that_cannot_be(self, arguments, expected):
        for network in NETWORKS if "network" not in arguments else ("gcn",):
            with pytest.raises(ValueError, match=f"Expected {expected}"):
                graph_flow(**{"nodes": 4, "features": 2, "network": network, **arguments})
