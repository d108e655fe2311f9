"""Detects tensors that stand for others: inside `torch.func`, batched gradients, and `torch.export`."""

from __future__ import annotations

import torch
from torch import Tensor


def transformed(*tensors: Tensor) -> bool:
    """Whether tensors stand for many: inside `torch.func`, and in backward passes of many gradients at once."""
    if torch.compiler.is_compiling():  # it can trace neither the question nor the tensors
        return False
    kinds = (torch._C._functorch.is_functorch_wrapped_tensor, torch._C._functorch.is_legacy_batchedtensor)
    return any(kind(tensor) for tensor in tensors for kind in kinds)


def exporting() -> bool:
    """Whether `torch.export` is recording a program, for any number of rows and without a way back to Python."""
    return hasattr(torch.compiler, "is_exporting") and torch.compiler.is_exporting()


def batched(*tensors: Tensor) -> bool:
    """Whether tensors stand for many inside `torch.vmap`, on any level."""
    if torch.compiler.is_compiling():
        return False
    for tensor in tensors:
        while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
            if torch._C._functorch.is_batchedtensor(tensor):
                return True
            tensor = torch._C._functorch.get_unwrapped(tensor)
    return False


def largest_of_all(value: float | Tensor) -> float:
    """The largest entry of all that a tensor stands for: one number that holds for all of them."""
    if not isinstance(value, Tensor) or not transformed(value):
        return float(value)
    while torch._C._functorch.is_functorch_wrapped_tensor(value):
        value = torch._C._functorch.get_unwrapped(value)
    return float(value.detach().amax())
