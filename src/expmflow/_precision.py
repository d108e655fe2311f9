"""Arithmetic in the dtype of the tensors, whatever the caller's mixed precision."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch


def without_autocast(device_type: str) -> AbstractContextManager[None]:
    """Turn autocast off; no context if it is off already, because switching costs as much as a small layer."""
    off = not (torch.compiler.is_compiling() or torch.is_autocast_enabled(device_type))
    return nullcontext() if off else torch.autocast(device_type, enabled=False)
