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
    """One anti-diagonal after the other, each a contiguous block of rows with the channels last."""
    batch, channels, height, width = v.shape
    if v.numel() == 0:
        return v.clone()
    diagonals = height + width - 1
    y = v.new_zeros(diagonals, height * batch, channels)
    image = _image_in(y, v.shape)
    image.copy_(v)
    steps = [(a, b, taps[a, b].mT) for a in range(taps.shape[0]) for b in range(taps.shape[1]) if a + b]
    for d in reversed(range(diagonals)) if reverse else range(diagonals):
        for a, b, tap in steps:
            if reverse:
                first, last = max(0, d + b + 1 - width), min(d + 1, height - a)
                source, shift = d + a + b, a
            else:
                first, last = max(a, d + 1 - width), min(d + 1 - b, height)
                source, shift = d - a - b, -a
            if first < last:
                rows = y[source, (first + shift) * batch : (last + shift) * batch]
                y[d, first * batch : last * batch].addmm_(rows, tap, alpha=-1)
    return image.contiguous(memory_format=torch.channels_last)


def _image_in(y: Tensor, shape: torch.Size) -> Tensor:
    """The points of `(diagonals, height · batch, channels)` as `(batch, channels, height, width)`, a view."""
    batch, channels, height, _ = shape
    point = batch * channels
    return y.as_strided(shape, (channels, 1, (height + 1) * point, height * point))


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
