"""Flows on images: the paper's architectures."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, get_args

from expmflow import transforms as T
from expmflow._validation import expect, expect_count, expect_one_of
from expmflow.distributions import (
    DequantizedFlow,
    Dequantizer,
    DiagonalGaussian,
    Flow,
    StandardNormal,
    UniformDequantization,
)
from expmflow.models.dequantizers import dense_dequantization, learned_scale, variational_dequantization
from expmflow.models.mixing import MIXINGS, Mixing, Shape, haar
from expmflow.models.subflows import SUBFLOWS, CouplingNetwork, Networks, SubflowName

BaseKind = Literal["standard", "gaussian", "channels"]
Dequantization = Literal["uniform", "variational", "variational-dense"]
Start = Literal["averages", "rotation"]
BASES: dict[str, type[StandardNormal | DiagonalGaussian]] = {
    "standard": StandardNormal,
    "gaussian": DiagonalGaussian,
    "channels": StandardNormal,
}


def image_flow(
    event_shape: tuple[int, ...],
    *,
    subflow: SubflowName = "sylvester",
    mixing: Mixing = "1x1",
    levels: int = 2,
    subflows: int = 4,
    growth: int = 32,
    depth: int = 2,
    width: int | None = None,
    gated: bool = True,
    hidden: int = 96,
    lipschitz: float | None = None,
    coupling_network: CouplingNetwork = "dense",
    actnorm: bool = True,
    start: Start = "averages",
    mixing_first: bool = True,
    mixing_last: bool = False,
    base: BaseKind = "gaussian",
    dequantization: Dequantization = "uniform",
    dequantization_subflows: int = 4,
    dequantization_growth: int = 32,
    dequantization_depth: int = 4,
    conditional: bool = False,
    grey_levels: int = 256,
    classes: int | None = None,
) -> DequantizedFlow:
    """A density of integer images: levels of a squeeze and subflows; half of the channels are split off between levels.

    Args:
        event_shape: `(C, h, w)`; h and w are divided by two at each level.
        subflow: a name in `SUBFLOWS`: `"sylvester"`, a convolutional Sylvester layer, with the order reversed between
            subflows; `"coupling"`, a linear mixing layer and an affine coupling with a DenseNet; ….
        mixing: a name in `MIXINGS`, the linear layer of couplings: `"1x1"`, `"convexp"` (a 1×1 and a convolution
            exponential), `"convexp-skew"`, whose exponential is orthogonal; ….
        levels, subflows: the number of levels, and of subflows in each.
        growth, depth, width, gated: of the DenseNets.
        hidden: channels inside Sylvester layers, residual blocks and couplings with `coupling_network="conv"`.
        lipschitz: the largest norm of the convolutions inside Sylvester layers, 1.5 in the paper; None for no bound.
        coupling_network: of coupling subflows: `"dense"`, a DenseNet, or `"conv"`, three convolutions.
        actnorm: an ActNorm before each subflow.
        start: how the first mixing layer of each level is initialised: `"averages"` and differences of the squeezed
            points, or a random `"rotation"`. With subflows that have no mixing layers, a level begins with a 1×1 of
            averages and differences, or, as in the paper, with none.
        mixing_first: False omits the first mixing layer of all levels but the first.
        mixing_last: one more mixing layer after the last coupling of each level.
        base: `"standard"` normal; `"gaussian"`, with a learned mean and standard deviation for each entry; or
            `"channels"`, for each channel of the last level.
        dequantization: `"uniform"` noise between the grey levels; `"variational"`, noise from a small conditional flow;
            `"variational-dense"`, from a flow with the model's own mixing and two DenseNets that see the image.
        dequantization_subflows: the number of subflows of that flow.
        dequantization_growth, dequantization_depth: of those two DenseNets.
        conditional: whether there are classes: the context is then one-hot, `(batch, classes)`.
        grey_levels: the integers go from 0 to `grey_levels` − 1.
        classes: the number of classes.

    Example:
        >>> model = image_flow((1, 8, 8), subflows=1, hidden=8, grey_levels=17)
        >>> model(torch.randint(17, (5, 1, 8, 8))).shape
        torch.Size([5])
    """
    expect(len(event_shape) == 3, "images of shape (C, h, w)", event_shape)
    counts = {"levels": levels, "subflows": subflows, "dequantization_subflows": dequantization_subflows}
    for name, value in counts.items():
        expect_count(value, name)
    for name, kind, known in (
        ("subflow", subflow, SUBFLOWS),
        ("mixing", mixing, MIXINGS),
        ("coupling_network", coupling_network, get_args(CouplingNetwork)),
        ("start", start, get_args(Start)),
        ("base", base, BASES),
        ("dequantization", dequantization, get_args(Dequantization)),
    ):
        expect_one_of(kind, known, name)
    channels, rows, columns = event_shape
    factor = 2**levels
    fits = rows % factor == 0 and columns % factor == 0
    expect(fits, f"images whose height and width {factor} divides, for {levels} levels", f"{rows} × {columns}")
    expect(conditional == (classes is not None), "classes for a conditional model only", classes)
    if classes is not None:
        expect_count(classes, "classes")
    block = SUBFLOWS[subflow]
    networks = Networks(growth, depth, hidden, width, gated, coupling_network, classes or 0, lipschitz)

    def mix(shape: Shape, number: int, k: int) -> list[T.Transform]:
        """The mixing layer before subflow k of a level."""
        if not block.mixed or (k == 0 and number > 1 and not mixing_first):
            return []
        averages = k == 0 and start == "averages"
        return MIXINGS[mixing](shape, haar(shape[0], colours=number == 1) if averages else None)

    def level(channels: int, rows: int, columns: int, number: int) -> Iterator[T.Transform]:
        """Level `number`, from 1; the levels after it are the layers inside its split."""
        shape = channels, rows, columns = 4 * channels, rows // 2, columns // 2
        yield T.Squeeze()
        if start == "averages" and not block.mixed:
            yield from MIXINGS["1x1"](shape, haar(channels, colours=number == 1))
        for k in range(subflows):
            if actnorm:
                yield T.ActNorm(channels)
            yield from mix(shape, number, k)
            yield block.layer(channels, networks)
            if block.ordered and k + 1 < subflows:
                yield T.Flip()
        if mixing_last:
            yield from mix(shape, number, subflows)
        if number < levels:
            rest = T.Chain(level(channels // 2, rows, columns, number + 1))
            yield T.Split(rest, networks.dense_coupling(channels))
        elif base == "channels":
            yield learned_scale(channels)
        yield T.Inverse(T.Squeeze())

    def dequantizer() -> Dequantizer:
        if dequantization == "uniform":
            return UniformDequantization()
        if dequantization == "variational":
            return variational_dequantization(channels, networks, subflows=dequantization_subflows)
        return dense_dequantization(
            (channels, rows, columns),
            networks,
            mixing,
            subflows=dequantization_subflows,
            growth=dequantization_growth,
            depth=dequantization_depth,
        )

    flow = Flow(T.Chain(level(channels, rows, columns, 1)), BASES[base](event_shape))
    return DequantizedFlow(flow, dequantizer(), levels=grey_levels)
