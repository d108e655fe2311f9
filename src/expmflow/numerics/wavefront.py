"""Inverses of autoregressive convolutions, an anti-diagonal of the image at a time.

A convolution whose outputs depend on points above and to the left of them is a triangular system. Point (i, j) needs
those with smaller i + j only, so that all points of an anti-diagonal, in all images, are found at once: H + W − 1 small
products of matrices, in place of H·W.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def corner_solve(taps: Tensor, v: Tensor, *, reverse: bool = False) -> Tensor:
    """Solve y[i, j] + Σ taps[a, b] y[i − a, j − b] = v[i, j] for y; the sum is without a = b = 0, the border zero.

    As many products as the convolution itself has. Differentiable any number of times: the adjoint of an inverse is the
    inverse of the adjoint, which is again such a system.

    Args:
        taps: `(p, q, C, C)`; what stands at [0, 0] is not used.
        v: `(batch, C, H, W)`.
        reverse: i + a and j + b in the place of i − a and j − b.

    Example:
        >>> taps = torch.tensor([[0.0, -1.0], [0.0, 0.0]]).reshape(2, 2, 1, 1)  # y[i, j] − y[i, j − 1] = 1
        >>> corner_solve(taps, torch.ones(1, 1, 2, 4))[0, 0]
        tensor([[1., 2., 3., 4.],
                [1., 2., 3., 4.]])
    """
    solution: Tensor = _CornerSolve.apply(taps, v, reverse)
    return solution


class _CornerSolve(torch.autograd.Function):
    @staticmethod
    def forward(taps: Tensor, v: Tensor, reverse: bool) -> Tensor:
        return _sweep(taps, v, reverse)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, bool], output: Tensor) -> None:
        taps, _, ctx.reverse = inputs
        ctx.save_for_backward(taps, output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor, None]:
        taps, y = ctx.saved_tensors
        w: Tensor = _CornerSolve.apply(taps.mT, grad, not ctx.reverse)
        return (_taps_gradient(taps, w, y, ctx.reverse) if ctx.needs_input_grad[0] else None), w, None

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int | None, int | None, None], taps: Tensor, v: Tensor, reverse: bool
    ) -> tuple[Tensor, int]:
        if in_dims[0] is None and in_dims[1] is not None:  # more images
            v = v.movedim(in_dims[1], 0)
            y: Tensor = _CornerSolve.apply(taps, v.flatten(0, 1), reverse)
            return y.unflatten(0, v.shape[:2]), 0
        every_tap, every_v = (
            [x] * info.batch_size if dim is None else x.unbind(dim) for x, dim in zip((taps, v), in_dims, strict=False)
        )
        return torch.stack([corner_solve(t, x, reverse=reverse) for t, x in zip(every_tap, every_v, strict=True)]), 0


def _sweep(taps: Tensor, v: Tensor, reverse: bool) -> Tensor:
    """One anti-diagonal after the other, each a block of rows, point by point and image by image, with channels last.

    What lies outside the image stays zero: points above (below, if `reverse`) it have rows of their own, and points
    beside it have those that the shorter anti-diagonals leave free.
    """
    batch, channels, height, width = v.shape
    if v.numel() == 0:
        return v.clone()
    margin, count, sign = taps.shape[0] - 1, height + width - 1, 1 if reverse else -1
    y = v.new_zeros(count, (height + margin) * batch, channels)
    above = 0 if reverse else margin
    image = _image_in(y, v.shape, above)
    image.copy_(v)
    diagonals = y.unbind()
    steps = [(a, a + b, taps[a, b].mT) for a in range(taps.shape[0]) for b in range(taps.shape[1]) if a + b]
    for d in reversed(range(count)) if reverse else range(count):
        first, last = (batch * (above + i) for i in (max(0, d + 1 - width), min(d + 1, height)))
        rows = diagonals[d][first:last]
        for down, along, tap in steps:
            source, shift = d + sign * along, sign * down * batch
            if 0 <= source < count:
                rows.addmm_(diagonals[source][first + shift : last + shift], tap, alpha=-1)
    return image.contiguous(memory_format=torch.channels_last)


def _image_in(y: Tensor, shape: torch.Size, above: int) -> Tensor:
    """A view of the image, `(batch, channels, h, w)`, in `(diagonals, rows · batch, channels)`, below so many rows."""
    batch, channels = shape[:2]
    point, diagonal = batch * channels, y.stride(0)
    return y.as_strided(shape, (channels, 1, diagonal + point, diagonal), above * point)


def _taps_gradient(taps: Tensor, w: Tensor, y: Tensor, reverse: bool) -> Tensor:
    height, width = y.shape[2:]
    here, there = (y, w) if reverse else (w, y)
    rows = []
    for a in range(taps.shape[0]):
        for b in range(taps.shape[1]):
            late = here[:, :, a:, b:]
            early = there[:, :, : max(height - a, 0), : max(width - b, 0)]
            gradient = torch.einsum("nohw,nihw->io" if reverse else "nohw,nihw->oi", late, early)
            rows.append(-gradient if a + b else torch.zeros_like(gradient))
    return torch.stack(rows).reshape(taps.shape)
