"""Traces and norms of matrices `(d, d)` or `(batch, d, d)`, also of empty ones."""

from __future__ import annotations

import torch
from torch import Tensor


def trace(matrix: Tensor) -> Tensor:
    """tr M: a scalar, or one for each matrix of a batch."""
    return matrix.diagonal(dim1=-2, dim2=-1).sum(-1)


def norm(matrix: Tensor) -> Tensor:
    """‖M‖, the largest of a batch; 0 without entries."""
    return torch.linalg.matrix_norm(matrix, ord=2).amax() if matrix.numel() else matrix.new_zeros(())


def log_norm(matrix: Tensor) -> Tensor:
    """λmax((M + Mᵀ)/2), the largest of a batch; 0 without entries."""
    return torch.linalg.eigvalsh((matrix + matrix.mT) / 2).amax() if matrix.numel() else matrix.new_zeros(())
