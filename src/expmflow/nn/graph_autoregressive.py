"""The inner function of Sylvester flows on graphs: autoregressive in the features, and equivariant in the nodes."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from expmflow._validation import expect_count
from expmflow.nn.autoregressive import HEADS, check_gamma, gated_tanh, start_near_identity
from expmflow.nn.graph import check_dense_graph, resolve_graph, split_graph
from expmflow.nn.masked import MaskedLinear
from expmflow.nn.messages import sum_messages
from expmflow.nn.precision import network_precision

UNITS_PER_BLIND_UNIT = 8  # units that see no feature serve only the first feature, for which they count neighbours


class GraphInner(nn.Module):
    """f(u) = γ s₂ ⊙ tanh(u ⊙ s₁ + t₁) + t₂, where s and t of feature k depend on earlier features of node and
    neighbours.

    A masked `GraphNetwork`: every hidden unit has a degree, the number of features that it may see, in its own node and
    in messages alike. So f depends on feature k only through the node's own u: its Jacobian is triangular, block by
    block of features, and renumbering the nodes renumbers the result. On padding f is zero.

    The context is the adjacency `(N, N)` or `(batch, N, N)`, a pair `(adjacency, mask)`, or None: the complete graph.

    Args:
        features: F of `(batch, N, F)`.
        hidden: features inside the network.
        gamma: the bound γ of the diagonal.
        reverse: whether to go from the last feature to the first, so that the order can alternate between layers.
    """

    def __init__(self, features: int, hidden: int = 64, *, gamma: float = 0.5, reverse: bool = False) -> None:
        super().__init__()
        expect_count(features, "features")
        expect_count(hidden, "hidden")
        check_gamma(gamma)
        self.gamma = gamma
        own, inside = torch.arange(features), graph_degrees(features, hidden)
        own = own.flip(0) if reverse else own
        self.receive = MaskedLinear(own, inside, strict=True)
        self.send = MaskedLinear(own, inside, strict=True, bias=False)
        self.edge = MaskedLinear(inside, inside)
        self.message = MaskedLinear(inside, inside)
        self.node = MaskedLinear(torch.cat([own, inside - 1]), inside, strict=True)  # a unit sees units of its degree
        self.last = MaskedLinear(inside, own.repeat(HEADS))
        start_near_identity(self.last, features)

    def forward(self, u: Tensor, context: Any = None) -> tuple[Tensor, Tensor]:
        adjacency, mask = resolve_graph(context, u)
        with network_precision(u.device.type):
            heads = self._heads(u, adjacency)
        value, diagonal = gated_tanh(u, heads.to(u.dtype), self.gamma, dim=-1)
        return (value, diagonal) if mask is None else (value * mask.unsqueeze(-1), diagonal * mask.unsqueeze(-1))

    def _heads(self, u: Tensor, adjacency: Tensor) -> Tensor:
        """As in `GraphNetwork`, masked."""
        summed = sum_messages(adjacency, self.receive(u), self.send(u), self.edge.weight, self.edge.bias)
        received = F.linear(summed, self.message.weight) + adjacency.sum(-1, keepdim=True) * self.message.bias
        return self.last(F.elu(self.node(torch.cat([u, received], dim=-1))))

    def check_context(self, context: Any, x: Tensor) -> None:
        """Raise `ValueError` unless `context` is a graph on the nodes of `x`."""
        check_dense_graph(context, x)

    def context_rows(self, context: Any, rows: Any) -> Any:
        """The graphs of some rows of the batch; an adjacency `(N, N)` is shared by all rows."""
        adjacency, mask = split_graph(context)
        if adjacency is not None and adjacency.ndim == 3:
            adjacency = adjacency[rows]
        return adjacency if mask is None else (adjacency, mask[rows])


def graph_degrees(features: int, hidden: int) -> Tensor:
    """For each hidden unit, how many features it may see: 1 … features − 1, evenly, and none for a few units."""
    units = torch.arange(hidden)
    if features == 1:
        return torch.zeros_like(units)
    blind = units % UNITS_PER_BLIND_UNIT == UNITS_PER_BLIND_UNIT - 1
    return torch.where(blind, 0, 1 + (units - blind.cumsum(0)) % (features - 1))
