"""The network inside image couplings."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from expmflow._validation import expect_count
from expmflow.nn.context import check_context
from expmflow.nn.dense_layers import dense_network, gated_sum
from expmflow.nn.layout import channels_last


class DenseNet(nn.Module):
    """A DenseNet inside a residual connection, with an output that starts at zero.

    A 1×1 convolution to `width` channels; then the residual part: `depth` layers (1×1 at full width, ReLU, 3×3 to
    `growth` channels, ReLU) whose outputs are concatenated, and a gated 1×1; then a 1×1 convolution that starts at
    zero, so that the coupling around it starts as the identity.

    Args:
        in_channels, out_channels: of `(batch, channels, h, w)`.
        growth: channels that each layer adds.
        depth: the number of layers.
        width: channels between the first and the last convolution; `growth` if None.
        gated: False ends with a plain 1×1.
        context_channels: channels of a context `(batch, channels, h, w)` or `(batch, channels)`; 0 for none.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        *,
        growth: int = 32,
        depth: int = 2,
        width: int | None = None,
        gated: bool = True,
        context_channels: int = 0,
    ) -> None:
        super().__init__()
        width = growth if width is None else width
        for name, value in (
            ("in_channels", in_channels),
            ("out_channels", out_channels),
            ("growth", growth),
            ("width", width),
        ):
            expect_count(value, name)
        expect_count(depth, "depth", at_least=0)
        self.context_channels = context_channels
        self.first = nn.Conv2d(in_channels, width, 1)
        self.context = nn.Linear(context_channels, width) if context_channels else None
        self.layers = nn.ModuleList(_DenseLayer(width + growth * i, growth) for i in range(depth))
        self.gate = nn.Conv2d(width + growth * depth, (3 if gated else 1) * width, 1)
        self.last = nn.Conv2d(width, out_channels, 1)
        nn.init.zeros_(self.last.weight)
        if self.last.bias is not None:
            nn.init.zeros_(self.last.bias)

    def forward(self, x: Tensor, context: Any = None) -> Tensor:
        layers = [part for layer in self.layers for part in (layer[0], layer[2])]  # type: ignore[index]
        convolutions = (self.first, *layers, self.gate, self.last)
        weights = [tensor for convolution in convolutions for tensor in (convolution.weight, convolution.bias)]
        if self.context is not None:
            x, *weights[:2] = _with_context(x, context, self.first, self.context)
        return dense_network(x, *weights)

    def check_context(self, context: Any, x: Tensor) -> None:
        """Raise `ValueError` unless `context` fits `x`."""
        check_context(context, x, self.context_channels)


class _DenseLayer(nn.Sequential):
    def __init__(self, channels: int, growth: int) -> None:
        super().__init__(
            nn.Conv2d(channels, channels, 1), nn.ReLU(), nn.Conv2d(channels, growth, 3, padding=1), nn.ReLU()
        )

    def forward(self, x: Tensor) -> Tensor:
        mix, relu, conv, _ = self
        x = relu(mix(x))
        # With one channel, the 1×1 cannot tell the memory layout, and the 3×3 would use the slower one.
        return relu(conv(channels_last(x) if x.shape[1] == 1 else x))


class DenseBlock(nn.Module):
    """Layers as in `DenseNet`, applied to the input itself, then a gated 1×1: the image network of the paper's
    dequantizer.

    Args:
        in_channels, out_channels: of `(batch, channels, h, w)`.
        growth: channels that each layer adds.
        depth: the number of layers.
        gated: False ends with a plain 1×1.
    """

    def __init__(
        self, in_channels: int, out_channels: int, *, growth: int = 32, depth: int = 4, gated: bool = True
    ) -> None:
        super().__init__()
        self.out_channels = out_channels
        self.layers = nn.ModuleList(_DenseLayer(in_channels + growth * i, growth) for i in range(depth))
        self.gate = nn.Conv2d(in_channels + growth * depth, (3 if gated else 1) * out_channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.cat([x, layer(x)], dim=1)
        return gated_sum(self.gate(x), self.out_channels)


def _with_context(x: Tensor, context: Tensor, first: nn.Conv2d, linear: nn.Linear) -> tuple[Tensor, Tensor, Tensor]:
    """The input with the context as more channels, and the weight and bias of a first 1×1 that reads both."""
    constant = context.reshape(*context.shape, *(1,) * (x.ndim - context.ndim)).expand(-1, -1, *x.shape[2:])
    weight = torch.cat([first.weight, linear.weight[..., None, None]], dim=1)
    return torch.cat([x, constant], dim=1), weight, first.bias + linear.bias  # type: ignore[operator]
