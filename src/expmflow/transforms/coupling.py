"""Affine coupling: one half of the channels scales and shifts the other."""

from __future__ import annotations

from typing import Any, final

import torch
from torch import Tensor, nn

from expmflow._validation import expect, expect_count
from expmflow.nn.precision import network_precision
from expmflow.transforms.base import Output, Transform

LARGEST_LOG_SCALE = 2.0


@final
class AffineCoupling(Transform):
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
        super().__init__()
        expect_count(channels, "channels", at_least=2)
        expect(dim in (1, -1), "the channels on axis 1 or -1", dim)
        self.net = net
        self.channels = channels
        self.dim = dim

    def check_event_shape(self, event_shape: tuple[int, ...]) -> None:
        found = event_shape[0 if self.dim == 1 else -1]
        expect(found == self.channels, f"{self.channels} channels on axis {self.dim}", found)

    def check_context(self, context: Any, x: Tensor) -> None:
        check = getattr(self.net, "check_context", None)
        if check is not None:
            check(context, x)

    def _split(self, x: Tensor) -> tuple[Tensor, Tensor]:
        kept = self.channels // 2
        first, second = x.split([kept, self.channels - kept], dim=self.dim)
        return first, second

    def _scale_and_shift(self, first: Tensor, second: Tensor, context: Any) -> tuple[Tensor, Tensor]:
        with network_precision(first.device.type):
            out = self.net(first) if context is None else self.net(first, context)
        out = out.to(first.dtype)
        wanted = 2 * second.shape[self.dim]
        self._expect(out.shape[self.dim] == wanted, f"{wanted} channels from the network", out.shape[self.dim])
        log_scale, shift = out.chunk(2, dim=self.dim)
        return LARGEST_LOG_SCALE * torch.tanh(log_scale / LARGEST_LOG_SCALE), shift

    def _forward(self, x: Tensor, context: Any) -> Output:
        first, second = self._split(x)
        log_scale, shift = self._scale_and_shift(first, second, context)
        moved = torch.addcmul(shift, second, log_scale.exp())
        return torch.cat([first, moved], dim=self.dim), log_scale.flatten(1).sum(1)

    def _inverse(self, z: Tensor, context: Any) -> Output:
        first, second = self._split(z)
        log_scale, shift = self._scale_and_shift(first, second, context)
        return torch.cat([first, (second - shift) * (-log_scale).exp()], dim=self.dim), -log_scale.flatten(1).sum(1)
