"""Whether a matrix can be inverted, and what it loses by that."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from expmflow._transformed import transformed


@torch.no_grad()
def is_regular(matrices: Tensor, scale: Tensor) -> bool:
    """Whether all of the `(…, n, n)` matrices can be inverted, as far as rounding can tell.

    Rounding is relative to `scale`, `(…, n)`: the size of the terms that each row is the sum of. They may cancel.

    The check reads the numbers, so under `torch.compile` and `torch.func` matrices are assumed regular. NaN is not
    regular.
    """
    if torch.compiler.is_compiling() or matrices.numel() == 0 or transformed(matrices):
        return True
    factors, _, _ = torch.linalg.lu_factor_ex(matrices / scale.unsqueeze(-1))
    pivots = factors.diagonal(dim1=-2, dim2=-1).abs()
    return bool((pivots > matrices.shape[-1] * torch.finfo(pivots.dtype).eps).all())


@torch.no_grad()
def condition(matrix: Tensor) -> float:
    """σ_max / σ_min; infinity where entries are not finite."""
    if not bool(matrix.isfinite().all()):
        return math.inf
    return float(torch.linalg.cond(matrix.to(torch.promote_types(matrix.dtype, torch.float32))))
