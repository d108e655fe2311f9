"""Dequantization noise for images, from a conditional flow."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from torch import nn

from expmflow import transforms as T
from expmflow.distributions import Dequantizer, VariationalDequantization
from expmflow.models.mixing import MIXINGS, Mixing, Shape
from expmflow.models.subflows import Networks
from expmflow.nn import DenseBlock


def variational_dequantization(channels: int, networks: Networks, *, subflows: int = 4) -> Dequantizer:
    """Noise for `(channels, h, w)` images: a level of couplings with 1×1 mixing; two 3×3 convolutions see the image."""
    context_channels = networks.growth
    networks = replace(networks, context=context_channels)

    def layers(channels: int) -> Iterator[T.Transform]:
        yield T.Squeeze()
        for _ in range(subflows):
            yield T.Conv1x1(channels)
            yield networks.dense_coupling(channels)
        yield T.Inverse(T.Squeeze())

    context = nn.Sequential(
        nn.PixelUnshuffle(2),
        nn.Conv2d(4 * channels, context_channels, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(context_channels, context_channels, 3, padding=1),
    )
    return VariationalDequantization(T.Chain(layers(4 * channels)), context)


def dense_dequantization(
    shape: Shape, networks: Networks, mixing: Mixing, *, subflows: int = 4, growth: int = 32, depth: int = 4
) -> Dequantizer:
    """The paper's noise: one level of the model's own mixing and couplings; two DenseNets see the image.

    Noise is drawn by running the layers backwards, so the mixing layers are inverted: a slow inverse is then never
    needed.

    Args:
        shape: of an image, `(C, h, w)`.
        networks: the networks of the couplings.
        mixing: the layer between couplings, and on both sides.
        subflows: the number of couplings.
        growth, depth: of the two DenseNets that see the image, with `growth` channels between and after them.
    """
    channels, height, width = shape
    squeezed = 4 * channels, height // 2, width // 2
    networks = replace(networks, context=growth)

    def mix() -> T.Transform:
        return T.Inverse(T.Chain(MIXINGS[mixing](squeezed, None)))

    def layers(channels: int) -> Iterator[T.Transform]:
        yield T.Squeeze()
        yield mix()
        for _ in range(subflows):
            yield networks.dense_coupling(channels)
            yield mix()
        yield learned_scale(channels)
        yield T.Inverse(T.Squeeze())

    context = nn.Sequential(
        DenseBlock(channels, growth, growth=growth, depth=depth, gated=networks.gated),
        nn.Conv2d(growth, growth, 2, stride=2),
        DenseBlock(growth, growth, growth=growth, depth=depth, gated=networks.gated),
    )
    return VariationalDequantization(T.Chain(layers(4 * channels)), context)


def learned_scale(channels: int) -> T.ActNorm:
    """A learned mean and standard deviation for each channel of a standard normal; they start at 0 and 1."""
    layer = T.ActNorm(channels)
    layer.initialised.fill_(True)
    return layer
