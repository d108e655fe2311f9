"""The linear layers between the couplings of image flows, by name.

A new kind is one entry of `MIXINGS`, here or from a script; configs, help and error messages follow.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from expmflow import transforms as T

TRAINING_TOL = 3e-3  # of exponentials between couplings; the gradient's error is far below its noise

SPATIAL_RANK = 24  # of Woodbury layers at every level, as in the paper's comparison

Shape = tuple[int, int, int]
"""Channels, height and width of a layer's input."""

Builder = Callable[[Shape, Tensor | None], list[T.Transform]]
"""Maps a shape, and the initial matrix of the 1×1 (a random rotation if None), to layers."""


def _conv1x1(shape: Shape, start: Tensor | None) -> list[T.Transform]:
    return [T.Conv1x1(shape[0], "free", start=start)]


def _convexp(shape: Shape, start: Tensor | None, *, skew: bool = False) -> list[T.Transform]:
    return [*_conv1x1(shape, start), T.ConvExp(shape[0], skew=skew, training_tol=TRAINING_TOL)]


def _convexp_skew(shape: Shape, start: Tensor | None) -> list[T.Transform]:
    return _convexp(shape, start, skew=True)


def _emerging(shape: Shape, start: Tensor | None) -> list[T.Transform]:
    return [T.Emerging(shape[0], conv1x1=T.Conv1x1(shape[0], "free", start=start))]


def _woodbury(shape: Shape, start: Tensor | None) -> list[T.Transform]:
    return [*_conv1x1(shape, start), T.Woodbury(*shape, channel_rank=0, spatial_rank=SPATIAL_RANK)]


def _periodic(shape: Shape, start: Tensor | None) -> list[T.Transform]:
    layer = T.PeriodicConv(shape[0])  # its centre tap mixes channels as a 1×1 does
    if start is not None:
        with torch.no_grad():
            layer.kernel[:, :, 1, 1] = start
    return [layer]


MIXINGS: dict[str, Builder] = {
    "1x1": _conv1x1,
    "convexp": _convexp,
    "convexp-skew": _convexp_skew,
    "emerging": _emerging,
    "woodbury": _woodbury,
    "periodic": _periodic,
}

Mixing = str
"""A name in `MIXINGS`."""


def haar(channels: int, *, colours: bool = False) -> Tensor:
    """The rotation of squeezed channels to the averages of the 2 × 2 points, then their three kinds of differences.

    A first mixing layer that starts with it separates coarse from fine; with `colours` also their average from
    contrasts.
    """
    points = torch.kron(cosines(2), cosines(2))
    images = cosines(channels // 4) if colours else torch.eye(channels // 4)
    return torch.einsum("ip,cd->icdp", points, images).reshape(channels, channels)


def cosines(n: int) -> Tensor:
    """The orthogonal matrix of the discrete cosine transform: the average first, then finer and finer contrasts."""
    k = torch.arange(n)
    rows = torch.cos(torch.pi / n * (k + 0.5) * k[:, None])
    return rows / torch.linalg.vector_norm(rows, dim=1, keepdim=True)
