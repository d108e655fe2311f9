"""Flows on the node features of graphs."""

from __future__ import annotations

from typing import Any, Literal, get_args

from torch import Tensor, nn

from expmflow import transforms as T
from expmflow._validation import expect, expect_count, expect_one_of
from expmflow.distributions import Exchangeable, Flow, NodeNormal, StandardNormal
from expmflow.nn import MLP, GraphNetwork

GraphNetworks = Literal["coupling", "gnf", "gnf-exp", "sorted"]
COMPONENTS = 8  # of the mixtures in a sorted model


def graph_flow(
    nodes: int, features: int, *, network: GraphNetworks = "gnf-exp", subflows: int = 3, hidden: int = 64
) -> Flow:
    """Subflows of ActNorm, 1×1 and couplings over the features: the paper's three models, and a density of sets.

    The context is the graph: an adjacency `(N, N)` or `(batch, N, N)`, a pair `(adjacency, mask)`, or None for the
    complete graph. The two models with graph networks are equivariant, and take any number of nodes.

    Args:
        nodes: N; for graph networks, the number of nodes of samples if no context gives one.
        features: of each node, at least two.
        network: `"coupling"` has MLPs that see the whole graph as one vector, and no context; `"gnf"` has graph
            networks, by which each half of the features transforms the other in turn (Liu et al., 2019); `"gnf-exp"`
            also has a graph convolution exponential before each coupling. `"sorted"` sorts the nodes of complete graphs
            by their first feature, which loses nothing if all orders are equally likely, and has mixture couplings of
            all their features at once.
        subflows: the number of subflows.
        hidden: features inside the networks.

    Example:
        >>> flow = graph_flow(4, 2, hidden=8)
        >>> flow.log_prob(torch.randn(5, 4, 2)).shape, flow.log_prob(torch.randn(5, 7, 2)).shape
        (torch.Size([5]), torch.Size([5]))
    """
    expect_count(nodes, "nodes")
    expect_count(features, "features", at_least=2)
    expect_count(subflows, "subflows")
    expect_count(hidden, "hidden")
    expect_one_of(network, get_args(GraphNetworks), "network")
    if network == "sorted":
        return _sorted_flow(nodes, features, subflows, hidden)
    passive = features // 2
    sizes = (passive, 2 * (features - passive))

    def graph_coupling() -> list[T.Transform]:
        """A coupling with a graph network, in gnf-exp after an exponential."""
        exponential = [T.GraphConvExp(features)] if network == "gnf-exp" else []
        return [*exponential, T.AffineCoupling(GraphNetwork(*sizes, hidden=hidden), features, dim=-1)]

    layers: list[T.Transform] = []
    for _ in range(subflows):
        layers += [T.ActNorm(features, dim=-1), T.Conv1x1(features, dim=-1)]
        if network == "coupling":
            layers.append(T.AffineCoupling(_FlatMLP(nodes, *sizes, hidden), features, dim=-1))
        else:
            layers += [
                *graph_coupling(),
                T.Permute([*range(passive, features), *range(passive)], dim=-1),
                *graph_coupling(),
            ]
    return Flow(T.Chain(layers), NodeNormal((nodes, features)))


def _sorted_flow(nodes: int, features: int, subflows: int, hidden: int) -> Flow:
    size = nodes * features
    passive = size // 2
    layers: list[T.Transform] = []
    for _ in range(subflows):
        net = MLP(passive, (size - passive) * (3 * COMPONENTS + 2), hidden=(hidden, hidden))
        layers += [T.ActNorm(size), T.Conv1x1(size), T.MixtureCoupling(net, size, components=COMPONENTS)]
    ordered = Flow(T.Chain(layers), StandardNormal((size,)))
    return Flow(T.ActNorm(features, dim=-1), Exchangeable(nodes, features, ordered))


class _FlatMLP(nn.Module):
    """An MLP of four layers from all nodes to all nodes, `(batch, N, in)` to `(batch, N, out)`."""

    def __init__(self, nodes: int, in_features: int, out_features: int, hidden: int) -> None:
        super().__init__()
        self.nodes = nodes
        widths = (hidden, hidden, hidden)
        self.mlp = MLP(nodes * in_features, nodes * out_features, hidden=widths, activation="leaky_relu")

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(x.flatten(1)).unflatten(1, (self.nodes, -1))

    def check_context(self, context: Any, x: Tensor) -> None:
        """Raise `ValueError` for a graph, which this network would ignore, and for another number of nodes."""
        expect(context is None, "no context for a coupling flow of whole graphs", type(context).__name__)
        expect(x.shape[1] == self.nodes, f"{self.nodes} nodes", x.shape[1])
