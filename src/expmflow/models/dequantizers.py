"""The noise between the grey levels of images, from a conditional flow."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from expmflow import transforms as T
from expmflow.distributions import Dequantizer, VariationalDequantization
from expmflow.nn import DenseNet


def variational_dequantization(channels: int, *, subflows: int = 4, growth: int = 32, depth: int = 2) -> Dequantizer:
    """The noise of `(channels, h, w)` images: one level of couplings with 1×1 mixing, shown the image."""

    def layers(channels: int) -> Iterator[T.Transform]:
        yield T.Squeeze()
        for _ in range(subflows):
            yield T.Conv1x1(channels)
            net = DenseNet(channels // 2, channels, growth=growth, depth=depth, context_channels=growth)
            yield T.AffineCoupling(net, channels)
        yield T.Inverse(T.Squeeze())

    context = nn.Sequential(
        nn.PixelUnshuffle(2),
        nn.Conv2d(4 * channels, growth, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(growth, growth, 3, padding=1),
    )
    return VariationalDequantization(T.Chain(layers(4 * channels)), context)
