"""The paddings of a convolution: padding, its adjoint, and its effect on the diagonal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from expmflow._validation import expect

Padding = Literal["zeros", "circular", "reflect"]
PADDINGS: tuple[str, ...] = get_args(Padding)


def pad(x: Tensor, widths: Sequence[int], padding: Padding) -> Tensor:
    """`x` of shape `(batch, channels, *n)` with `widths` points added on both sides of each spatial axis."""
    if not any(widths):
        return x
    if padding == "circular" and any(width > size for width, size in zip(widths, x.shape[2:], strict=True)):
        return _wind(x, widths)
    both_sides = [w for width in reversed(widths) for w in (width, width)]
    return F.pad(x, both_sides, mode="constant" if padding == "zeros" else padding)


def _wind(x: Tensor, widths: Sequence[int]) -> Tensor:
    """Circular padding that wraps around more than once, which `F.pad` cannot do."""
    for axis, width in enumerate(widths, start=2):
        size = x.shape[axis]
        x = x.index_select(axis, torch.arange(-width, size + width, device=x.device) % size)
    return x


def pad_reflect_adjoint(y: Tensor, widths: Sequence[int]) -> Tensor:
    """The adjoint of reflection padding: the margins are added back to the points that they were copied from."""
    for axis, width in enumerate(widths, start=2):
        if width:
            y = _fold(y.transpose(axis, -1), width).transpose(axis, -1)
    return y


def _fold(y: Tensor, width: int) -> Tensor:
    """`pad_reflect_adjoint` on the last axis."""
    size = y.shape[-1] - 2 * width
    left, core, right = y.split([width, size, width], dim=-1)
    rest = size - 1 - width
    return core + F.pad(left.flip(-1), (1, rest)) + F.pad(right.flip(-1), (rest, 1))


def check_size(size: int, width: int, padding: Padding) -> None:
    """Raise unless `size` points can be padded by `width`."""
    least = width + 1 if padding == "reflect" else 1
    if size < least:
        expect(False, f"at least {least} points per axis for {padding} padding of {width}", size)


def fixed_points(size: int, offset: int, padding: Padding) -> int:
    """How many of `size` points i equal the point at i + `offset` on the padded axis: a tap's share of the diagonal."""
    if padding == "circular":
        return size if offset % size == 0 else 0
    if padding == "reflect":
        last = size - 1
        return sum(last - abs(last - abs(i + offset)) == i for i in range(size))
    return size if offset == 0 else 0


def merged_taps(taps: int, distance: int, size: int, padding: Padding) -> list[int | None]:
    """For each tap, the first tap that always reaches the same point; None for a tap that never reaches the image."""
    offsets = [distance * (tap - taps // 2) for tap in range(taps)]
    if padding == "zeros":
        return [tap if abs(offset) < size else None for tap, offset in enumerate(offsets)]
    if padding == "reflect":
        return list(range(taps))
    first: dict[int, int] = {}
    return [first.setdefault(offset % size, tap) for tap, offset in enumerate(offsets)]
