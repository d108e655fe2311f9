"""The linear graph convolution as an operator."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import final

import torch
from torch import Tensor

from expmflow._validation import expect, expect_alike, expect_finite, expect_tensor
from expmflow.operators import matrices
from expmflow.operators.adjacency import Adjacency, SparseAdjacency, from_edges, normalised
from expmflow.operators.base import LinearOperator, Scalar

_ROUNDINGS = 4  # of an entry of Â, in units of its dtype's spacing: the spectrum lies in [−1, 1] up to these


@final
class GraphConvOperator(LinearOperator):
    """X ↦ X θ0 + Â X θ1 with Â = D^-½ A D^-½, for node features `X` of shape `(batch, N, F)`.

    Args:
        theta0: `(F, F)`, applied to a node's own features; or `(batch, F, F)`, one for each graph.
        theta1: `(F, F)` or `(batch, F, F)`, applied to the features of its neighbours.
        adjacency: non-negative weights, `(N, N)` or `(batch, N, N)` dense, or `(N, N)` torch-sparse. Isolated nodes
            receive nothing; self-loops count.
        mask: `(batch, N)` booleans, False for the padding of smaller graphs: the operator is zero there, so its
            exponential leaves padding untouched.
        validate: check shapes and values; layers that build an operator at each call turn it off.

    Example:
        >>> minus_laplacian = GraphConvOperator(-torch.eye(1), torch.eye(1), torch.ones(3, 3) - torch.eye(3))
        >>> minus_laplacian(torch.ones(1, 3, 1)).abs().max().item() < 1e-6
        True
        >>> round(minus_laplacian.log_norm_bound((3, 1)).item(), 6)
        0.0
    """

    def __init__(
        self,
        theta0: Tensor,
        theta1: Tensor,
        adjacency: Tensor | Adjacency,
        *,
        mask: Tensor | None = None,
        validate: bool = True,
    ) -> None:
        super().__init__()
        if validate:
            _check_weights(theta0, theta1)
            entries = adjacency.values if isinstance(adjacency, Adjacency) else adjacency
            expect_tensor(entries, "the adjacency")
            expect_alike([("theta0", theta0), ("the adjacency", entries)])
        graph = adjacency if isinstance(adjacency, Adjacency) else normalised(adjacency, mask, validate=validate)
        self.theta0 = theta0
        self.theta1 = theta1
        self.graph = graph
        self.mask = mask
        if validate:
            sizes = sorted(set(self._batch_sizes()))
            expect(len(sizes) <= 1, "one batch size of theta0, theta1, adjacency and mask", f"{sizes}")

    @classmethod
    def from_edge_index(
        cls,
        theta0: Tensor,
        theta1: Tensor,
        edge_index: Tensor,
        num_nodes: int,
        edge_weight: Tensor | None = None,
    ) -> GraphConvOperator:
        """The operator of a sparse graph given by its edges.

        Args:
            theta0, theta1: as for the constructor.
            edge_index: `(2, E)` integers; edge e sets `A[edge_index[0, e], edge_index[1, e]]`, parallel edges add up.
                An undirected graph lists both directions.
            num_nodes: N.
            edge_weight: `(E,)` non-negative, 1 if not given.
        """
        expect_tensor(theta0, "theta0")
        return cls(theta0, theta1, from_edges(edge_index, num_nodes, edge_weight, like=theta0))

    @property
    def parameters(self) -> tuple[Tensor, ...]:
        return (self.theta0, self.theta1, self.graph.values)

    @property
    def borrowed(self) -> tuple[Tensor, ...]:
        """Without the entries of a sparse Â, which the operator computes from the adjacency; they may be large."""
        own = isinstance(self.graph, SparseAdjacency)
        return (self.theta0, self.theta1) if own else self.parameters

    @property
    def batch_size(self) -> int | None:
        return next(self._batch_sizes(), None)

    def _batch_sizes(self) -> Iterator[int]:
        """The batch sizes of the parts that differ within the batch."""
        yield from (theta.shape[0] for theta in (self.theta0, self.theta1) if theta.ndim == 3)
        if self.mask is not None:
            yield self.mask.shape[0]
        if self.graph.batch_size is not None:
            yield self.graph.batch_size

    def rebuild(self, parameters: Sequence[Tensor]) -> GraphConvOperator:
        theta0, theta1, values = parameters
        return GraphConvOperator(theta0, theta1, self.graph.rebuild(values), mask=self.mask, validate=False)

    def scale(self, factor: Scalar) -> GraphConvOperator:
        return GraphConvOperator(self.theta0 * factor, self.theta1 * factor, self.graph, mask=self.mask, validate=False)

    def multiples(self, factors: Sequence[float]) -> list[LinearOperator]:
        def scaled(theta: Tensor) -> tuple[Tensor, ...]:
            return (theta.new_tensor(factors).reshape(-1, *(1,) * theta.ndim) * theta).unbind()

        parts = zip(scaled(self.theta0), scaled(self.theta1), strict=True)
        return [GraphConvOperator(a, b, self.graph, mask=self.mask, validate=False) for a, b in parts]

    def apply(self, x: Tensor) -> Tensor:
        graph = self.graph
        if isinstance(graph, SparseAdjacency) and not (torch.is_grad_enabled() or torch.compiler.is_compiling()):
            return graph.add_product(x @ self.theta0, x @ self.theta1)  # a sparse graph has no mask
        return self._masked(x @ self.theta0) + self.graph.matmul(x @ self.theta1)

    def apply_adjoint(self, y: Tensor) -> Tensor:
        return self._masked(y @ self.theta0.mT) + self.graph.matmul_adjoint(y) @ self.theta1.mT

    def adjoint_product(self) -> Callable[[Tensor], Tensor]:
        graph = self.graph
        if not isinstance(graph, SparseAdjacency) or torch.compiler.is_compiling():
            return self.apply_adjoint
        mirrored = graph.transposed()
        return lambda y: y @ self.theta0.mT + mirrored.matmul(y) @ self.theta1.mT

    def parameter_vjp(self, x: Tensor, y: Tensor) -> tuple[Tensor | None, ...]:
        grad_theta0 = _outer(x, self._masked(y), self.theta0)
        grad_theta1 = _outer(x, self.graph.matmul_adjoint(y), self.theta1)
        needed = self.graph.values.requires_grad
        return grad_theta0, grad_theta1, self.graph.values_vjp(x @ self.theta1, y) if needed else None

    def layout(self, x: Tensor) -> Tensor:
        """Nodes first in memory, for the sparse product."""
        return x.transpose(0, 1).contiguous().transpose(0, 1) if isinstance(self.graph, SparseAdjacency) else x

    def check_event_shape(self, event_shape: tuple[int, ...]) -> None:
        nodes, features = self.graph.num_nodes, self.theta0.shape[-1]
        expect(
            event_shape == (nodes, features),
            f"node features of shape (batch, {nodes}, {features})",
            f"events of shape {event_shape}",
        )

    def trace(self, event_shape: Sequence[int]) -> Tensor:
        """N tr θ0 + tr Â tr θ1: a scalar, or one per graph; tr Â comes from the self-loops."""
        nodes = self._event(event_shape)[0] if self.mask is None else self.mask.sum(-1)
        return nodes * matrices.trace(self.theta0) + self.graph.trace() * matrices.trace(self.theta1)

    def sum_length(self, event_shape: Sequence[int]) -> int:
        """The features, then the neighbours (many are added in blocks), then the sum of both parts."""
        return int(self.theta0.shape[-1]) + self.graph.sum_length() + 1

    def adjoint_sum_length(self, event_shape: Sequence[int]) -> int:
        return int(self.theta0.shape[-1]) + self.graph.adjoint_sum_length() + 1

    def _absolute_norm_bound(self, event_shape: tuple[int, ...]) -> Tensor:
        theta0, theta1 = self.theta0.double().abs(), self.theta1.double().abs()
        reach = self.radius if self.graph.is_symmetric() else self.graph.norm_bound()
        return matrices.norm(theta0) + reach * matrices.norm(theta1)

    def _norm_bound(self, event_shape: tuple[int, ...]) -> Tensor:
        theta0, theta1 = self.theta0.double(), self.theta1.double()
        if self.graph.is_symmetric():
            # block-diagonal in Â's eigenbasis, blocks θ0 + λθ1 with |λ| ≤ radius, and a norm is convex in λ
            return matrices.norm(torch.stack([theta0 + self.radius * theta1, theta0 - self.radius * theta1]))
        return matrices.norm(theta0) + self.graph.norm_bound() * matrices.norm(theta1)

    def _log_norm_bound(self, event_shape: tuple[int, ...]) -> Tensor:
        theta0, theta1 = self.theta0.double(), self.theta1.double()
        if self.graph.is_symmetric():
            bound = matrices.log_norm(torch.stack([theta0 + self.radius * theta1, theta0 - self.radius * theta1]))
        else:
            bound = matrices.log_norm(theta0) + self.graph.norm_bound() * matrices.norm(theta1)
        padded = self.mask is not None and not bool(self.mask.all())
        return bound.clamp_min(0) if padded else bound  # the operator is zero on padding, so 0 is an eigenvalue

    @property
    def radius(self) -> float:
        """A bound of the spectrum of a symmetric Â: one, up to rounding."""
        return 1 + _ROUNDINGS * torch.finfo(self.graph.values.dtype).eps

    def _masked(self, x: Tensor) -> Tensor:
        return x if self.mask is None else x * self.mask.unsqueeze(-1)


def _outer(x: Tensor, y: Tensor, theta: Tensor) -> Tensor:
    """The gradient of ⟨y, x θ⟩ in θ."""
    return torch.einsum("bnf,bng->fg" if theta.ndim == 2 else "bnf,bng->bfg", x, y)


def _check_weights(theta0: Tensor, theta1: Tensor) -> None:
    for name, theta in (("theta0", theta0), ("theta1", theta1)):
        expect_tensor(theta, name)
        square = theta.ndim in (2, 3) and theta.shape[-2] == theta.shape[-1] and theta.shape[-1] > 0
        expect(square, f"{name} of shape (F, F) or (batch, F, F)", tuple(theta.shape))
        expect_finite(theta, name)
    expect(theta0.shape[-1] == theta1.shape[-1], f"theta1 of {theta0.shape[-1]} features", theta1.shape[-1])
    expect_alike([("theta0", theta0), ("theta1", theta1)])
