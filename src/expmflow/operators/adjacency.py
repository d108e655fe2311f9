"""The normalised adjacency Â = D^-½ A D^-½ of a graph, dense or sparse, with D_ii = Σ_j A_ij."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from typing import Any, final

import torch
from torch import Tensor

from expmflow._validation import expect, expect_count, expect_finite, expect_tensor, expect_type


class Adjacency(ABC):
    """Â as a matrix that multiplies node features `(batch, N, F)` from the left. `values` holds its entries."""

    values: Tensor
    num_nodes: int
    batch_size: int | None

    @abstractmethod
    def rebuild(self, values: Tensor) -> Adjacency:
        """The same sparsity with other entries."""

    @abstractmethod
    def matmul(self, x: Tensor) -> Tensor:
        """Â x."""

    @abstractmethod
    def matmul_adjoint(self, y: Tensor) -> Tensor:
        """Âᵀ y."""

    @abstractmethod
    def values_vjp(self, x: Tensor, y: Tensor) -> Tensor:
        """The gradient of ⟨y, Â x⟩ in `values`."""

    @abstractmethod
    def trace(self) -> Tensor:
        """tr Â: a scalar, or one per graph."""

    @abstractmethod
    def is_symmetric(self) -> bool:
        """Whether Â = Âᵀ; a symmetric Â has its spectrum in [−1, 1]."""

    @abstractmethod
    def norm_bound(self) -> Tensor:
        """√(‖Â‖₁ ‖Â‖∞) ≥ ‖Â‖₂, for any Â."""


@final
class DenseAdjacency(Adjacency):
    """Â stored as `(N, N)` or `(batch, N, N)`."""

    def __init__(self, values: Tensor) -> None:
        self.values = values
        self.num_nodes = values.shape[-1]
        self.batch_size = values.shape[0] if values.ndim == 3 else None

    def rebuild(self, values: Tensor) -> DenseAdjacency:
        return DenseAdjacency(values)

    def matmul(self, x: Tensor) -> Tensor:
        return self.values @ x

    def matmul_adjoint(self, y: Tensor) -> Tensor:
        return self.values.mT @ y

    def values_vjp(self, x: Tensor, y: Tensor) -> Tensor:
        outer = y @ x.mT
        return outer if self.batch_size is not None else outer.sum(0)

    def trace(self) -> Tensor:
        return self.values.diagonal(dim1=-2, dim2=-1).sum(-1)

    def is_symmetric(self) -> bool:
        return torch.equal(self.values, self.values.mT)

    def norm_bound(self) -> Tensor:
        entries = self.values.double().abs()
        return (entries.sum(-1).amax(-1) * entries.sum(-2).amax(-1)).sqrt().amax()


@final
class SparseAdjacency(Adjacency):
    """Â as its entries at `(rows, cols)`, sorted by row; no N × N matrix anywhere, memory linear in the edges."""

    def __init__(self, rows: Tensor, cols: Tensor, values: Tensor, num_nodes: int) -> None:
        self.values = values
        self.num_nodes = num_nodes
        self.batch_size = None
        self._rows, self._cols = rows, cols
        self._order = torch.argsort(cols, stable=True)  # the entries of Âᵀ, sorted by its rows
        self._starts = _row_starts(rows, num_nodes)
        self._starts_adjoint = _row_starts(cols[self._order], num_nodes)

    def rebuild(self, values: Tensor) -> SparseAdjacency:
        twin = object.__new__(SparseAdjacency)
        twin.__dict__.update(self.__dict__, values=values)
        return twin

    def matmul(self, x: Tensor) -> Tensor:
        return self._product(x, adjoint=False)

    def matmul_adjoint(self, y: Tensor) -> Tensor:
        return self._product(y, adjoint=True)

    def _product(self, x: Tensor, *, adjoint: bool) -> Tensor:
        if not torch.compiler.is_compiling():
            return _SparseProduct.apply(self, adjoint, x, self.values)
        # compressed rows cannot be traced: gather, weigh and add
        rows, cols = (self._cols, self._rows) if adjoint else (self._rows, self._cols)
        return torch.zeros_like(x).index_add(1, rows, self.values.unsqueeze(-1) * x[:, cols])

    def multiply(self, x: Tensor, values: Tensor, adjoint: bool) -> Tensor:
        """The bare product, by a compressed-row kernel over all columns of the batch at once."""
        if adjoint:
            matrix = _csr(self._starts_adjoint, self._rows[self._order], values[self._order], self.num_nodes)
        else:
            matrix = _csr(self._starts, self._cols, values, self.num_nodes)
        columns = x.transpose(0, 1)
        product = matrix @ columns.reshape(self.num_nodes, x.shape[0] * x.shape[2])
        return product.reshape(columns.shape).transpose(0, 1)

    def values_vjp(self, x: Tensor, y: Tensor) -> Tensor:
        return (y[:, self._rows] * x[:, self._cols]).sum((0, 2))

    def trace(self) -> Tensor:
        return self.values[self._rows == self._cols].sum()

    def is_symmetric(self) -> bool:
        order = self._order
        same_places = torch.equal(self._rows[order], self._cols) and torch.equal(self._cols[order], self._rows)
        return same_places and torch.equal(self.values[order], self.values)

    def norm_bound(self) -> Tensor:
        entries, zero = self.values.double().abs(), self.values.new_zeros(self.num_nodes, dtype=torch.float64)
        row_sums, col_sums = zero.index_add(0, self._rows, entries), zero.index_add(0, self._cols, entries)
        return (row_sums.amax() * col_sums.amax()).sqrt() if self.num_nodes else entries.sum()


class _SparseProduct(torch.autograd.Function):
    """Â x with gradients in x and in the entries, both sparse, to any order."""

    @staticmethod
    def forward(adjacency: SparseAdjacency, adjoint: bool, x: Tensor, values: Tensor) -> Tensor:
        return adjacency.multiply(x, values, adjoint)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.adjacency, ctx.adjoint, x, values = inputs
        ctx.save_for_backward(x, values)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None, Tensor | None, Tensor | None]:
        (grad,) = grads
        x, values = ctx.saved_tensors
        needs_x, needs_values = ctx.needs_input_grad[2:]
        first, second = (grad, x) if ctx.adjoint else (x, grad)
        grad_x = _SparseProduct.apply(ctx.adjacency, not ctx.adjoint, grad, values) if needs_x else None
        return None, None, grad_x, ctx.adjacency.values_vjp(first, second) if needs_values else None


def _row_starts(rows: Tensor, num_nodes: int) -> Tensor:
    counts = torch.bincount(rows, minlength=num_nodes)
    return torch.cat([counts.new_zeros(1), counts.cumsum(0)])


def _csr(starts: Tensor, cols: Tensor, values: Tensor, num_nodes: int) -> Tensor:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Sparse CSR tensor support is in beta state")
        return torch.sparse_csr_tensor(starts, cols, values, (num_nodes, num_nodes), check_invariants=False)


def normalised(adjacency: Tensor, mask: Tensor | None = None, *, validate: bool = True) -> Adjacency:
    """Â of an adjacency `(N, N)` or `(batch, N, N)`, dense or torch-sparse; nodes outside `mask` lose their edges."""
    if validate:
        check_adjacency(adjacency, mask)
    if adjacency.layout != torch.strided:
        entries = adjacency.to_sparse_coo().coalesce()
        rows, cols = entries.indices()
        return from_entries(rows, cols, entries.values(), adjacency.shape[-1])
    if mask is not None:
        adjacency = adjacency * mask.unsqueeze(-1) * mask.unsqueeze(-2)
    scale = _inverse_root(adjacency.sum(-1, dtype=torch.float64)).to(adjacency.dtype)
    # the scales first: their product is the same for (i, j) and (j, i) to the last bit, so symmetry survives rounding
    return DenseAdjacency(scale.unsqueeze(-1) * scale.unsqueeze(-2) * adjacency)


def from_entries(rows: Tensor, cols: Tensor, values: Tensor, num_nodes: int) -> SparseAdjacency:
    """Â of coalesced entries, sorted by row."""
    degrees = values.new_zeros(num_nodes, dtype=torch.float64).index_add(0, rows, values.double())
    scale = _inverse_root(degrees).to(values.dtype)
    return SparseAdjacency(rows, cols, scale[rows] * scale[cols] * values, num_nodes)


def from_edges(edge_index: Tensor, num_nodes: int, edge_weight: Tensor | None, like: Tensor) -> SparseAdjacency:
    """Â of the edges `A[edge_index[0], edge_index[1]] += edge_weight` (1 if not given)."""
    expect_type(isinstance(edge_index, Tensor), "edge_index to be a tensor", type(edge_index).__name__)
    expect_type(edge_index.dtype == torch.int64, "edge_index of dtype torch.int64", edge_index.dtype)
    expect(edge_index.ndim == 2 and edge_index.shape[0] == 2, "edge_index of shape (2, E)", tuple(edge_index.shape))
    expect_count(num_nodes, "num_nodes", at_least=0)
    if edge_index.numel():
        least, largest = (int(v) for v in torch.aminmax(edge_index))
        inside = least >= 0 and largest < num_nodes
        expect(inside, f"node indices from 0 to {num_nodes - 1}", f"{least} to {largest}")
    edges = edge_index.shape[1]
    if edge_weight is None:
        edge_weight = like.new_ones(edges)
    expect_tensor(edge_weight, "edge_weight")
    expect(edge_weight.shape == (edges,), f"edge_weight of shape ({edges},)", tuple(edge_weight.shape))
    _check_weights(edge_weight)
    unique, place = torch.unique(edge_index[0] * num_nodes + edge_index[1], return_inverse=True)
    values = edge_weight.new_zeros(unique.numel()).index_add(0, place, edge_weight)
    width = max(num_nodes, 1)
    return from_entries(unique // width, unique % width, values, num_nodes)


def check_adjacency(adjacency: Tensor, mask: Tensor | None) -> None:
    """Raise unless these describe graphs with non-negative weights."""
    expect_tensor(adjacency, "the adjacency")
    shape = tuple(adjacency.shape)
    square = adjacency.ndim in (2, 3) and shape[-1] == shape[-2]
    expect(square, "an adjacency of shape (N, N) or (batch, N, N)", shape)
    sparse = adjacency.layout != torch.strided
    expect(not (sparse and adjacency.ndim == 3), "a sparse adjacency of shape (N, N)", shape)
    _check_weights(adjacency.to_sparse_coo().coalesce().values() if sparse else adjacency)
    if mask is not None:
        expect(not sparse, "a dense adjacency beside a node mask", "a sparse one")
        expect_type(mask.dtype == torch.bool, "a node mask of dtype torch.bool", mask.dtype)
        batch = adjacency.shape[0] if adjacency.ndim == 3 else mask.shape[0]
        expect(
            tuple(mask.shape) == (batch, shape[-1]), f"a node mask of shape ({batch}, {shape[-1]})", tuple(mask.shape)
        )


def _check_weights(weights: Tensor) -> None:
    expect_finite(weights, "the edge weights")
    if not torch.compiler.is_compiling():
        expect(not bool((weights < 0).any()), "non-negative edge weights", "negative ones")


def _inverse_root(degrees: Tensor) -> Tensor:
    """degrees^-½, and 0 for isolated nodes."""
    connected = degrees > 0
    return torch.where(connected, degrees, 1).rsqrt() * connected
