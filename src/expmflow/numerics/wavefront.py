"""Inverses of autoregressive convolutions, one anti-diagonal of the image at a time.

A convolution whose outputs depend on points above and to the left of them is a triangular system. Point (i, j) needs
only points with smaller i + j, so all points of an anti-diagonal, in all images, are solved at once: H + W − 1 small
matrix products instead of H·W. `expmflow.numerics.tiles` takes these steps; here are the systems' solutions with their
gradients, which are solutions of the adjoint systems.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from expmflow.numerics.tiles import CornerSystem, solve_tiled, tile_for_one_batch


def solve_corners(systems: Sequence[CornerSystem], v: Tensor) -> Tensor:
    """Solve the systems in turn, each for the solution of the one before: `(batch, C, H, W)`.

    Differentiable any number of times. `solve_tiled(tile_corners(systems, v.shape[1:]), v)` is the same without
    gradients, and `tile_corners(…)` can be cached for other images.

    Example:
        >>> taps, unit = torch.tensor([[1.0, -1.0]]).reshape(1, 2, 1, 1), torch.ones(1, 1)  # y[i, j] − y[i, j − 1] = 1
        >>> there = CornerSystem(taps, unit, torch.zeros(1), reverse=False)
        >>> solve_corners([there], torch.ones(1, 1, 1, 4))[0, 0]
        tensor([[1., 2., 3., 4.]])
        >>> solve_corners([there, there._replace(reverse=True)], torch.ones(1, 1, 1, 4))[0, 0]
        tensor([[10.,  9.,  7.,  4.]])
    """
    for system in systems:
        taps, bias = system.normalized()
        v = corner_solve(taps, F.conv2d(v, system.inverse[:, :, None, None], bias), reverse=system.reverse)
    return v


def corner_solve(taps: Tensor, v: Tensor, *, reverse: bool = False) -> Tensor:
    """Solve y[i, j] + Σ taps[a, b] y[i − a, j − b] = v[i, j] for y; the sum omits a = b = 0, and y is zero outside the
    image.

    As many products as the convolution itself has, or two to four times as many if points are taken in tiles.
    Differentiable any number of times: the adjoint of an inverse is the inverse of the adjoint, which is again such a
    system.

    Args:
        taps: `(p, q, C, C)`; the tap at [0, 0] is not used.
        v: `(batch, C, H, W)`.
        reverse: i + a and j + b instead of i − a and j − b.

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
        return solve_tiled(tile_for_one_batch(taps, v.shape[1:], reverse=reverse), v)

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


def _taps_gradient(taps: Tensor, w: Tensor, y: Tensor, reverse: bool) -> Tensor:
    """The gradient in the taps: −⟨w, y shifted by the tap⟩, with w the gradient in v; zero for the unused tap."""
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
