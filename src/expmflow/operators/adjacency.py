"""The normalised adjacency Â = D^-½ A D^-½ of a graph, dense or sparse, with D_ii = Σ_j A_ij."""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import cached_property
from typing import final

import torch
from torch import Tensor

from expmflow._transformed import batched, largest_of_all
from expmflow._validation import expect, expect_count, expect_finite, expect_tensor, expect_type, expect_untraced
from expmflow.operators.blocks import BlockedMatrix
from expmflow.operators.sparse import Pattern, SparseProduct


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
    def sum_length(self) -> int:
        """How many numbers are added, one after another, for one entry of Â x."""

    def adjoint_sum_length(self) -> int:
        """The same for Âᵀ."""
        return self.sum_length()

    @abstractmethod
    def norm_bound(self) -> Tensor:
        """√(‖Â‖₁ ‖Â‖∞), an upper bound of ‖Â‖₂ for any Â."""


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
        return not largest_of_all((self.values != self.values.mT).any())

    def sum_length(self) -> int:
        return self.num_nodes

    def norm_bound(self) -> Tensor:
        entries = self.values.double().abs()
        return (entries.sum(-1).amax(-1).sqrt() * entries.sum(-2).amax(-1).sqrt()).amax()


@final
class SparseAdjacency(Adjacency):
    """Â stored as entries on a `Pattern`: no N × N matrix is formed, and memory is linear in the number of edges."""

    def __init__(self, pattern: Pattern, values: Tensor, *, symmetric: bool | None = None) -> None:
        self.values = values
        self.num_nodes = pattern.size
        self.batch_size = None
        self.pattern = pattern
        self._symmetric = None if symmetric is None else (symmetric, _version(values))

    def rebuild(self, values: Tensor) -> SparseAdjacency:
        return SparseAdjacency(self.pattern, values)

    def transposed(self) -> SparseAdjacency:
        """Âᵀ, with its entries sorted once for many products."""
        return SparseAdjacency(self.pattern.transposed, self.values.index_select(0, self.pattern.order))

    def matmul(self, x: Tensor) -> Tensor:
        if torch.compiler.is_compiling():  # compressed rows cannot be traced: gather, weigh and add
            weighed = self.values.unsqueeze(-1) * x[:, self.pattern.cols]
            return self.pattern.add_rows(weighed)
        expect_untraced("products with a sparse graph")
        return _from_columns(SparseProduct.apply(self.pattern, self.values, _as_columns(x)), x)

    def matmul_adjoint(self, y: Tensor) -> Tensor:
        if torch.compiler.is_compiling():
            weighed = self.values.unsqueeze(-1) * y[:, self.pattern.rows]  # unsorted, so summed in a wider dtype
            return torch.zeros_like(y, dtype=torch.float64).index_add(1, self.pattern.cols, weighed.double()).to(y)
        return self.transposed().matmul(y)

    def add_product(self, out: Tensor, x: Tensor) -> Tensor:
        """`out` + Â x, in the memory of `out` where possible; do not use `out` afterwards. No gradient."""
        expect_untraced("products with a sparse graph")
        columns = out.transpose(0, 1)
        if not columns.is_contiguous():
            return out + self.matmul(x)
        self.matrix.add_to(columns.flatten(1), _as_columns(x))
        return out

    @cached_property
    def matrix(self) -> BlockedMatrix:
        """Â as a matrix of compressed rows, without gradient."""
        return self.pattern.matrix(self.values.detach())

    def values_vjp(self, x: Tensor, y: Tensor) -> Tensor:
        return self.pattern.values_vjp(_as_columns(x), _as_columns(y))

    def trace(self) -> Tensor:
        return self.values[self.pattern.rows == self.pattern.cols].sum()

    def is_symmetric(self) -> bool:
        version = _version(self.values)
        if self._symmetric is None or self._symmetric[1] != version:
            self._symmetric = self.pattern.row_sums(self.values)[1], version
        return self._symmetric[0]

    def sum_length(self) -> int:
        return self.pattern.depth

    def adjoint_sum_length(self) -> int:
        return self.pattern.transposed.depth

    def norm_bound(self) -> Tensor:
        entries, zero = self.values.double().abs(), self.values.new_zeros(self.num_nodes, dtype=torch.float64)
        row_sums, col_sums = (zero.index_add(0, index, entries) for index in (self.pattern.rows, self.pattern.cols))
        return row_sums.amax().sqrt() * col_sums.amax().sqrt() if self.num_nodes else entries.sum()


def _as_columns(x: Tensor) -> Tensor:
    """`(batch, N, F)` as `(N, batch · F)`."""
    return x.transpose(0, 1).reshape(x.shape[1], x.shape[0] * x.shape[2])


def _from_columns(columns: Tensor, like: Tensor) -> Tensor:
    batch, nodes, features = like.shape
    return columns.reshape(nodes, batch, features).transpose(0, 1)


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
    # multiply the scales first: their product is bitwise the same for (i, j) and (j, i), so Â stays symmetric
    return DenseAdjacency(scale.unsqueeze(-1) * scale.unsqueeze(-2) * adjacency)


def from_entries(rows: Tensor, cols: Tensor, values: Tensor, num_nodes: int) -> SparseAdjacency:
    """Â of coalesced entries, sorted by row."""
    known = values.dtype in (torch.float32, torch.float64)
    expect_type(known, "a sparse graph in torch.float32 or torch.float64", values.dtype)
    pattern = Pattern(rows, cols, num_nodes)
    degree, symmetric = pattern.row_sums(values)
    if values.requires_grad:
        degree = degrees(pattern, values)
    scale = _inverse_root(degree).to(values.dtype)
    ends = scale.index_select(0, pattern.rows), scale.index_select(0, pattern.cols)
    entries = ends[0] * ends[1] * values if values.requires_grad else ends[0].mul_(ends[1]).mul_(values)
    return SparseAdjacency(pattern, entries, symmetric=symmetric)


def from_edges(edge_index: Tensor, num_nodes: int, edge_weight: Tensor | None, like: Tensor) -> SparseAdjacency:
    """Â of the graph with `A[edge_index[0], edge_index[1]] += edge_weight` (1 if not given)."""
    return from_entries(*coalesced(edge_index, num_nodes, edge_weight, like), num_nodes)


def degrees(pattern: Pattern, values: Tensor) -> Tensor:
    """The row sums, in float64."""
    return pattern.add_rows(values.double().unsqueeze(-1)).squeeze(-1)


def coalesced(
    edge_index: Tensor, num_nodes: int, edge_weight: Tensor | None, like: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The checked edges as rows, columns and weights, sorted by row and column; parallel edges are summed."""
    expect_type(isinstance(edge_index, Tensor), "edge_index to be a tensor", type(edge_index).__name__)
    expect_type(edge_index.dtype == torch.int64, "edge_index of dtype torch.int64", edge_index.dtype)
    expect(edge_index.ndim == 2 and edge_index.shape[0] == 2, "edge_index of shape (2, E)", tuple(edge_index.shape))
    expect_count(num_nodes, "num_nodes", at_least=0)
    edge_index = edge_index.contiguous()  # sorting returns pairs, whose rows are strided and slow to read
    if edge_index.numel():
        least, largest = map(int, torch.aminmax(edge_index))
        inside = least >= 0 and largest < num_nodes
        expect(inside, f"node indices from 0 to {num_nodes - 1}", f"{least} to {largest}")
    edges = edge_index.shape[1]
    if edge_weight is None:
        edge_weight = like.new_ones(edges)
    else:
        expect_tensor(edge_weight, "edge_weight")
        expect(edge_weight.shape == (edges,), f"edge_weight of shape ({edges},)", tuple(edge_weight.shape))
        _check_weights(edge_weight)
    rows, cols = edge_index.unbind()
    places = torch.add(cols, rows, alpha=num_nodes)
    rising = places[1:] > places[:-1]
    if not rising.numel() or bool(rising.view(torch.uint8).amin()):  # already sorted, as in most libraries
        return rows, cols, edge_weight
    unique, place = torch.unique(places, return_inverse=True)
    weights = edge_weight.new_zeros(unique.numel()).index_add(0, place, edge_weight)
    return unique // num_nodes, unique % num_nodes, weights


def check_adjacency(adjacency: Tensor, mask: Tensor | None) -> None:
    """Raise unless these are graphs with non-negative weights."""
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
    if not torch.compiler.is_compiling() and not batched(weights):
        expect(not bool((weights < 0).any()), "non-negative edge weights", "negative ones")


def _version(values: Tensor) -> int:
    """A value that changes when somebody writes into the tensor."""
    return 0 if values.is_inference() else values._version


def _inverse_root(degrees: Tensor) -> Tensor:
    """degrees^-½, and 0 for isolated nodes."""
    connected = degrees > 0
    return torch.where(connected, degrees, 1).rsqrt() * connected
