"""The network inside image couplings."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from expmflow._validation import expect_count
from expmflow.nn.context import check_context
from expmflow.nn.dense_layers import dense_network


class DenseNet(nn.Module):
    """A DenseNet around which a residual connection goes, with an output that starts at zero.

    A 1×1 convolution to `growth` channels; then, in residual, `depth` layers (1×1 at full width, ReLU, 3×3 to `growth`
    channels, ReLU) whose outputs are concatenated, closed by a gated 1×1; then a 1×1 convolution that starts at zero,
    so that the coupling around it starts as the identity.

    Args:
        in_channels, out_channels: of `(batch, channels, h, w)`.
        growth: channels that each layer adds.
        depth: the number of layers.
        context_channels: channels of a context `(batch, channels, h, w)` or `(batch, channels)`; 0 for none.
    """

    def __init__(
        self, in_channels: int, out_channels: int, *, growth: int = 32, depth: int = 2, context_channels: int = 0
    ) -> None:
        super().__init__()
        for name, value in (("in_channels", in_channels), ("out_channels", out_channels), ("growth", growth)):
            expect_count(value, name)
        expect_count(depth, "depth", at_least=0)
        self.context_channels = context_channels
        self.first = nn.Conv2d(in_channels, growth, 1)
        self.context = nn.Linear(context_channels, growth) if context_channels else None
        self.layers = nn.ModuleList(_DenseLayer(growth * (i + 1), growth) for i in range(depth))
        self.gate = nn.Conv2d(growth * (depth + 1), 3 * growth, 1)
        self.last = nn.Conv2d(growth, out_channels, 1)
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
        """Raise `ValueError` unless `context` fits beside `x`."""
        check_context(context, x, self.context_channels)


class _DenseLayer(nn.Sequential):
    def __init__(self, channels: int, growth: int) -> None:
        super().__init__(
            nn.Conv2d(channels, channels, 1), nn.ReLU(), nn.Conv2d(channels, growth, 3, padding=1), nn.ReLU()
        )


def _with_context(x: Tensor, context: Tensor, first: nn.Conv2d, linear: nn.Linear) -> tuple[Tensor, Tensor, Tensor]:
    """The context as more channels, and the weight and bias of a first 1×1 that reads them."""
    told = context.reshape(*context.shape, *(1,) * (x.ndim - context.ndim)).expand(-1, -1, *x.shape[2:])
    weight = torch.cat([first.weight, linear.weight[..., None, None]], dim=1)
    return torch.cat([x, told], dim=1), weight, first.bias + linear.bias  # type: ignore[operator]
