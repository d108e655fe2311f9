"""Likelihoods of discrete data under a continuous flow.

Integers x in 0 … levels − 1 become y = (x + u) / levels with noise u in [0, 1). Then
log P(x) ≥ E_q [log p(y) − log q(u | x)] − d log levels, with equality if q is the posterior of u.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Any, ClassVar, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from expmflow._validation import expect_count
from expmflow.distributions.describe import count_parameters
from expmflow.distributions.flow import Flow
from expmflow.distributions.gaussian import normal_log_density
from expmflow.distributions.likelihood import check_levels
from expmflow.distributions.protocol import Density, Draw, Noise, NoiseKind, lone_noise
from expmflow.transforms.base import Transform


class Dequantizer(nn.Module, ABC):
    """The density q(u | x) of the noise that fills the gaps between integers."""

    noise: ClassVar[NoiseKind]
    """The kind of random numbers that it takes."""

    @abstractmethod
    def forward(self, x: Tensor, noise: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """u in [0, 1), in the shape of `x` (a float in [0, 1)), and log q(u | x), `(batch,)`.

        `noise`, of the same shape, replaces the random numbers: uniform for the uniform density, else standard normal.
        """


@final
class UniformDequantization(Dequantizer):
    """q(u | x) = 1."""

    noise: ClassVar[NoiseKind] = "uniform"

    def forward(self, x: Tensor, noise: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return torch.rand_like(x) if noise is None else noise, x.new_zeros(x.shape[0])


@final
class VariationalDequantization(Dequantizer):
    """u = sigmoid(flow⁻¹(ε; context(x))): a conditional flow, trained with the model (Ho et al., 2019).

    Args:
        transform: the conditional flow, from the logit of u to noise; its context is the output of `context`.
        context: a network from the image, scaled to [−½, ½), to the context: `(batch, C, h, w)` to `(batch, K, h, w)`.
    """

    noise: ClassVar[NoiseKind] = "normal"

    def __init__(self, transform: Transform, context: nn.Module) -> None:
        super().__init__()
        self.transform = transform
        self.context = context

    def forward(self, x: Tensor, noise: Tensor | None = None) -> tuple[Tensor, Tensor]:
        epsilon = torch.randn_like(x) if noise is None else noise
        logit, logdet = self.transform.inverse(epsilon, self.context(x - 0.5).to(x.dtype))
        log_base = normal_log_density(epsilon).flatten(1).sum(1)
        log_slope = (F.logsigmoid(logit) + F.logsigmoid(-logit)).flatten(1).sum(1)
        return torch.sigmoid(logit), log_base - logdet - log_slope


@final
class DequantizedFlow(Density):
    """A density of integers: a flow over [0, 1) and a dequantizer.

    Args:
        flow: the continuous density, of y − ½.
        dequantizer: q(u | x).
        levels: the number of grey levels; 256 for bytes.
    """

    is_bound = True

    def __init__(self, flow: Flow, dequantizer: Dequantizer, *, levels: int = 256) -> None:
        super().__init__()
        expect_count(levels, "levels", at_least=2)
        self.flow = flow
        self.dequantizer = dequantizer
        self._levels = levels

    @property
    def event_shape(self) -> tuple[int, ...]:
        return self.flow.event_shape

    @property
    def levels(self) -> int:
        return self._levels

    @property
    def draws(self) -> tuple[Draw, ...]:
        return (Draw(self.dequantizer.noise, self.event_shape),)

    @property
    def sample_draws(self) -> tuple[Draw, ...]:
        return self.flow.sample_draws

    @property
    def _dtype(self) -> torch.dtype:
        return self.flow.base._like.dtype  # type: ignore[return-value]

    def forward(self, x: Tensor, context: Any = None, *, noise: Noise = None) -> Tensor:
        """One sample of the lower bound on log P(x), `(batch,)`: its mean is the ELBO."""
        check_levels(x, self.levels, "grey levels")
        scaled = x.to(self._dtype) / self.levels
        u, log_q = self.dequantizer(scaled, lone_noise(noise))
        y = scaled + u / self.levels - 0.5
        return self.flow.log_prob(y, context) - log_q - x.shape[1:].numel() * math.log(self.levels)

    @torch.no_grad()
    def round_trip_error(self, x: Tensor, context: Any = None) -> Tensor:
        """In grey levels, for the midpoint of the interval that each integer stands for."""
        middle = (x.to(self._dtype) + 0.5) / self.levels - 0.5
        return self.levels * self.flow.round_trip_error(middle, context)

    def description(self) -> str:
        """The layers of the flow, and the dequantizer."""
        more = count_parameters(self.dequantizer)
        noise = f"noise between {self.levels} levels: {type(self.dequantizer).__name__}, {more:,} parameters"
        return f"{self.flow.description()}\n{noise}"

    @torch.no_grad()
    def sample(
        self,
        n: int,
        context: Any = None,
        *,
        temperature: float = 1.0,
        noise: Noise = None,
        per_row: int | None = None,
    ) -> Tensor:
        """Integers `(n, *event)`; with `per_row`, `(n, per_row, *event)`, as for a flow."""
        y = self.flow.sample(n, context, temperature=temperature, noise=noise, per_row=per_row) + 0.5
        return (y * self.levels).floor().clamp(0, self.levels - 1).to(torch.int64)
