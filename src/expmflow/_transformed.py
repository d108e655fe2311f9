"""Tensors that stand for others: those of `torch.func`, and of batched gradients."""

from __future__ import annotations

import torch
from torch import Tensor


def transformed(*tensors: Tensor) -> bool:
    """Whether these stand for many: inside `torch.func`, and in backward passes of many gradients at once."""
    if torch.compiler.is_compiling():  # which traces neither the question nor the tensors
        return False
    kinds = (torch._C._functorch.is_functorch_wrapped_tensor, torch._C._functorch.is_legacy_batchedtensor)
    return any(kind(tensor) for tensor in tensors for kind in kinds)
