"""The non-linear layers of image flows, by name.

A new kind is one entry of `SUBFLOWS`, here or from a script; configs, help and error messages follow.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from torch import nn

from expmflow import transforms as T
from expmflow.models.mixing import TRAINING_TOL
from expmflow.nn import ConvNet, DenseNet, LipschitzConvNet

CouplingNetwork = Literal["dense", "conv"]


@dataclass(frozen=True)
class Networks:
    """The networks inside a model's layers.

    Args:
        growth, depth, width, gated: of DenseNets.
        hidden: channels inside Sylvester layers, residual blocks and networks of three convolutions.
        coupling_network: of coupling subflows: a DenseNet, or three convolutions.
        context: channels of the context that every network is given; 0 for none.
        lipschitz: the largest norm of the convolutions inside Sylvester layers; None for no bound.
    """

    growth: int
    depth: int
    hidden: int
    width: int | None = None
    gated: bool = True
    coupling_network: CouplingNetwork = "dense"
    context: int = 0
    lipschitz: float | None = None

    def dense_coupling(self, channels: int) -> T.AffineCoupling:
        """An affine coupling with a DenseNet."""

        def network(in_channels: int, out_channels: int) -> nn.Module:
            return DenseNet(
                in_channels,
                out_channels,
                growth=self.growth,
                depth=self.depth,
                width=self.width,
                gated=self.gated,
                context_channels=self.context,
            )

        return _affine(channels, network)

    def conv_coupling(self, channels: int) -> T.AffineCoupling:
        """An affine coupling with three convolutions."""
        return _affine(channels, lambda *sizes: ConvNet(*sizes, hidden=self.hidden, context_channels=self.context))


def _affine(channels: int, network: Callable[[int, int], nn.Module]) -> T.AffineCoupling:
    passive = channels // 2
    return T.AffineCoupling(network(passive, 2 * (channels - passive)), channels)


@dataclass(frozen=True)
class Subflow:
    """A kind of subflow.

    Args:
        layer: maps channels and networks to the layer.
        mixed: whether a mixing layer precedes it, because it does not mix channels itself.
        ordered: whether it is autoregressive; its order is then reversed between subflows.
    """

    layer: Callable[[int, Networks], T.Transform]
    mixed: bool = False
    ordered: bool = False


def _sylvester(channels: int, networks: Networks, *, use_basis: bool = True) -> T.Transform:
    return T.ConvSylvester(
        channels,
        networks.hidden,
        training_tol=TRAINING_TOL,
        lipschitz=networks.lipschitz,
        context_channels=networks.context,
        use_basis=use_basis,
    )


def _sylvester_no_basis(channels: int, networks: Networks) -> T.Transform:
    return _sylvester(channels, networks, use_basis=False)


def _sylvester_no_ar(channels: int, networks: Networks) -> T.Transform:
    width = max(1, networks.hidden // channels)  # the paper has one unit per channel
    lipschitz, context = networks.lipschitz, networks.context
    return T.TriangularConvSylvester(channels, width, lipschitz=lipschitz, context_channels=context)


def _residual(channels: int, networks: Networks) -> T.Transform:
    return T.ResidualBlock(LipschitzConvNet(channels, networks.hidden, context_channels=networks.context))


def _coupling(channels: int, networks: Networks) -> T.Transform:
    dense = networks.coupling_network == "dense"
    return networks.dense_coupling(channels) if dense else networks.conv_coupling(channels)


SUBFLOWS: dict[str, Subflow] = {
    "sylvester": Subflow(_sylvester, ordered=True),
    "coupling": Subflow(_coupling, mixed=True),
    "residual": Subflow(_residual),
    "sylvester-no-ar": Subflow(_sylvester_no_ar, ordered=True),
    "sylvester-no-basis": Subflow(_sylvester_no_basis, ordered=True),
}

SubflowName = str
"""A name in `SUBFLOWS`."""
