"""The planar flow (Rezende and Mohamed, 2015)."""

from __future__ import annotations

from typing import Any, ClassVar, final

import torch
import torch.nn.functional as F
from torch import Tensor

from expmflow._validation import expect_count
from expmflow.transforms.amortized import Amortizable
from expmflow.transforms.base import Output
from expmflow.transforms.shapes import expect_vectors


@final
class Planar(Amortizable):
    """z = x + û tanh(wᵀx + b), logdet = log(1 + wᵀû tanh′(wᵀx + b)), in O(d).

    û = u + (m(wᵀu) − wᵀu) w/‖w‖² with m(a) = softplus(a) − 1, so that wᵀû > −1 and the map is invertible. The inverse
    finds one number, wᵀx, by safeguarded Newton steps; its gradient is exact.

    Args:
        features: d of the input `(batch, d)`.
        amortized: take u, w and b, 2 d + 1 numbers, from each sample's context instead of from the layer.

    Example:
        >>> layer = T.Planar(3)
        >>> z, logdet = layer(torch.randn(5, 3))
    """

    closed_form: ClassVar[tuple[str, ...]] = ("forward",)

    def __init__(self, features: int, *, amortized: bool = False) -> None:
        expect_count(features, "features")
        start = {
            "u": 0.1 * torch.randn(features),
            "w": torch.randn(features) * features**-0.5,
            "b": torch.zeros(1),
        }
        super().__init__(start, amortized=amortized)
        self.features = features

    def check_event_shape(self, event_shape: tuple[int, ...]) -> None:
        expect_vectors(event_shape, self.features)

    def _forward(self, x: Tensor, context: Any) -> Output:
        w, u, b, least = self._direction(context)
        h = torch.tanh((w * x).sum(1, keepdim=True) + b)
        return x + u * h, _slope(h, least).log().squeeze(1)

    def _inverse(self, z: Tensor, context: Any) -> Output:
        w, u, b, least = self._direction(context)
        v, gain = (w * z).sum(1, keepdim=True), least - 1
        a = self._tanh_root(v, gain, torch.ones_like(v), b)
        for _ in range(2 if torch.is_grad_enabled() else 1):  # each step makes one more order of derivatives right
            h = torch.tanh(a + b)
            a = a - (a + gain * h - v) / _slope(h, least)
        h = torch.tanh(a + b)
        return z - u * h, -_slope(h, least).log().squeeze(1)

    def _direction(self, context: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """w, û, b and 1 + wᵀû, which is positive."""
        params = self.params(context)
        u, w, b = params["u"], params["w"], params["b"]
        product, norm = (w * u).sum(1, keepdim=True), (w * w).sum(1, keepdim=True)
        tiny, eps = torch.finfo(w.dtype).tiny, torch.finfo(w.dtype).eps  # a smaller slope could not be inverted
        least = torch.where(norm < tiny, 1 + product, F.softplus(product).clamp_min(eps))  # w = 0 leaves u unchanged
        return w, u + (least - 1 - product) * w / norm.clamp_min(tiny), b, least


def _slope(h: Tensor, least: Tensor) -> Tensor:
    """1 + wᵀû (1 − h²), without cancellation."""
    return least * (1 - h * h) + h * h
