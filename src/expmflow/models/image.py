"""Flows on images: the paper's architectures."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from expmflow import transforms as T
from expmflow._validation import expect, expect_count, expect_one_of
from expmflow.distributions import (
    DequantizedFlow,
    Dequantizer,
    DiagonalGaussian,
    Flow,
    StandardNormal,
    UniformDequantization,
    VariationalDequantization,
)
from expmflow.nn import DenseNet

TRAINING_TOL = 3e-3  # of the exponentials between couplings; a gradient moves by far less than from batch to batch
Subflow = Literal["sylvester", "coupling"]
Mixing = Literal["1x1", "convexp", "convexp-skew"]
BaseKind = Literal["standard", "gaussian"]
Dequantization = Literal["uniform", "variational"]


def image_flow(
    event_shape: tuple[int, ...],
    *,
    subflow: Subflow = "sylvester",
    mixing: Mixing = "1x1",
    levels: int = 2,
    subflows: int = 4,
    growth: int = 32,
    depth: int = 2,
    hidden: int = 96,
    actnorm: bool = True,
    mixing_last: bool = False,
    base: BaseKind = "gaussian",
    dequantization: Dequantization = "uniform",
    dequantization_subflows: int = 4,
    conditional: bool = False,
    grey_levels: int = 256,
    classes: int | None = None,
) -> DequantizedFlow:
    """A density of integer images: levels of a squeeze and subflows; half of the channels leave between levels.

    Args:
        event_shape: `(C, h, w)`; h and w are divided by two at each level.
        subflow: `"sylvester"`, a convolutional Sylvester layer, the order turned around between subflows; or
            `"coupling"`, a linear mixing layer and an affine coupling with a DenseNet.
        mixing: the linear layer of couplings: `"1x1"`, `"convexp"` (a 1×1 and a convolution exponential), or
            `"convexp-skew"`, whose exponential is orthogonal.
        levels, subflows: how many, and how many in each.
        growth, depth: of the DenseNets.
        hidden: channels inside the Sylvester layers.
        actnorm: an ActNorm before each subflow.
        mixing_last: one more mixing layer behind the last coupling of each level.
        base: standard normal, or with learned means and standard deviations.
        dequantization: uniform noise between the grey levels, or noise from a conditional flow of its own.
        dequantization_subflows: of that flow.
        conditional: whether there are classes: the context is then one-hot, `(batch, classes)`.
        grey_levels: the integers go from 0 to `grey_levels` − 1.
        classes: how many.

    Example:
        >>> model = image_flow((1, 8, 8), subflows=1, hidden=8, grey_levels=17)
        >>> model(torch.randint(17, (5, 1, 8, 8))).shape
        torch.Size([5])
    """
    expect(len(event_shape) == 3, "images of shape (C, h, w)", event_shape)
    for name, value in (
        ("levels", levels),
        ("subflows", subflows),
        ("dequantization_subflows", dequantization_subflows),
    ):
        expect_count(value, name)
    for name, kind, known in (
        ("subflow", subflow, get_args(Subflow)),
        ("mixing", mixing, get_args(Mixing)),
        ("base", base, get_args(BaseKind)),
        ("dequantization", dequantization, get_args(Dequantization)),
    ):
        expect_one_of(kind, known, name)
    channels, height, width = event_shape
    factor = 2**levels
    fits = height % factor == 0 and width % factor == 0
    expect(fits, f"images whose height and width {factor} divides, for {levels} levels", f"{height} × {width}")
    expect(conditional == (classes is not None), "classes for a conditional model only", classes)
    if classes is not None:
        expect_count(classes, "classes")
    context = classes or 0

    def coupling(channels: int) -> T.AffineCoupling:
        kept = channels // 2
        sizes = (kept, 2 * (channels - kept))
        return T.AffineCoupling(DenseNet(*sizes, growth=growth, depth=depth, context_channels=context), channels)

    def level(channels: int, number: int) -> T.Chain:
        channels *= 4
        layers: list[T.Transform] = [T.Squeeze()]
        for k in range(subflows):
            if actnorm:
                layers.append(T.ActNorm(channels))
            if subflow == "sylvester":
                layers.append(T.ConvSylvester(channels, hidden, context_channels=context))
                layers += [T.Flip()] if k + 1 < subflows else []
            else:
                start = haar(channels, colours=number == 1) if k == 0 else None
                layers += [*_mix(mixing, channels, start), coupling(channels)]
        if mixing_last and subflow == "coupling":
            layers += _mix(mixing, channels)
        if number < levels:
            layers.append(T.Split(level(channels // 2, number + 1), coupling(channels)))
        return T.Chain([*layers, T.Inverse(T.Squeeze())])

    bases = {"standard": StandardNormal, "gaussian": DiagonalGaussian}
    flow = Flow(level(channels, 1), bases[base](event_shape))
    dequantizer = (
        UniformDequantization()
        if dequantization == "uniform"
        else variational_dequantization(channels, subflows=dequantization_subflows, growth=growth, depth=depth)
    )
    return DequantizedFlow(flow, dequantizer, levels=grey_levels)


def variational_dequantization(channels: int, *, subflows: int = 4, growth: int = 32, depth: int = 2) -> Dequantizer:
    """The noise of `(channels, h, w)` images: one level of couplings with 1×1 mixing, told the image by a network."""

    def layers(channels: int) -> Iterator[T.Transform]:
        yield T.Squeeze()
        for _ in range(subflows):
            yield T.Conv1x1(channels)
            net = DenseNet(channels // 2, channels, growth=growth, depth=depth, context_channels=growth)
            yield T.AffineCoupling(net, channels)
        yield T.Inverse(T.Squeeze())

    told = nn.Sequential(
        nn.PixelUnshuffle(2),
        nn.Conv2d(4 * channels, growth, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(growth, growth, 3, padding=1),
    )
    return VariationalDequantization(T.Chain(layers(4 * channels)), told)


def _mix(mixing: Mixing, channels: int, start: Tensor | None = None) -> list[T.Transform]:
    """The layers that mix channels, and points."""
    matrix = T.Conv1x1(channels, "free", start=start)
    if mixing == "1x1":
        return [matrix]
    return [matrix, T.ConvExp(channels, skew=mixing == "convexp-skew", training_tol=TRAINING_TOL)]


def haar(channels: int, *, colours: bool = False) -> Tensor:
    """The rotation of squeezed channels to the averages of the 2 × 2 points, then their three kinds of differences.

    A first mixing layer that starts so tells coarse from fine; with `colours` also their average from their contrasts.
    """
    points = torch.kron(cosines(2), cosines(2))
    images = cosines(channels // 4) if colours else torch.eye(channels // 4)
    return torch.einsum("ip,cd->icdp", points, images).reshape(channels, channels)


def cosines(n: int) -> Tensor:
    """The orthogonal matrix of the discrete cosine transform: the average first, then finer and finer contrasts."""
    k = torch.arange(n)
    rows = torch.cos(torch.pi / n * (k + 0.5) * k[:, None])
    return rows / torch.linalg.vector_norm(rows, dim=1, keepdim=True)
