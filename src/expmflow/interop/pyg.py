"""Conversion from and to PyTorch Geometric. `torch_geometric` comes with the extra `graph`; only `to_pyg` needs it.

A `Data` is one graph, a `Batch` several. `edge_index` has the same meaning as everywhere in this library, and as in
`to_dense_adj` and `get_laplacian`: edge e sets `A[edge_index[0, e], edge_index[1, e]]`. So node i receives from the
nodes that its edges point to, whereas messages in PyTorch Geometric flow along the edges. For undirected graphs this is
the same; for directed ones, flip `edge_index` first to follow the messages.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from expmflow._validation import expect, expect_finite, expect_tensor, expect_type
from expmflow.distributions import Flow
from expmflow.operators import GraphConvOperator

Context = tuple[Tensor, Tensor]


def from_pyg(data: Any) -> tuple[Tensor, Context]:
    """A `Data` or `Batch` in the form that flows take: padded node features, and their context.

    Args:
        data: with `x` of shape `(nodes, F)`, `edge_index`, and optionally `edge_weight` and `batch`.

    Returns:
        `x` of shape `(graphs, N, F)`, N the nodes of the largest graph, zero in the padding; and the pair
        `(adjacency, mask)` of shapes `(graphs, N, N)` and `(graphs, N)`. Parallel edges add up. Differentiable in `x`
        and `edge_weight`.

    Example:
        >>> from torch_geometric.data import Batch, Data
        >>> pair = Data(x=torch.ones(2, 3), edge_index=torch.tensor([[0, 1], [1, 0]]))
        >>> single = Data(x=torch.ones(1, 3), edge_index=torch.zeros(2, 0, dtype=torch.int64))
        >>> x, (adjacency, mask) = from_pyg(Batch.from_data_list([pair, single]))
        >>> x.shape, mask.tolist()
        (torch.Size([2, 2, 3]), [[True, True], [True, False]])
    """
    _check(data)
    graph, place, sizes = _places(data)
    batch, most = len(sizes), int(sizes.amax()) if len(sizes) else 0
    rows, cols = data.edge_index
    expect(bool((graph[rows] == graph[cols]).all()), "edges within one graph of the batch", "edges between graphs")
    x = data.x.new_zeros(batch, most, data.x.shape[1]).index_put((graph, place), data.x)
    weight = _weight(data)
    weight = data.x.new_ones(len(rows)) if weight is None else weight
    entries = (graph[rows], place[rows], place[cols])
    adjacency = data.x.new_zeros(batch, most, most).index_put(entries, weight, accumulate=True)
    return x, (adjacency, torch.arange(most, device=x.device) < sizes.unsqueeze(-1))


def to_pyg(x: Tensor, context: Context | None = None, *, like: Any = None) -> Any:
    """Padded node features and their graphs as a PyTorch Geometric `Batch`.

    Args:
        x: `(graphs, N, F)`.
        context: `(adjacency, mask)`, as from `from_pyg`; the edges come out sorted by row and column, with their
            weights.
        like: the `Data` or `Batch` that `x` belongs to, instead of a context: the result is a copy of it with new node
            features.

    Example:
        >>> from torch_geometric.data import Data
        >>> data = Data(x=torch.ones(2, 3), edge_index=torch.tensor([[0, 1], [1, 0]]))
        >>> x, context = from_pyg(data)
        >>> to_pyg(2 * x, context)
        DataBatch(x=[2, 3], edge_index=[2, 2], edge_weight=[2], batch=[2], ptr=[2])
        >>> to_pyg(2 * x, like=data)
        Data(x=[2, 3], edge_index=[2, 2])
    """
    expect_tensor(x, "x")
    expect(x.ndim == 3, "x of shape (graphs, N, F)", tuple(x.shape))
    expect((context is None) != (like is None), "either a context or like", "both" if like is not None else "none")
    if like is not None:
        _check(like)
        graph, place, sizes = _places(like)
        fits = len(x) == len(sizes) and (len(sizes) == 0 or x.shape[1] >= int(sizes.amax()))
        expect(fits, f"x for the nodes of {len(sizes)} graphs", f"shape {tuple(x.shape)}")
        copy = like.clone()
        copy.x = x[graph, place]
        return copy
    from torch_geometric.data import Batch, Data

    adjacency, mask = context if context is not None else (x, x)
    _check_context(x, adjacency, mask)
    graphs = []
    for features, matrix, real in zip(x, adjacency, mask, strict=True):
        matrix = matrix[real][:, real]
        index = matrix.nonzero().T
        graphs.append(Data(x=features[real], edge_index=index, edge_weight=matrix[index[0], index[1]]))
    return Batch.from_data_list(graphs)


def log_prob(flow: Flow, data: Any) -> Tensor:
    """The log-likelihood of each graph's node features, `(graphs,)`, given its edges.

    Args:
        flow: a flow over node features whose context is the graph, such as `expmflow.models.graph_flow` makes.
        data: a `Data` (one graph) or a `Batch`.
    """
    x, (adjacency, mask) = from_pyg(data)
    padded = not bool(mask.all())
    expect(
        not padded or flow.base.sees_context, "a base that knows of padding, as NodeNormal", type(flow.base).__name__
    )
    return flow.log_prob(x, (adjacency, mask))


def graph_operator(theta0: Tensor, theta1: Tensor, data: Any) -> GraphConvOperator:
    """The graph convolution of a `Data` or `Batch` as one sparse graph: it acts on `data.x[None]`, without padding."""
    _check(data)
    return GraphConvOperator.from_edge_index(theta0, theta1, data.edge_index, data.x.shape[0], _weight(data))


def _weight(data: Any) -> Tensor | None:
    weight = getattr(data, "edge_weight", None)
    return None if weight is None else weight.to(data.x.dtype)


def _places(data: Any) -> tuple[Tensor, Tensor, Tensor]:
    """The graph of each node, its index in that graph, and the graphs' sizes."""
    nodes = torch.arange(data.x.shape[0], device=data.x.device)
    batch = getattr(data, "batch", None)
    if batch is None:
        return torch.zeros_like(nodes), nodes, nodes.new_tensor([len(nodes)])
    expect(
        tuple(batch.shape) == tuple(nodes.shape), f"a batch vector of shape {tuple(nodes.shape)}", tuple(batch.shape)
    )
    expect(bool((batch.diff() >= 0).all()), "a batch vector in ascending order", "one that goes back")
    sizes = torch.bincount(batch, minlength=int(getattr(data, "num_graphs", None) or 0))
    return batch, nodes - (sizes.cumsum(0) - sizes)[batch], sizes


def _check(data: Any) -> None:
    known = all(isinstance(getattr(data, name, None), Tensor) for name in ("x", "edge_index"))
    expect_type(known, "a Data or Batch with tensors x and edge_index", type(data).__name__)
    expect_tensor(data.x, "the node features x")
    expect(data.x.ndim == 2, "node features x of shape (nodes, F)", tuple(data.x.shape))
    index, nodes = data.edge_index, data.x.shape[0]
    fits = index.ndim == 2 and index.shape[0] == 2 and index.dtype == torch.int64
    expect(fits, "edge_index of shape (2, E) and dtype torch.int64", f"{tuple(index.shape)} and {index.dtype}")
    if index.numel():
        least, largest = (int(v) for v in torch.aminmax(index))
        expect(least >= 0 and largest < nodes, f"node indices from 0 to {nodes - 1}", f"{least} to {largest}")
    weight = _weight(data)
    if weight is not None:
        fits = tuple(weight.shape) == (index.shape[1],)
        expect(fits, f"edge_weight of shape ({index.shape[1]},)", tuple(weight.shape))
        expect_finite(weight, "edge_weight")


def _check_context(x: Tensor, adjacency: Any, mask: Any) -> None:
    batch, nodes = x.shape[:2]
    for name, value, shape in (("an adjacency", adjacency, (batch, nodes, nodes)), ("a mask", mask, (batch, nodes))):
        expect_type(isinstance(value, Tensor), f"{name} of shape {shape}", type(value).__name__)
        expect(tuple(value.shape) == shape, f"{name} of shape {shape}", tuple(value.shape))
