"""How networks use a context."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from expmflow._validation import expect, expect_type


def offset(linear: nn.Linear, context: Tensor, ndim: int) -> Tensor:
    """A context `(batch, channels, *n)` or `(batch, channels)`, projected, to be added to features of `ndim` axes."""
    projected = linear(context.movedim(1, -1)).movedim(-1, 1)
    return projected.reshape(*projected.shape, *(1,) * (ndim - projected.ndim))


def check_context(context: Any, x: Tensor, channels: int) -> None:
    """Raise unless `context` has `channels` on axis 1, a row for each of `x`, its size or none, and its dtype."""
    if not channels:
        return
    got = f"one of shape {tuple(context.shape)}" if isinstance(context, Tensor) else type(context).__name__
    fits = isinstance(context, Tensor) and context.ndim in (2, x.ndim) and context.shape[1] == channels
    expect(fits, f"a context of {channels} channels", got)
    expect(context.shape[0] == x.shape[0], f"a context for each of {x.shape[0]} rows", got)
    expect(context.ndim == 2 or context.shape[2:] == x.shape[2:], f"a context of size {tuple(x.shape[2:])}", got)
    expect_type(context.dtype == x.dtype, f"a context of dtype {x.dtype}, as the input", context.dtype)
