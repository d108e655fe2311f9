"""Inverses of autoregressive convolutions, an anti-diagonal of the image at a time.

A convolution whose outputs depend on points above and to the left of them is a triangular system. Point (i, j) needs
those with smaller i + j only, so that all points of an anti-diagonal, in all images, are found at once: H + W − 1 small
products of matrices, in place of H·W. The same holds for square tiles of points in the place of points, which are
channels then: fewer and larger products, of which a machine makes more in the same time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

KEPT_TILE = 48  # entries of a tile, at most: above, products cost more than the steps that they save (measured)
TILE = 12  # the same where systems are solved for one batch only, and bringing them to tiles counts


class CornerSystem(NamedTuple):
    """Σ taps[a, b] y[i − a, j − b] + bias = v[i, j], the border zero: of `reverse`, i + a and j + b.

    Args:
        taps: `(p, q, C, C)`.
        inverse: of taps[0, 0].
        bias: `(C,)`.
        reverse: whether points need those below and to the right of them.
    """

    taps: Tensor
    inverse: Tensor
    bias: Tensor
    reverse: bool

    def normalized(self) -> tuple[Tensor, Tensor]:
        """Taps and a bias that go with v after a product with `inverse`; at [0, 0] stands the identity."""
        return self.inverse @ self.taps, -self.inverse @ self.bias


def solve_corners(systems: Sequence[CornerSystem], v: Tensor) -> Tensor:
    """Solve the systems one after the other, each for what the one before it gave: `(batch, C, H, W)`.

    Differentiable any number of times. `solve_tiled(tile_corners(systems, v.shape[1:]), v)` is the same without
    gradients, and its first half may be kept for other images.

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
    """Solve y[i, j] + Σ taps[a, b] y[i − a, j − b] = v[i, j] for y; the sum is without a = b = 0, the border zero.

    As many products as the convolution itself has, or two to four times as many where points are taken in tiles.
    Differentiable any number of times: the adjoint of an inverse is the inverse of the adjoint, which is again such a
    system.

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
        side = _tile_side(v.shape[1:], TILE)
        tiled = TiledCorners(side, [_in_tiles(taps, None, reverse, side, _tall(v.shape[1:]))], None)
        return solve_tiled(tiled, v)

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


class _Tiles(NamedTuple):
    """A system on tiles: rows become `rows @ first + Σ rows[:, columns] @ matrix` of tiles `down` and `along`.

    `along` counts anti-diagonals.
    """

    first: Tensor | None
    others: list[tuple[int, int, slice, Tensor]]
    margin: int
    reverse: bool


class TiledCorners(NamedTuple):
    """Systems for tiles of `side` × `side` points in the place of points, and the image that zero solves, in tiles."""

    side: int
    systems: list[_Tiles]
    origin: Tensor | None


def tile_corners(systems: Sequence[CornerSystem], origin: Tensor) -> TiledCorners:
    """What the solutions of these systems have in common; without gradients.

    Args:
        systems: one after the other.
        origin: `(C, H, W)`, the image of which zero is the solution: what all biases make together.
    """
    side, tall = _tile_side(origin.shape, KEPT_TILE), _tall(origin.shape)
    with torch.no_grad():
        tiles = [_in_tiles(system.normalized()[0], system.inverse, system.reverse, side, tall) for system in systems]
        return TiledCorners(side, tiles, _points_in_tiles((origin.mT if tall else origin)[None], side).contiguous())


def solve_tiled(tiled: TiledCorners, v: Tensor) -> Tensor:
    """The solutions for `(batch, C, H, W)`: each anti-diagonal a block of rows, tile by tile and image by image.

    What lies outside the image stays zero: tiles above and below it have rows of their own, and tiles beside it have
    those that the shorter anti-diagonals leave free. Twice the memory of the image, or so: anti-diagonals run along
    the longer side, lest a narrow image need as much as a square one.
    """
    if v.numel() == 0:
        return v.clone()
    if _tall(v.shape[1:]):
        return _solve_wide(tiled, v.mT).mT.contiguous(memory_format=torch.channels_last)
    return _solve_wide(tiled, v).contiguous(memory_format=torch.channels_last)


def _solve_wide(tiled: TiledCorners, v: Tensor) -> Tensor:
    tiles = _points_in_tiles(v, tiled.side)
    if tiled.origin is not None:
        tiles = torch.sub(tiles, tiled.origin, out=v.new_empty(tiles.shape))
    height, width, batch, size = *tiles.shape[:3], tiles.shape[3:].numel()
    margin = max(system.margin for system in tiled.systems)
    y = v.new_zeros((height + width - 1) * (height + 2 * margin) * batch, size)
    image = _image_in(y, tiles.shape, margin)
    for system in tiled.systems:
        if system.first is not None:  # all tiles at once, while nothing lies between them
            tiles = (tiles.reshape(-1, size) @ system.first).view(tiles.shape)
        tiles = image.copy_(tiles)
        _sweep(system, y, batch, margin, (height, width))
    points = tiles.permute(2, 0, 3, 1, 4, 5)
    return points.reshape(batch, v.shape[2], v.shape[3], v.shape[1]).permute(0, 3, 1, 2)


def _points_in_tiles(v: Tensor, side: int) -> Tensor:
    """`(rows of tiles, columns of tiles, batch, rows within, columns within, channels)`."""
    batch, channels, height, width = v.shape
    return v.reshape(batch, channels, height // side, side, width // side, side).permute(2, 4, 0, 3, 5, 1)


def _image_in(y: Tensor, shape: Sequence[int], margin: int) -> Tensor:
    """A view of the images in `(anti-diagonals · rows of tiles · batch, entries of a tile)`, below so many rows."""
    height, _, batch, side, _, channels = shape
    size = y.shape[1]
    row = batch * size
    diagonal = (height + 2 * margin) * row
    return y.as_strided(tuple(shape), (diagonal + row, diagonal, size, side * channels, channels, 1), margin * row)


def _sweep(system: _Tiles, y: Tensor, batch: int, margin: int, grid: tuple[int, int]) -> None:
    """One anti-diagonal after the other, in place."""
    height, width = grid
    count, sign = height + width - 1, 1 if system.reverse else -1
    diagonal = (height + 2 * margin) * batch
    seen = [
        (sign * along, sign * (along * diagonal + down * batch), y[:, columns], matrix)
        for down, along, columns, matrix in system.others
    ]
    for d in reversed(range(count)) if system.reverse else range(count):
        start, stop = (d * diagonal + batch * (margin + i) for i in (max(0, d + 1 - width), min(d + 1, height)))
        rows = y[start:stop]
        for along, shift, others, matrix in seen:
            if 0 <= d + along < count:
                rows.addmm_(others[start + shift : stop + shift], matrix)


def _tall(event_shape: Sequence[int]) -> bool:
    return event_shape[1] > event_shape[2]


def _tile_side(event_shape: Sequence[int], largest: int) -> int:
    """The side of the largest tiles, of at most so many entries, that images divide into."""
    channels, height, width = event_shape
    if torch.compiler.is_compiling():
        return 1
    sides = range(1, math.isqrt(max(largest // channels, 1)) + 1)
    return max(side for side in sides if height % side == 0 and width % side == 0)


def _in_tiles(taps: Tensor, first: Tensor | None, reverse: bool, side: int, transpose: bool) -> _Tiles:
    """A system, of which taps[0, 0] stands for the identity and v is multiplied by `first`, solved within tiles."""
    taps = taps.transpose(0, 1) if transpose else taps
    if side == 1:
        p, q, _, _ = taps.shape
        others = [(a, a + b, slice(None), -taps[a, b].mT) for a in range(p) for b in range(q) if a + b]
        return _Tiles(None if first is None else first.mT, others, p - 1, reverse)
    channels, points = taps.shape[-1], side * side
    size = points * channels
    pairs, which, used = _tile_blocks(taps.shape[0], taps.shape[1], side, reverse)
    unit = torch.eye(channels, dtype=taps.dtype, device=taps.device)
    entries = torch.cat([unit[None], taps.flatten(0, 1)[1:], torch.zeros_like(unit)[None]])
    blocks = entries[torch.tensor(which, device=taps.device)].transpose(2, 3).reshape(-1, size, size)
    whole = torch.eye(size, dtype=taps.dtype, device=taps.device)
    within = torch.linalg.solve_triangular(blocks[0], whole, upper=reverse, unitriangular=True)
    others = []
    for (a, b), (start, stop), block in zip(pairs[1:], used[1:], blocks[1:], strict=True):
        columns = slice(start * channels, stop * channels)
        others.append((a, a + b, columns, -(within @ block[:, columns]).mT))
    if first is not None:
        within = (within.reshape(size, points, channels) @ first).reshape(size, size)
    return _Tiles(within.mT, others, max(a for a, _ in pairs), reverse)


@lru_cache
def _tile_blocks(
    p: int, q: int, side: int, reverse: bool
) -> tuple[list[tuple[int, int]], list[list[list[int]]], list[tuple[int, int]]]:
    """How tiles see each other through p × q taps.

    Returns the places (a, b) of tiles that a tile sees, itself first; for each the tap, counted through, that leads
    from a point of that tile (second) to one of this (first), p·q where there is none; and the range of points seen.
    """
    points = [(i, j) for i in range(side) for j in range(side)]
    sign = -1 if reverse else 1
    pairs, which, used = [], [], []
    for a in range(-(-(p - 1) // side) + 1):
        for b in range(-(-(q - 1) // side) + 1):
            offsets = [[(side * a + sign * (i - k), side * b + sign * (j - m)) for k, m in points] for i, j in points]
            block = [[c * q + d if 0 <= c < p and 0 <= d < q else p * q for c, d in row] for row in offsets]
            seen = [k for k in range(len(points)) if any(row[k] < p * q for row in block)]
            pairs.append((a, b))
            which.append(block)
            used.append((seen[0], seen[-1] + 1))
    return pairs, which, used


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
