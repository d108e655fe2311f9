"""The network inside graph couplings."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from expmflow._validation import expect, expect_type
from expmflow.nn.messages import sum_messages
from expmflow.operators.adjacency import check_adjacency


class GraphNetwork(nn.Module):
    """Messages from an edge MLP of three layers, summed over neighbours; then a node MLP of two. Its output starts at
    zero.

    m_i = Σ_j A_ij e(x_i, x_j), y_i = n(x_i, m_i). The first edge layer is linear in the pair, so it takes two products
    per node instead of one per edge. The last is linear, so it is applied after the sum. Initial weights follow He et
    al. (2015).

    The context is the adjacency `(N, N)` or `(batch, N, N)`, a pair `(adjacency, mask)`, or None: the complete graph.

    Args:
        in_features, out_features: of `(batch, N, features)`.
        hidden: features inside.
    """

    def __init__(self, in_features: int, out_features: int, *, hidden: int = 64) -> None:
        super().__init__()
        self.receive = nn.Linear(in_features, hidden)
        self.send = nn.Linear(in_features, hidden, bias=False)
        self.edge = nn.Linear(hidden, hidden)
        self.message = nn.Linear(hidden, hidden)
        self.node = nn.Linear(in_features + hidden, hidden)
        self.last = nn.Linear(hidden, out_features)
        for layer in (self.receive, self.send, self.edge, self.message, self.node):
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
        nn.init.zeros_(self.last.weight)
        nn.init.zeros_(self.last.bias)

    def forward(self, x: Tensor, context: Any = None) -> Tensor:
        adjacency, mask = resolve_graph(context, x)
        summed = sum_messages(adjacency, self.receive(x), self.send(x), self.edge.weight, self.edge.bias)
        degree = adjacency.sum(-1, keepdim=True)
        received = F.linear(summed, self.message.weight) + degree * self.message.bias
        out = self.last(F.relu(self.node(torch.cat([x, received], dim=-1))))
        return out if mask is None else out * mask.unsqueeze(-1)

    def check_context(self, context: Any, x: Tensor) -> None:
        """Raise `ValueError` unless `context` is a graph on the nodes of `x`, with non-negative weights."""
        check_dense_graph(context, x)


def split_graph(context: Any) -> tuple[Any, Any]:
    """The adjacency and the node mask of a context; either may be None."""
    if isinstance(context, tuple):
        expect(len(context) == 2, "a pair (adjacency, mask)", f"{len(context)} things")
        return context
    return context, None


def complete_graph(x: Tensor) -> Tensor:
    """The adjacency `(N, N)` in which every node of `x`, `(batch, N, features)`, is linked to every other."""
    return 1 - torch.eye(x.shape[1], dtype=x.dtype, device=x.device)


def node_mask(context: Any) -> Tensor | None:
    """Which nodes are real, `(batch, N)`; None if the context does not say."""
    mask = context[1] if isinstance(context, tuple) and len(context) == 2 else None
    return mask if isinstance(mask, Tensor) else None


def check_dense_graph(context: Any, x: Tensor) -> None:
    """Raise unless `context` is a dense graph on the nodes of `x`, with non-negative weights."""
    adjacency, mask = split_graph(context)
    sparse = isinstance(adjacency, Tensor) and adjacency.layout != torch.strided
    expect(not sparse, "a dense adjacency", "a sparse one")
    check_graph(adjacency, mask, x)
    if adjacency is not None:
        check_adjacency(adjacency, mask)


def check_graph(adjacency: Any, mask: Any, x: Tensor) -> None:
    """Raise unless these are None, or graphs on the nodes of `x`."""
    rows, nodes = x.shape[:2]
    if adjacency is not None:
        got = f"one of shape {tuple(adjacency.shape)}" if isinstance(adjacency, Tensor) else type(adjacency).__name__
        fits = isinstance(adjacency, Tensor) and adjacency.shape[-2:] == (nodes, nodes) and adjacency.ndim in (2, 3)
        expect(fits, f"an adjacency of {nodes} nodes", got)
        expect(adjacency.ndim == 2 or adjacency.shape[0] == rows, f"an adjacency for each of {rows} rows", got)
        expect_type(adjacency.dtype == x.dtype, f"an adjacency of dtype {x.dtype}, as the input", adjacency.dtype)
    if mask is not None:
        got = f"one of shape {tuple(mask.shape)}" if isinstance(mask, Tensor) else type(mask).__name__
        fits = isinstance(mask, Tensor) and tuple(mask.shape) == (rows, nodes)
        expect(fits, f"a node mask of shape ({rows}, {nodes})", got)
        expect_type(mask.dtype == torch.bool, "a node mask of dtype torch.bool", mask.dtype)


def resolve_graph(context: Any, x: Tensor) -> tuple[Tensor, Tensor | None]:
    """The adjacency, without edges to padding, and the mask."""
    adjacency, mask = split_graph(context)
    if adjacency is None:
        adjacency = complete_graph(x)
    if mask is not None:
        adjacency = adjacency * mask.unsqueeze(-1) * mask.unsqueeze(-2)
    return adjacency, mask
