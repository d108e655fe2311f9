"""Long sums of sparse rows, added in blocks.

Rounding errors of n numbers of one sign, added one after another, grow like n: with a million neighbours, float32 keeps
two digits. So rows of more than `LONGEST` entries are cut into blocks, and the sums of the blocks are added in the same
way. The error then grows like the logarithm of n, and short rows are added as usual.
"""

from __future__ import annotations

import itertools
import warnings
from functools import cache
from typing import final

import torch
from torch import Tensor

LONGEST = 32  # how many numbers are added one after another


def block_levels(starts: Tensor) -> tuple[list[Tensor], int]:
    """The starts of the blocks of entries, of the blocks of these blocks, and so on, up to the rows themselves.

    Also returns how many numbers are added one after another, at most, through all levels together. `starts`,
    `(N + 1,)`, holds the start of each row; it is the only level if no row is long.
    """
    levels, depth = [], 0
    while (longest := _largest(lengths := starts.diff())) > LONGEST:
        lengths = lengths.long()
        counts = ((lengths + LONGEST - 1) // LONGEST).clamp_min_(1)
        ends = counts.cumsum(0)
        rows = torch.repeat_interleave(counts)
        places = torch.arange(len(rows), device=starts.device) - (ends - counts)[rows]
        blocks = starts[:-1][rows] + places * lengths[rows] // counts[rows]  # of equal lengths, up to one
        levels.append(torch.cat([blocks.to(starts.dtype), starts[-1:]]))
        depth += _largest(levels[-1].diff())
        starts = torch.cat([ends.new_zeros(1), ends]).to(starts.dtype)
    return [*levels, starts], depth + longest


def _largest(lengths: Tensor) -> int:
    return int(lengths.amax()) if lengths.numel() else 0


@final
class BlockedMatrix:
    """A sparse matrix whose long rows are added in blocks: products without gradient.

    Args:
        entries: the matrix that sums the blocks of the first level.
        sums: the matrices of ones that sum the blocks of each further one.
    """

    def __init__(self, entries: Tensor, sums: list[Tensor]) -> None:
        *self._inner, self._outer = [entries, *sums]

    def __matmul__(self, x: Tensor) -> Tensor:
        return self._outer @ self._partial_sums(x)

    def add_to(self, out: Tensor, x: Tensor, *, alpha: float = 1.0, beta: float = 1.0) -> Tensor:
        """`out` becomes β·out + α·(the product with x), in place."""
        return out.addmm_(self._outer, self._partial_sums(x), alpha=alpha, beta=beta)

    def _partial_sums(self, x: Tensor) -> Tensor:
        for matrix in self._inner:
            x = matrix @ x
        return x


def compressed_rows(starts: Tensor, cols: Tensor, values: Tensor, size: int) -> Tensor:
    """A matrix with `size` columns in torch's compressed-row format."""
    _silence_beta_warning()
    return torch.sparse_csr_tensor(starts, cols, values, (len(starts) - 1, size), check_invariants=False)


def block_sums(levels: list[Tensor], like: Tensor) -> list[Tensor]:
    """The matrices that sum the blocks of all levels but the first."""
    matrices = []
    for blocks, starts in itertools.pairwise(levels):
        count = len(blocks) - 1
        cols = torch.arange(count, dtype=starts.dtype, device=starts.device)
        matrices.append(compressed_rows(starts, cols, like.new_ones(count), count))
    return matrices


@cache
def _silence_beta_warning() -> None:
    """Trigger torch's once-per-process warning that this format is in beta, and silence it."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Sparse CSR tensor support is in beta state")
        none = torch.zeros(0, dtype=torch.int64)
        torch.sparse_csr_tensor(torch.zeros(2, dtype=torch.int64), none, none.float(), (1, 1), check_invariants=False)
