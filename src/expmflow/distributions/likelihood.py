"""Densities of data given the output of a network: the likelihoods of VAE decoders."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from expmflow._validation import expect, expect_count, expect_type
from expmflow.distributions.gaussian import normal_log_density
from expmflow.distributions.protocol import Draw


class Likelihood(nn.Module, ABC):
    """p(x | params), entry by entry or point by point; `params` is the output of a network, `(batch, channels, *n)`."""

    levels: int | None = None
    """The number of integer levels; None for floats."""

    @abstractmethod
    def param_channels(self, channels: int) -> int:
        """How many channels the network gives for data of `channels` channels."""

    @abstractmethod
    def data_channels(self, params: int) -> int:
        """The inverse: how many channels the data has for such `params`."""

    @abstractmethod
    def log_prob(self, x: Tensor, params: Tensor) -> Tensor:
        """log p(x | params), `(batch,)`, in nats."""

    @abstractmethod
    def draws(self, event_shape: tuple[int, ...]) -> tuple[Draw, ...]:
        """The random numbers of one sample."""

    @abstractmethod
    def sample(self, params: Tensor, noise: tuple[Tensor, ...]) -> Tensor:
        """A sample, `(batch, *event)`."""

    @abstractmethod
    def mean(self, params: Tensor) -> Tensor:
        """The expectation of x, for reconstructions: `(batch, *event)`, as floats."""

    def scaled(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """The data as the encoder sees it: integers scaled to [−1, 1], floats unchanged."""
        if self.levels is None:
            expect_type(x.dtype == dtype, f"data of dtype {dtype}, as the model", x.dtype)
            return x
        check_levels(x, self.levels)
        return unit_scale(x, self.levels, dtype)


def check_levels(x: Tensor, levels: int, what: str = "levels") -> None:
    """Raise unless `x` holds integers from 0 to `levels` − 1."""
    integer = isinstance(x, Tensor) and not x.is_floating_point() and not x.is_complex() and x.dtype != torch.bool
    expect_type(integer, "integers", x.dtype if isinstance(x, Tensor) else type(x).__name__)
    if x.numel() and not torch.compiler.is_compiling():
        least, largest = (int(v) for v in torch.aminmax(x))
        inside = least >= 0 and largest < levels
        expect(inside, f"{what} from 0 to {levels - 1}", f"{least} to {largest}")


def unit_scale(x: Tensor, levels: int, dtype: torch.dtype) -> Tensor:
    """Integers 0 … `levels` − 1 as floats from −1 to 1."""
    return x.to(dtype) * (2 / (levels - 1)) - 1


@final
class Bernoulli(Likelihood):
    """Entries that are 0 or 1; `params` are the logits.

    Example:
        >>> Bernoulli().log_prob(torch.ones(1, 1, 2, 2, dtype=torch.int64), torch.zeros(1, 1, 2, 2)) / math.log(2)
        tensor([-4.])
    """

    levels = 2

    def param_channels(self, channels: int) -> int:
        return channels

    def data_channels(self, params: int) -> int:
        return params

    def log_prob(self, x: Tensor, params: Tensor) -> Tensor:
        return F.logsigmoid(torch.where(x > 0, params, -params)).flatten(1).sum(1)

    def draws(self, event_shape: tuple[int, ...]) -> tuple[Draw, ...]:
        return (Draw("uniform", event_shape),)

    def sample(self, params: Tensor, noise: tuple[Tensor, ...]) -> Tensor:
        return (noise[0] < torch.sigmoid(params)).to(torch.int64)

    def mean(self, params: Tensor) -> Tensor:
        return torch.sigmoid(params)


@final
class Normal(Likelihood):
    """Floats with the means `params` and a standard deviation for each channel: learned, or `std` for all.

    Args:
        channels: of `(batch, channels, *n)`.
        std: the initial standard deviation.
        learned: whether it is trained.
    """

    def __init__(self, channels: int, *, std: float = 1.0, learned: bool = True) -> None:
        super().__init__()
        expect_count(channels, "channels")
        expect(std > 0, "a positive std", std)
        start = torch.full((channels,), math.log(std))
        self.log_std = nn.Parameter(start, requires_grad=learned)

    def param_channels(self, channels: int) -> int:
        return channels

    def data_channels(self, params: int) -> int:
        return params

    def log_prob(self, x: Tensor, params: Tensor) -> Tensor:
        log_std = self._along(params)
        standard = (x - params) * (-log_std).exp()
        return normal_log_density(standard, log_std).flatten(1).sum(1)

    def draws(self, event_shape: tuple[int, ...]) -> tuple[Draw, ...]:
        return (Draw("normal", event_shape),)

    def sample(self, params: Tensor, noise: tuple[Tensor, ...]) -> Tensor:
        return params + self._along(params).exp() * noise[0]

    def mean(self, params: Tensor) -> Tensor:
        return params

    def _along(self, params: Tensor) -> Tensor:
        return self.log_std.reshape(-1, *(1,) * (params.ndim - 2))
