"""Rational-quadratic splines as scalar functions (Durkan et al., 2019)."""

from __future__ import annotations

import math
from typing import final

import torch
import torch.nn.functional as F
from torch import Tensor

from expmflow._validation import expect, expect_count
from expmflow.transforms.elementwise import Elementwise, Pair, Params

LEAST = 1e-3  # the smallest share of the interval that a bin takes, and the smallest slope at a knot

_UNIT = math.log(math.expm1(1 - LEAST))  # the parameter for which softplus gives a slope of 1


@final
class Spline(Elementwise):
    """An increasing spline of `bins` pieces on [−bound, bound], each a ratio of quadratics; the identity outside.

    Its slope is continuous, and both directions are closed-form. With all parameters zero it is the identity.

    Args:
        bins: the number of pieces.
        bound: where the spline ends.
    """

    def __init__(self, bins: int, bound: float = 5.0) -> None:
        expect_count(bins, "components", at_least=2)  # one piece would be the identity
        expect(bins * LEAST < 1, f"fewer than {round(1 / LEAST)} components", bins)  # each has at least that share
        expect(bound > 0, "a positive bound", bound)
        self.bins = bins
        self.bound = bound
        self.params_per_entry = 3 * bins - 1

    def forward(self, x: Tensor, params: Params) -> Pair:
        inside, at = x.abs() < self.bound, x.clamp(-self.bound, self.bound)
        widths, heights, slopes = self._pieces(params)
        left, width, low, height, start, end = _piece(at, widths, widths, heights, slopes, self.bound)
        share = (at - left) / width
        z, log_slope = _rational(share, height / width, start, end)
        return torch.where(inside, low + height * z, x), torch.where(inside, log_slope, 0.0)

    def inverse(self, z: Tensor, params: Params) -> Pair:
        inside, at = z.abs() < self.bound, z.clamp(-self.bound, self.bound)
        widths, heights, slopes = self._pieces(params)
        left, width, low, height, start, end = _piece(at, heights, widths, heights, slopes, self.bound)
        mean, rise = height / width, (at - low) / height
        bend = end + start - 2 * mean
        # a share² + b share + c = 0; its root in [0, 1], in the form that does not cancel
        a, b, c = (mean - start) + rise * bend, start - rise * bend, -mean * rise
        share = 2 * c / (-b - torch.sqrt((b * b - 4 * a * c).clamp_min(torch.finfo(z.dtype).tiny)))
        value, log_slope = _rational(share, mean, start, end)
        share = share - (value - rise) * mean * (-log_slope).exp()  # a Newton step: the discriminant may have cancelled
        _, log_slope = _rational(share, mean, start, end)
        return torch.where(inside, left + width * share, z), torch.where(inside, -log_slope, 0.0)

    def _pieces(self, params: Params) -> tuple[Tensor, Tensor, Tensor]:
        """Widths and heights `(bins, *shape)`, which sum to the length of the interval, and slopes at all knots."""
        k = self.bins
        widths, heights = (
            2 * self.bound * (LEAST + (1 - LEAST * k) * torch.softmax(torch.stack(params[i : i + k]), 0))
            for i in (0, k)
        )
        one = torch.ones_like(widths[:1])
        inner = [LEAST + F.softplus(param + _UNIT).unsqueeze(0) for param in params[2 * k :]]
        return widths, heights, torch.cat([one, *inner, one])


def _piece(
    at: Tensor, along: Tensor, widths: Tensor, heights: Tensor, slopes: Tensor, bound: float
) -> tuple[Tensor, ...]:
    """The piece that contains `at`, found by the knots of `along`: left, width, low, height, and slopes at its ends."""
    knots = along.cumsum(0)[:-1] - bound
    index = (at >= knots).sum(0, keepdim=True)

    def pick(values: Tensor, offset: int = 0) -> Tensor:
        return values.gather(0, index + offset).squeeze(0)

    def before(sizes: Tensor) -> Tensor:
        return pick(sizes.cumsum(0) - sizes) - bound

    return before(widths), pick(widths), before(heights), pick(heights), pick(slopes), pick(slopes, 1)


def _rational(share: Tensor, mean: Tensor, start: Tensor, end: Tensor) -> Pair:
    """The share of the height at a share of the width, and the logarithm of the slope there."""
    rest = 1 - share
    below = mean + (end + start - 2 * mean) * share * rest
    z = share * (mean * share + start * rest) / below
    log_slope = (end * share**2 + 2 * mean * share * rest + start * rest**2).log() + 2 * (mean.log() - below.log())
    return z, log_slope
