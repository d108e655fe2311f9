"""Inverses of autoregressive convolutions, one anti-diagonal of the image at a time.

A convolution whose outputs depend on points above and to the left of them is a triangular system. Point (i, j) needs
only points with smaller i + j, so all points of an anti-diagonal, in all images, are solved at once: H + W − 1 small
matrix products instead of H·W. The same holds for square tiles of points, whose entries act as channels: the products
are fewer and larger, which is faster.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from expmflow.numerics.regular import condition

KEPT_TILE = 48  # the most entries of a cached tile: with more, products cost more than the steps they save (measured)
TILE = 12  # the same for systems that are solved for one batch only, where building the tiles counts


class CornerSystem(NamedTuple):
    """Σ taps[a, b] y[i − a, j − b] + bias = v[i, j], zero outside the image; with `reverse`, i + a and j + b.

    Args:
        taps: `(p, q, C, C)`.
        inverse: of taps[0, 0].
        bias: `(C,)`.
        reverse: whether points depend on those below and to the right of them.
    """

    taps: Tensor
    inverse: Tensor
    bias: Tensor
    reverse: bool

    def normalized(self) -> tuple[Tensor, Tensor]:
        """Taps and bias of the system multiplied by `inverse`; taps[0, 0] becomes the identity."""
        return self.inverse @ self.taps, -self.inverse @ self.bias


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
        side = _tile_side(v.shape[1:], TILE)
        first, sweep = _in_tiles(taps, reverse, side, _tall(v.shape[1:]))
        return solve_tiled(TiledCorners(_kernel(first, side), None, [sweep]), v)

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


class _Sweep(NamedTuple):
    """A sweep over anti-diagonals: each tile's row gains Σ rows[:, columns] @ matrix of the tiles at (`down`, `along`).

    `along` counts anti-diagonals.
    """

    others: list[tuple[int, int, slice, Tensor]]
    margin: int
    reverse: bool


class TiledCorners(NamedTuple):
    """Systems for square tiles of points instead of points.

    Args:
        kernel: a convolution that maps images to the entries of tiles: `(entries, C, side, side)`.
        origin: its result for the image that zero solves: `(rows of tiles, columns of tiles, 1, entries)`.
        sweeps: applied in turn.
        condition: the largest condition of the bases that sweeps are written in, by which rounding may grow.
    """

    kernel: Tensor
    origin: Tensor | None
    sweeps: list[_Sweep]
    condition: float = 1.0


def tile_corners(systems: Sequence[CornerSystem], origin: Tensor) -> TiledCorners:
    """The part of solving these systems that does not depend on the image; without gradients.

    To solve a system is to multiply each tile by a matrix, and then to sweep over the anti-diagonals. Here the products
    of all systems are merged into one that comes first, and each sweep is written in the basis of the products after
    it. If directions alternate, a sweep still reads only the border of a tile, because that border depends on itself
    alone. An ill-conditioned basis costs digits (see `condition`); systems that are solved one by one keep them.

    Args:
        systems: solved in turn.
        origin: `(C, H, W)`, the image whose solution is zero: the combined effect of all biases.
    """
    channels, tall = len(origin), _tall(origin.shape)
    side = _tile_side(origin.shape, KEPT_TILE)
    with torch.no_grad():
        first = torch.eye(side * side * channels, dtype=origin.dtype, device=origin.device)
        back, sweeps, conditions = first, [], []
        for system in reversed(systems):
            within, sweep = _in_tiles(system.normalized()[0], system.reverse, side, tall)
            sweeps.append(_in_basis(sweep, first, back))
            conditions.append(condition(back))
            first = _each_point(system.inverse, side) @ within @ first
            back = back @ _blocks(system.taps, system.reverse, side, tall)[0].mT
        kernel = _kernel(first, side)
        shift = _entries((origin.mT if tall else origin)[None], kernel).contiguous()
        return TiledCorners(kernel, shift, sweeps[::-1], max(conditions, default=1.0))


def _in_basis(sweep: _Sweep, basis: Tensor, back: Tensor) -> _Sweep:
    """The same sweep for tiles that are multiplied by `basis`, whose inverse is `back`."""
    others = []
    for down, along, columns, matrix in sweep.others:
        matrix = back[:, columns] @ matrix @ basis
        used = matrix.any(1).nonzero().flatten().tolist() or [0]
        columns = slice(used[0], used[-1] + 1)
        others.append((down, along, columns, matrix[columns].contiguous()))
    return sweep._replace(others=others)


def solve_tiled(tiled: TiledCorners, v: Tensor) -> Tensor:
    """The solutions for `(batch, C, H, W)`: each anti-diagonal is a block of rows, ordered by tile and then by image.

    Tiles outside the image stay zero: those above and below it have rows of their own, and those beside it use the rows
    that shorter anti-diagonals leave free. This takes about twice the memory of the image. Anti-diagonals run along the
    longer side; otherwise a narrow image would need as much as a square one.
    """
    if v.numel() == 0:
        return v.clone()
    if _tall(v.shape[1:]):
        return _solve_wide(tiled, v.mT).mT.contiguous(memory_format=torch.channels_last)
    return _solve_wide(tiled, v).contiguous(memory_format=torch.channels_last)


def _solve_wide(tiled: TiledCorners, v: Tensor) -> Tensor:
    entries = _entries(v, tiled.kernel)
    height, width, batch, size = entries.shape
    margin = max(sweep.margin for sweep in tiled.sweeps)
    y = v.new_zeros((height + width - 1) * (height + 2 * margin) * batch, size)
    image = _image_in(y, (height, width, batch, size), margin)
    image.copy_(entries) if tiled.origin is None else torch.sub(entries, tiled.origin, out=image)
    for sweep in tiled.sweeps:
        _sweep(sweep, y, batch, margin, (height, width))
    side, channels = tiled.kernel.shape[2], v.shape[1]
    points = image.unflatten(3, (side, side, channels)).permute(2, 0, 3, 1, 4, 5)
    return points.reshape(batch, *v.shape[2:], channels).permute(0, 3, 1, 2)


def _entries(v: Tensor, kernel: Tensor) -> Tensor:
    """The entries of each tile, by a convolution: `(rows of tiles, columns of tiles, batch, entries)`."""
    return F.conv2d(v, kernel, stride=kernel.shape[2]).permute(2, 3, 0, 1)


def _kernel(first: Tensor, side: int) -> Tensor:
    """The kernel of a convolution that multiplies the entries of each tile by this matrix from the right."""
    return first.mT.contiguous().unflatten(1, (side, side, -1)).permute(0, 3, 1, 2)


def _each_point(inverse: Tensor, side: int) -> Tensor:
    """A product with a matrix at each point of a tile, as one product from the right."""
    return torch.block_diag(*[inverse.mT] * side**2)


def _image_in(y: Tensor, shape: tuple[int, int, int, int], margin: int) -> Tensor:
    """A view of the tiles in `(anti-diagonals · rows of tiles · batch, entries of a tile)`, below a margin."""
    height, _, batch, size = shape
    row = batch * size
    diagonal = (height + 2 * margin) * row
    return y.as_strided(shape, (diagonal + row, diagonal, size, 1), margin * row)


def _sweep(sweep: _Sweep, y: Tensor, batch: int, margin: int, grid: tuple[int, int]) -> None:
    """One anti-diagonal after the other, in place."""
    height, width = grid
    count, sign = height + width - 1, 1 if sweep.reverse else -1
    diagonal = (height + 2 * margin) * batch
    seen = [
        (sign * along, sign * (along * diagonal + down * batch), y[:, columns], matrix)
        for down, along, columns, matrix in sweep.others
    ]
    for d in reversed(range(count)) if sweep.reverse else range(count):
        start, stop = (d * diagonal + batch * (margin + i) for i in (max(0, d + 1 - width), min(d + 1, height)))
        rows = y[start:stop]
        for along, shift, others, matrix in seen:
            if 0 <= d + along < count:
                rows.addmm_(others[start + shift : stop + shift], matrix)


def _tall(event_shape: Sequence[int]) -> bool:
    return event_shape[1] > event_shape[2]


def _tile_side(event_shape: Sequence[int], largest: int) -> int:
    """The side of the largest tiles of at most `largest` entries that divide the image."""
    channels, height, width = event_shape
    if torch.compiler.is_compiling():
        return 1
    sides = range(1, math.isqrt(max(largest // channels, 1)) + 1)
    return max(side for side in sides if height % side == 0 and width % side == 0)


def _in_tiles(taps: Tensor, reverse: bool, side: int, tall: bool) -> tuple[Tensor, _Sweep]:
    """For a system with taps[0, 0] = 1: the matrix that solves it within a tile, from the right, and its sweep."""
    (p, q), channels = taps.shape[1::-1] if tall else taps.shape[:2], taps.shape[-1]
    unit = torch.eye(channels, dtype=taps.dtype, device=taps.device)
    blocks = _blocks(torch.cat([unit[None], taps.flatten(0, 1)[1:]]).view(taps.shape), reverse, side, tall)
    whole = torch.eye(blocks.shape[-1], dtype=taps.dtype, device=taps.device)
    within = torch.linalg.solve_triangular(blocks[0], whole, upper=reverse, unitriangular=True)
    pairs, _, used = _tile_blocks(p, q, side, reverse)
    others = []
    for (a, b), (start, stop), block in zip(pairs[1:], used[1:], blocks[1:], strict=True):
        columns = slice(start * channels, stop * channels)
        others.append((a, a + b, columns, -(within @ block[:, columns]).mT))
    return within.mT, _Sweep(others, max(a for a, _ in pairs), reverse)


def _blocks(taps: Tensor, reverse: bool, side: int, tall: bool) -> Tensor:
    """How a tile depends on itself, and then on other tiles: `(pairs of tiles, entries, entries)`."""
    taps = taps.transpose(0, 1) if tall else taps
    _, which, _ = _tile_blocks(taps.shape[0], taps.shape[1], side, reverse)
    entries = torch.cat([taps.flatten(0, 1), torch.zeros_like(taps[0, :1])])
    size = side * side * taps.shape[-1]
    return entries[torch.tensor(which, device=taps.device)].transpose(2, 3).reshape(-1, size, size)


@lru_cache
def _tile_blocks(
    p: int, q: int, side: int, reverse: bool
) -> tuple[list[tuple[int, int]], list[list[list[int]]], list[tuple[int, int]]]:
    """How tiles depend on each other through p × q taps.

    Returns the offsets (a, b) of the tiles that a tile depends on, itself first. For each, the index of the tap that
    leads from a point of that tile (second axis) to a point of this one (first), p·q if there is none; and the range of
    points that are used.
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
