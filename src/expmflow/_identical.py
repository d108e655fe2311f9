"""Whether tensors are the same, for what is cached until they change."""

from __future__ import annotations

import torch
from torch import Tensor


def identical(a: Tensor | None, b: Tensor | None) -> bool:
    """Whether two tensors agree in dtype, device and every entry, or both are None."""
    if not (isinstance(a, Tensor) and isinstance(b, Tensor)):
        return a is b
    return a.dtype == b.dtype and a.device == b.device and torch.equal(a, b)
