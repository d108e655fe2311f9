"""Sparse square matrices by rows: products with blocks of columns, and the gradients of their entries."""

from __future__ import annotations

import warnings
from functools import cache, cached_property, lru_cache
from typing import Any, final

import torch
from torch import Tensor

_ROUNDINGS = 16  # by which an entry and its mirror image may differ, in units of their dtype's spacing
_KEPT = 2**16  # nodes, up to which the random numbers for them are kept: a megabyte


@final
class Pattern:
    """Where the entries of an N × N matrix stand: `(rows, cols)`, sorted by row. Memory is linear in the entries."""

    def __init__(self, rows: Tensor, cols: Tensor, size: int) -> None:
        # half the memory traffic, and the only type for which the CPU's kernel makes no copy
        index = torch.int32 if max(size, rows.numel()) < 2**31 else torch.int64
        self.rows, self.cols, self.size = rows.to(index), cols.to(index), size
        self.starts = torch._convert_indices_from_coo_to_csr(rows, size, out_int32=index == torch.int32)

    @cached_property
    def order(self) -> Tensor:
        """What brings the entries into the order of the transposed matrix."""
        return torch.argsort(self.cols, stable=True)

    @cached_property
    def transposed(self) -> Pattern:
        return Pattern(self.cols.index_select(0, self.order), self.rows.index_select(0, self.order), self.size)

    def row_sums(self, values: Tensor) -> tuple[Tensor, bool]:
        """The sums of the rows in float64, and whether the matrix A with these entries, none negative, is symmetric.

        It is where A u = Aᵀ u to rounding for a random positive u: equal entries give equal sums, others almost never.
        Nothing need be sorted for that.
        """
        probe = (_kept_probe if self.size <= _KEPT else _probe)(self.size).to(values.device)
        entries, u = values.detach().double(), probe[:, 1]
        sums, along = (self.matrix(entries) @ probe).unbind(1)
        across = torch.zeros_like(along).index_add_(0, self.cols, u.index_select(0, self.rows).mul_(entries))
        slack = self.starts.diff().sqrt().mul_(_ROUNDINGS * torch.finfo(values.dtype).eps)
        return sums, bool((along.sub(across).abs_() <= across.add_(along).mul_(slack)).all())

    def matrix(self, values: Tensor) -> Tensor:
        """The matrix with these entries, in torch's compressed rows."""
        _hear_that_it_is_beta()
        shape = (self.size, self.size)
        return torch.sparse_csr_tensor(self.starts, self.cols, values, shape, check_invariants=False)

    def values_vjp(self, x: Tensor, y: Tensor) -> Tensor:
        """The gradient of ⟨y, product with x⟩ in the entries, for `x` and `y` of shape `(N, columns)`."""
        if torch.is_grad_enabled() or torch.compiler.is_compiling() or x.device.type != "cpu":
            return (y.index_select(0, self.rows) * x.index_select(0, self.cols)).sum(1)
        entries = self.matrix(y.new_zeros(self.rows.numel()))
        return torch.sparse.sampled_addmm(entries, y.contiguous(), x.mT, beta=0.0).values()


def _probe(size: int) -> Tensor:
    """Ones, and random numbers between ½ and 1½."""
    u = torch.rand(size, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return torch.stack([torch.ones_like(u), 0.5 + u], dim=1)


_kept_probe = lru_cache(maxsize=1)(_probe)


@cache
def _hear_that_it_is_beta() -> None:
    """torch says so once per process, and here nobody listens."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Sparse CSR tensor support is in beta state")
        none = torch.zeros(0, dtype=torch.int64)
        torch.sparse_csr_tensor(torch.zeros(2, dtype=torch.int64), none, none.float(), (1, 1), check_invariants=False)


class SparseProduct(torch.autograd.Function):
    """The product with gradients in `x`, `(N, columns)`, and in the entries, both sparse, to any order."""

    @staticmethod
    def forward(pattern: Pattern, values: Tensor, x: Tensor) -> Tensor:
        return pattern.matrix(values) @ x

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.pattern, values, x = inputs
        ctx.save_for_backward(values, x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor | None, Tensor | None]:
        (grad,) = grads
        values, x = ctx.saved_tensors
        _, needs_values, needs_x = ctx.needs_input_grad
        grad_values = ctx.pattern.values_vjp(x, grad) if needs_values else None
        if not needs_x:
            return None, grad_values, None
        mirrored = values.index_select(0, ctx.pattern.order)
        return None, grad_values, SparseProduct.apply(ctx.pattern.transposed, mirrored, grad)
