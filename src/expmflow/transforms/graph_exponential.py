"""The graph convolution exponential: Z = exp(X ↦ X θ0 + Â X θ1), with the graph as context."""

from __future__ import annotations

from typing import Any, ClassVar, final

import torch
from torch import Tensor, nn

from expmflow._validation import expect_count
from expmflow.nn.graph import check_graph, complete_graph, split_graph
from expmflow.numerics import SeriesPlan
from expmflow.numerics.series import Gradient
from expmflow.operators import DenseOperator, GraphConvOperator, LinearOperator
from expmflow.operators.adjacency import check_adjacency
from expmflow.transforms.base import Output
from expmflow.transforms.exponential import INITIAL_NORM, Exponential
from expmflow.transforms.shapes import expect_nodes

SMALL = 64  # entries of node features in a graph, up to which its exponential is computed as a matrix


@final
class GraphConvExp(Exponential):
    """Z = exp(X ↦ X θ0 + Â X θ1): the graph convolution exponential, for node features `(batch, N, features)`.

    The context is the adjacency: `(N, N)` or `(batch, N, N)`, or a pair `(adjacency, mask)` for graphs of different
    sizes in one padded batch, with `mask` of shape `(batch, N)`. None instead of either means the complete graph.

    The norm rule is the paper's: ‖θ0‖ at most one over the largest number of neighbours in the graph, ‖θ1‖ at most one.

    Args:
        features: F.
        max_neighbours: the largest number of neighbours. If None it is counted per graph, never over the batch, so that
            a graph's likelihood does not depend on the other graphs.
        tol: the truncation error (follows the dtype if None); alternatively `terms`, a fixed number of terms.
        gradient: `"autograd"` (faster) or `"recompute"` (memory does not grow with the terms).

    Example:
        >>> layer = T.GraphConvExp(2)
        >>> z, logdet = layer(torch.randn(8, 4, 2), context=torch.ones(4, 4) - torch.eye(4))
    """

    freezes: ClassVar[bool] = False

    def __init__(
        self,
        features: int,
        *,
        max_neighbours: int | None = None,
        tol: float | None = None,
        terms: int | None = None,
        gradient: Gradient = "autograd",
    ) -> None:
        super().__init__(None, tol, terms, gradient)
        expect_count(features, "features")
        if max_neighbours is not None:
            expect_count(max_neighbours, "max_neighbours")
        self.features = features
        self.max_neighbours = max_neighbours
        scale = INITIAL_NORM / (2 * features**0.5)
        self.theta0 = nn.Parameter(torch.randn(features, features) * scale)
        self.theta1 = nn.Parameter(torch.randn(features, features) * scale)

    def operator(self, context: Any = None) -> GraphConvOperator:
        adjacency, mask = split_graph(context)
        theta0, theta1 = _at_most_one(torch.stack([self.theta0, self.theta1])).unbind()
        if self.max_neighbours is not None:
            theta0 = theta0 / self.max_neighbours
        else:
            theta0 = theta0 / _largest_degree(adjacency, mask)
        return GraphConvOperator(theta0, theta1, adjacency, mask=mask, validate=False)

    def _exponential(self, x: Tensor, sign: float, context: Any) -> Output:
        adjacency, mask = split_graph(context)
        if adjacency is None:
            context = (complete_graph(x), mask)
        elif adjacency.layout != torch.strided:  # the compiler cannot handle the entries of sparse tensors
            return torch.compiler.disable(super()._exponential)(x, sign, context)
        return super()._exponential(x, sign, context)

    def _series(self, op: LinearOperator, x: Tensor, t: float, plan: SeriesPlan | int | None) -> Tensor:
        """As `Exponential`, but one small graph shared by all rows is a small matrix, with almost free products."""
        size = x.shape[1:].numel()
        if torch.compiler.is_compiling() or size > SMALL or op.batch_size is not None or x.shape[0] < size:
            return super()._series(op, x, t, plan)
        matrix = DenseOperator(op.dense(x.shape[1:]), validate=False)
        return super()._series(matrix, x.flatten(1), t, plan).reshape(x.shape)

    def plan(self, x: Tensor) -> SeriesPlan | int | None:
        """‖θ0‖ + ‖θ1‖ ≤ 2 for a symmetric graph; any other needs its certified bound."""
        return self.terms

    def check_event_shape(self, event_shape: tuple[int, ...]) -> None:
        expect_nodes(event_shape, self.features)

    def check_context(self, context: Any, x: Tensor) -> None:
        adjacency, mask = split_graph(context)
        check_graph(adjacency, mask, x)
        if adjacency is not None:
            check_adjacency(adjacency, mask)


def _at_most_one(thetas: Tensor) -> Tensor:
    return thetas / torch.linalg.matrix_norm(thetas, ord=2, keepdim=True).clamp_min(1)


def _largest_degree(adjacency: Tensor, mask: Tensor | None) -> Tensor:
    """The largest number of neighbours: a scalar, or `(batch, 1, 1)`; at least one."""
    if adjacency.layout != torch.strided:
        entries = adjacency.to_sparse_coo().coalesce()
        rows = entries.indices()[0][entries.values() != 0]
        return torch.bincount(rows, minlength=1).amax().clamp_min(1)
    linked = adjacency != 0
    if mask is not None:
        linked = linked & mask.unsqueeze(-1) & mask.unsqueeze(-2)
    neighbours = linked.sum(-1)
    largest = (neighbours.amax(-1) if neighbours.shape[-1] else neighbours.sum(-1)).clamp_min(1)
    return largest[:, None, None] if largest.ndim else largest
