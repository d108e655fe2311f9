"""The discretized mixture of logistics, a density of colour images (Salimans et al., 2017)."""

from __future__ import annotations

import math
from typing import final

import torch
import torch.nn.functional as F
from torch import Tensor

from expmflow._validation import expect, expect_count
from expmflow.distributions.likelihood import Likelihood, check_levels, unit_scale
from expmflow.distributions.protocol import Draw

LEAST_LOG_SCALE = -7.0


@final
class LogisticMixture(Likelihood):
    """At each point one mixture for all colours; within a component each colour depends on those before it.

    With the levels scaled to [−1, 1], the mean of colour c is μ_c + Σ_{b<c} tanh(k_cb) x_b. The probability of a level
    is the mass of a logistic density within half a level of it; the first and the last level also get the tails. So the
    probabilities of the levels sum to 1 exactly. The logarithm is

        log(σ(b) − σ(a)) = log σ(b) + log σ(−a) + log(1 − e^(a − b)),

    for the two ends a < b of a level, which neither cancels nor underflows.

    `params` has for each point, along axis 1: the logits of the components, then for each colour the means, then the
    log scales (at least −7), then the coefficients k of each pair of colours; each for all components.

    Args:
        channels: colours C.
        components: K of each mixture. The network gives K (1 + 2 C + C (C − 1)/2) channels: 100 for ten and RGB.
        levels: the number of levels of each colour.

    Example:
        >>> likelihood = LogisticMixture(3, components=10)
        >>> likelihood.param_channels(3)
        100
        >>> likelihood.log_prob(torch.randint(256, (2, 3, 4, 4)), torch.randn(2, 100, 4, 4)).shape
        torch.Size([2])
    """

    levels: int

    def __init__(self, channels: int = 3, *, components: int = 10, levels: int = 256) -> None:
        super().__init__()
        expect_count(channels, "channels")
        expect_count(components, "components")
        expect_count(levels, "levels", at_least=2)
        self.channels = channels
        self.components = components
        self.levels = levels

    def param_channels(self, channels: int) -> int:
        expect(channels == self.channels, f"images of {self.channels} channels", channels)
        return self.components * (1 + 2 * channels + channels * (channels - 1) // 2)

    def data_channels(self, params: int) -> int:
        wanted = self.param_channels(self.channels)
        expect(params == wanted, f"{wanted} channels from the network", params)
        return self.channels

    def initial_params(self) -> Tensor:
        """`(param_channels,)`, for the first bias of a network: components spread over all levels, alike for all
        colours.

        From zeros, with broad components on top of each other, training would take hundreds of steps to get there.
        """
        c, k = self.channels, self.components
        params = torch.zeros(self.param_channels(c) // k, k)
        params[1 : c + 1] = (2 * torch.arange(k) + 1) / k - 1
        params[c + 1 : 2 * c + 1] = -math.log(k)
        return params.flatten()

    def log_prob(self, x: Tensor, params: Tensor) -> Tensor:
        check_levels(x, self.levels)
        logits, means, log_scales, coefficients = self._parts(params)
        at = unit_scale(x, self.levels, params.dtype)
        means = torch.stack([self._mean(c, means, coefficients, at) for c in range(self.channels)], 1)
        bottom, top = (level.unsqueeze(2) for level in (x == 0, x == self.levels - 1))
        each = _log_level(at.unsqueeze(2) - means, log_scales, 1 / (self.levels - 1), bottom, top)
        return torch.logsumexp(torch.log_softmax(logits, 1) + each.sum(1), 1).flatten(1).sum(1)

    def draws(self, event_shape: tuple[int, ...]) -> tuple[Draw, ...]:
        return (Draw("uniform", event_shape[1:]), Draw("uniform", event_shape))

    def sample(self, params: Tensor, noise: tuple[Tensor, ...]) -> Tensor:
        """First a component for each point, then its colours one after the other."""
        choice, inside = noise
        logits, means, log_scales, coefficients = self._parts(params)
        shares = torch.softmax(logits, 1).cumsum(1)[:, :-1]
        index = (choice.unsqueeze(1) >= shares).sum(1, keepdim=True)  # (batch, 1, *n)
        tiny = torch.finfo(params.dtype).eps
        steps = torch.logit(inside.clamp(tiny, 1 - tiny))
        levels: list[Tensor] = []
        for c in range(self.channels):
            known = unit_scale(torch.stack(levels, 1), self.levels, params.dtype) if levels else means[:, :0, 0]
            mean = self._mean(c, means, coefficients, known).gather(1, index).squeeze(1)
            value = mean + log_scales[:, c].gather(1, index).squeeze(1).exp() * steps[:, c]
            level = ((value + 1) * ((self.levels - 1) / 2)).round().clamp(0, self.levels - 1)
            levels.append(level.to(torch.int64))
        return torch.stack(levels, 1)

    def mean(self, params: Tensor) -> Tensor:
        """The mean of the likeliest component, in levels."""
        logits, means, _, coefficients = self._parts(params)
        index = logits.argmax(1, keepdim=True)
        values: list[Tensor] = []
        for c in range(self.channels):
            known = torch.stack(values, 1) if values else means[:, :0, 0]
            values.append(self._mean(c, means, coefficients, known).gather(1, index).squeeze(1).clamp(-1, 1))
        return (torch.stack(values, 1) + 1) * ((self.levels - 1) / 2)

    def _parts(self, params: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Logits `(batch, K, *n)`; means and log scales `(batch, C, K, *n)`; coefficients `(batch, pairs, K, *n)`."""
        c, k = self.channels, self.components
        self.data_channels(params.shape[1])
        parts = params.unflatten(1, (1 + 2 * c + c * (c - 1) // 2, k))
        logits, means, log_scales, coefficients = parts.split([1, c, c, c * (c - 1) // 2], dim=1)
        return logits.squeeze(1), means, log_scales.clamp_min(LEAST_LOG_SCALE), torch.tanh(coefficients)

    def _mean(self, c: int, means: Tensor, coefficients: Tensor, at: Tensor) -> Tensor:
        """The means of colour c, `(batch, K, *n)`, given the values of the colours before it."""
        first = c * (c - 1) // 2
        mean = means[:, c]
        for b in range(c):
            mean = mean + coefficients[:, first + b] * at[:, b].unsqueeze(1)
        return mean


def _log_level(distance: Tensor, log_scale: Tensor, half: float, bottom: Tensor, top: Tensor) -> Tensor:
    """The log of a logistic density's mass within `half` of a level, or from there to the end of the line."""
    narrow = torch.exp(-log_scale)
    above, below = F.logsigmoid((distance + half) * narrow), F.logsigmoid((half - distance) * narrow)
    width = 2 * half * narrow
    small = width < torch.finfo(width.dtype).eps  # there 1 − e^-w is w, also where w underflows
    log_width = torch.tensor(2 * half, dtype=width.dtype, device=width.device).log() - log_scale
    share = torch.where(small, log_width, torch.log(-torch.expm1(-torch.where(small, 1.0, width))))
    return torch.where(bottom, above, torch.where(top, below, above + below + share))
