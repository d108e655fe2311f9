"""Sparse square matrices by rows: products with blocks of columns, and the gradients of their entries."""

from __future__ import annotations

from functools import cached_property, lru_cache
from typing import Any, final

import torch
from torch import Tensor

from expmflow.operators.blocks import BlockedMatrix, block_levels, block_sums, compressed_rows

_ROUNDINGS = 16  # how far an entry and its mirror image may differ, in units of their dtype's spacing
_KEPT = 2**16  # the largest number of nodes for which the random probe is cached: a megabyte


@final
class Pattern:
    """The places `(rows, cols)` of an N × N matrix's entries, sorted by row; memory is linear in their number."""

    def __init__(self, rows: Tensor, cols: Tensor, size: int) -> None:
        # half the memory traffic, and the only type for which the CPU's kernel makes no copy
        index = torch.int32 if max(size, rows.numel()) < 2**31 else torch.int64
        self.rows, self.cols, self.size = rows.to(index), cols.to(index), size
        self.starts = torch._convert_indices_from_coo_to_csr(rows, size, out_int32=index == torch.int32)
        self._levels, self.depth = block_levels(self.starts)  # how many numbers are added one after another
        self._ones: dict[torch.dtype, list[Tensor]] = {}

    @cached_property
    @torch.inference_mode(False)  # what is cached must also work in training
    def order(self) -> Tensor:
        """The permutation that sorts the entries of the transposed matrix."""
        return torch.argsort(self.cols, stable=True)

    @cached_property
    @torch.inference_mode(False)
    def transposed(self) -> Pattern:
        return Pattern(self.cols.index_select(0, self.order), self.rows.index_select(0, self.order), self.size)

    def row_sums(self, values: Tensor) -> tuple[Tensor, bool]:
        """The row sums in float64, and whether the matrix A with these non-negative entries is symmetric.

        A counts as symmetric if A u = Aᵀ u to rounding for a random positive u: this holds for every symmetric A, and
        almost never for another. No sorting is needed.
        """
        probe = (_kept_probe if self.size <= _KEPT else _probe)(self.size).to(values.device)
        entries, u = values.detach().double(), probe[:, 1]
        sums, along = (self.matrix(entries) @ probe).unbind(1)
        across = torch.zeros_like(along).index_add_(0, self.cols, u.index_select(0, self.rows).mul_(entries))
        slack = self.starts.diff().sqrt().mul_(_ROUNDINGS * torch.finfo(values.dtype).eps)
        return sums, bool((along.sub(across).abs_() <= across.add_(along).mul_(slack)).all())

    def matrix(self, values: Tensor) -> BlockedMatrix:
        """The matrix with these entries."""
        entries = compressed_rows(self._levels[0], self.cols, values, self.size)
        return BlockedMatrix(entries, self._sums(values))

    def _sums(self, like: Tensor) -> list[Tensor]:
        if like.dtype not in self._ones:
            self._ones[like.dtype] = block_sums(self._levels, like)
        return self._ones[like.dtype]

    def add_rows(self, entries: Tensor) -> Tensor:
        """The row sums `(..., N, columns)` of `(..., entries, columns)`, in a form for autograd and compilers."""
        for index, count in self._groups():
            entries = entries.new_zeros(*entries.shape[:-2], count, entries.shape[-1]).index_add(-2, index, entries)
        return entries

    def _groups(self) -> list[tuple[Tensor, int]]:
        """The block of each entry, the block of each block, and so on; and the number of blocks at each level."""
        if len(self._levels) == 1:
            return [(self.rows, self.size)]
        sizes = [self.rows.numel(), *(len(starts) - 1 for starts in self._levels)]
        index = [
            torch.repeat_interleave(starts.diff(), output_size=size)
            for starts, size in zip(self._levels, sizes, strict=False)
        ]
        return list(zip(index, sizes[1:], strict=True))

    def values_vjp(self, x: Tensor, y: Tensor) -> Tensor:
        """The gradient of ⟨y, product with x⟩ in the entries, for `x` and `y` of shape `(N, columns)`."""
        if torch.is_grad_enabled() or torch.compiler.is_compiling() or x.device.type != "cpu":
            return (y.index_select(0, self.rows) * x.index_select(0, self.cols)).sum(1)
        entries = compressed_rows(self.starts, self.cols, y.new_zeros(self.rows.numel()), self.size)
        return torch.sparse.sampled_addmm(entries, y.contiguous(), x.mT, beta=0.0).values()


def _probe(size: int) -> Tensor:
    """Ones, and random numbers between ½ and 1½."""
    u = torch.rand(size, generator=torch.Generator().manual_seed(0), dtype=torch.float64, device="cpu")
    return torch.stack([torch.ones_like(u), 0.5 + u], dim=1)


_kept_probe = lru_cache(maxsize=1)(_probe)


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
