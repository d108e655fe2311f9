"""Couplings: one half of the channels transforms the other."""

from __future__ import annotations

from typing import Any, final

import torch
from torch import Tensor, nn

from expmflow._validation import expect, expect_count
from expmflow.nn.graph import node_mask
from expmflow.nn.precision import network_precision
from expmflow.transforms.base import Output, Transform, keep_padding
from expmflow.transforms.elementwise import Affine, Elementwise
from expmflow.transforms.shapes import expect_channels


class Coupling(Transform):
    """z₁ = x₁, z₂ an increasing function of x₂, entry by entry, with parameters net(x₁, context) (Dinh et al., 2017).

    Args:
        net: maps `x₁` (and the context, if one is given) to `params_per_entry` times the channels of `x₂`. The first
            `channels // 2` channels are `x₁`. `DenseNet`, `MLP` and `GraphNetwork` of `expmflow.nn` fit.
        channels: C.
        dim: the axis of the channels: 1 for images and vectors, −1 for graphs.
        function: applied to each entry of `x₂`, with parameters from the network.
    """

    def __init__(self, net: nn.Module, channels: int, *, dim: int, function: Elementwise) -> None:
        super().__init__()
        expect_count(channels, "channels", at_least=2)
        expect(dim in (1, -1), "the channels on axis 1 or -1", dim)
        self.net = net
        self.channels = channels
        self.dim = dim
        self.function = function

    def check_event_shape(self, event_shape: tuple[int, ...]) -> None:
        expect_channels(event_shape, self.channels, self.dim)

    def check_context(self, context: Any, x: Tensor) -> None:
        check = getattr(self.net, "check_context", None)
        if check is not None:
            check(context, x)

    def _forward(self, x: Tensor, context: Any) -> Output:
        first, second = self._split(x)
        moved, slope = self.function.forward(second, self._params(first, second, context))
        return self._joined(first, second, moved, slope, context)

    def _inverse(self, z: Tensor, context: Any) -> Output:
        first, second = self._split(z)
        moved, slope = self.function.inverse(second, self._params(first, second, context))
        return self._joined(first, second, moved, slope, context)

    def _joined(self, first: Tensor, second: Tensor, moved: Tensor, slope: Tensor, context: Any) -> Output:
        """The two halves joined, and the log-determinant; the padding of graphs neither changes nor counts."""
        mask = node_mask(context) if self.dim == -1 else None
        if mask is not None:
            moved, slope = keep_padding(moved, second, mask), slope * mask.unsqueeze(-1)
        return torch.cat([first, moved], dim=self.dim), slope.sum(tuple(range(1, slope.ndim)))

    def _split(self, x: Tensor) -> tuple[Tensor, Tensor]:
        passive = self.channels // 2
        first, second = x.split([passive, self.channels - passive], dim=self.dim)
        return first, second

    def _params(self, first: Tensor, second: Tensor, context: Any) -> tuple[Tensor, ...]:
        with network_precision(first.device.type):
            out = self.net(first) if context is None else self.net(first, context)
        out = out.to(first.dtype)
        wanted = self.function.params_per_entry * second.shape[self.dim]
        self._expect(out.shape[self.dim] == wanted, f"{wanted} channels from the network", out.shape[self.dim])
        return out.chunk(self.function.params_per_entry, dim=self.dim)


@final
class AffineCoupling(Coupling):
    """z₁ = x₁, z₂ = x₂ · e^s + t, with (s, t) = net(x₁, context) and s bounded by 2 tanh(·/2) (Dinh et al., 2017).

    Args:
        net: maps `x₁` (and the context, if one is given) to twice the channels of `x₂`: first s, then t. The first
            `channels // 2` channels are `x₁`. `DenseNet`, `MLP` and `GraphNetwork` of `expmflow.nn` fit.
        channels: C.
        dim: the axis of the channels: 1 for images and vectors, −1 for graphs.

    Example:
        >>> layer = T.AffineCoupling(expmflow.nn.MLP(2, 4, hidden=(16,)), channels=4)
        >>> z, logdet = layer(torch.randn(5, 4))
    """

    def __init__(self, net: nn.Module, channels: int, *, dim: int = 1) -> None:
        super().__init__(net, channels, dim=dim, function=Affine())
