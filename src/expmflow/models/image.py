"""Flows on images: the paper's architectures."""

from __future__ import annotations

from typing import Literal, get_args

from torch import Tensor

from expmflow import transforms as T
from expmflow._validation import expect, expect_count, expect_one_of
from expmflow.distributions import (
    DequantizedFlow,
    DiagonalGaussian,
    Flow,
    StandardNormal,
    UniformDequantization,
)
from expmflow.models.dequantizers import variational_dequantization
from expmflow.models.mixing import MIXINGS, Mixing, Shape, haar
from expmflow.models.subflows import SUBFLOWS, Networks, SubflowName

BaseKind = Literal["standard", "gaussian"]
Dequantization = Literal["uniform", "variational"]
BASES = {"standard": StandardNormal, "gaussian": DiagonalGaussian}


def image_flow(
    event_shape: tuple[int, ...],
    *,
    subflow: SubflowName = "sylvester",
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
        subflow: a name in `SUBFLOWS`: `"sylvester"`, a convolutional Sylvester layer, the order turned around between
            subflows; `"coupling"`, a linear mixing layer and an affine coupling with a DenseNet; ….
        mixing: a name in `MIXINGS`, the linear layer of couplings: `"1x1"`, `"convexp"` (a 1×1 and a convolution
            exponential), `"convexp-skew"`, whose exponential is orthogonal; ….
        levels, subflows: how many, and how many in each.
        growth, depth: of the DenseNets.
        hidden: channels inside Sylvester layers and residual blocks.
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
        ("subflow", subflow, SUBFLOWS),
        ("mixing", mixing, MIXINGS),
        ("base", base, BASES),
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
    block, networks = SUBFLOWS[subflow], Networks(growth, depth, hidden, classes or 0)

    def mix(shape: Shape, start: Tensor | None = None) -> list[T.Transform]:
        return MIXINGS[mixing](shape, start) if block.mixed else []

    def level(channels: int, height: int, width: int, number: int) -> T.Chain:
        shape = channels, height, width = 4 * channels, height // 2, width // 2
        layers: list[T.Transform] = [T.Squeeze()]
        for k in range(subflows):
            layers += [T.ActNorm(channels)] if actnorm else []
            layers += mix(shape, haar(channels, colours=number == 1) if k == 0 else None)
            layers += [block.layer(channels, networks)]
            layers += [T.Flip()] if block.ordered and k + 1 < subflows else []
        layers += mix(shape) if mixing_last else []
        if number < levels:
            rest = level(channels // 2, height, width, number + 1)
            layers.append(T.Split(rest, networks.coupling(channels)))
        return T.Chain([*layers, T.Inverse(T.Squeeze())])

    flow = Flow(level(channels, height, width, 1), BASES[base](event_shape))
    dequantizer = (
        UniformDequantization()
        if dequantization == "uniform"
        else variational_dequantization(channels, subflows=dequantization_subflows, growth=growth, depth=depth)
    )
    return DequantizedFlow(flow, dequantizer, levels=grey_levels)
