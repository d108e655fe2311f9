"""Autoregressive convolutions as triangular systems of square tiles of points.

As for single points, a tile needs only the tiles on earlier anti-diagonals, so all tiles of an anti-diagonal, in all
images, are solved at once. The entries of a tile act as channels: the products are fewer and larger, which is faster.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from expmflow.numerics.regular import condition

KEPT_TILE = 48  # the most entries of a cached tile: with more, products cost more than the steps they save (measured)
TILE = 12  # the same for systems that are solved for one batch only, where building the tiles counts

_TileBlocks = tuple[list[tuple[int, int]], list[list[list[int]]], list[tuple[int, int]]]


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


class _Link(NamedTuple):
    """How a tile depends on another one: its row gains `other[columns] @ matrix`.

    Args:
        down: by how many rows of tiles the other is further up; further down in a reversed system.
        along: by how many anti-diagonals it comes earlier.
        columns: the entries of the other that count.
        matrix: `(columns, entries)`.
    """

    down: int
    along: int
    columns: slice
    matrix: Tensor


class _Sweep(NamedTuple):
    """A sweep over anti-diagonals, in which each tile gains what its links give it; `margin` is the largest `down`."""

    links: list[_Link]
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


def tile_for_one_batch(taps: Tensor, event_shape: Sequence[int], *, reverse: bool) -> TiledCorners:
    """One system with taps[0, 0] = 1, in tiles small enough to build for a single batch."""
    side = _tile_side(event_shape, TILE)
    first, sweep = _in_tiles(taps, reverse, side, _tall(event_shape))
    return TiledCorners(_kernel(first, side), None, [sweep])


def _in_basis(sweep: _Sweep, basis: Tensor, back: Tensor) -> _Sweep:
    """The same sweep for tiles that are multiplied by `basis`, whose inverse is `back`."""
    links = []
    for link in sweep.links:
        matrix = back[:, link.columns] @ link.matrix @ basis
        rows = matrix.any(1).nonzero().flatten().tolist() or [0]
        columns = slice(rows[0], rows[-1] + 1)
        links.append(link._replace(columns=columns, matrix=matrix[columns].contiguous()))
    return sweep._replace(links=links)


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
    shifted = [
        (sign * along, sign * (along * diagonal + down * batch), y[:, columns], matrix)
        for down, along, columns, matrix in sweep.links
    ]
    for d in reversed(range(count)) if sweep.reverse else range(count):
        start, stop = (d * diagonal + batch * (margin + i) for i in (max(0, d + 1 - width), min(d + 1, height)))
        rows = y[start:stop]
        for along, shift, others, matrix in shifted:
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
    links = []
    for (a, b), (start, stop), block in zip(pairs[1:], used[1:], blocks[1:], strict=True):
        columns = slice(start * channels, stop * channels)
        links.append(_Link(a, a + b, columns, -(within @ block[:, columns]).mT))
    return within.mT, _Sweep(links, max(a for a, _ in pairs), reverse)


def _blocks(taps: Tensor, reverse: bool, side: int, tall: bool) -> Tensor:
    """How a tile depends on itself, and then on other tiles: `(pairs of tiles, entries, entries)`."""
    taps = taps.transpose(0, 1) if tall else taps
    _, which, _ = _tile_blocks(taps.shape[0], taps.shape[1], side, reverse)
    entries = torch.cat([taps.flatten(0, 1), torch.zeros_like(taps[0, :1])])
    size = side * side * taps.shape[-1]
    return entries[torch.tensor(which, device=taps.device)].transpose(2, 3).reshape(-1, size, size)


def _tile_blocks(p: int, q: int, side: int, reverse: bool) -> _TileBlocks:
    """`_find_tile_blocks`, cached, except by the compiler, which traces through caches and warns of them."""
    find = _find_tile_blocks if torch.compiler.is_compiling() else _cached_tile_blocks
    return find(p, q, side, reverse)


def _find_tile_blocks(p: int, q: int, side: int, reverse: bool) -> _TileBlocks:
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
            reached = [k for k in range(len(points)) if any(row[k] < p * q for row in block)]
            pairs.append((a, b))
            which.append(block)
            used.append((reached[0], reached[-1] + 1))
    return pairs, which, used


_cached_tile_blocks = lru_cache(_find_tile_blocks)
