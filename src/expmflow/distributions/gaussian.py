"""Base densities of flows."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from expmflow._validation import expect, expect_count, expect_type
from expmflow.nn.graph import node_mask, split_graph

LOG_2PI = math.log(2 * math.pi)
UNIT_VARIANCE = math.sqrt(3) / math.pi  # the scale of a logistic whose variance is one


def checked_shape(event_shape: Sequence[int]) -> tuple[int, ...]:
    """The shape of an event as a tuple of at least one size."""
    sizes = isinstance(event_shape, Sequence) and len(event_shape) > 0
    expect_type(sizes, "an event_shape such as (4,)", repr(event_shape))
    for size in event_shape:
        expect_count(size, "event_shape")
    return tuple(event_shape)


class Base(nn.Module, ABC):
    """A simple density on `(batch, *event)`."""

    sees_context: ClassVar[bool] = False
    """Whether `log_prob` and `sample_shape` receive the flow's context."""

    draws_itself: ClassVar[bool] = False
    """Whether it draws its random numbers itself, with `draw`, and takes none."""

    def __init__(self, event_shape: Sequence[int]) -> None:
        super().__init__()
        self.event_shape = checked_shape(event_shape)
        self.register_buffer("_like", torch.zeros(()), persistent=False)  # records the module's dtype and device

    def description(self) -> str:
        """A description for people."""
        return f"{type(self).__name__} of shape {' × '.join(map(str, self.event_shape))}"

    @abstractmethod
    def log_prob(self, z: Tensor) -> Tensor:
        """`(batch,)`."""

    @abstractmethod
    def transform_noise(self, noise: Tensor, temperature: float) -> Tensor:
        """The sample that standard normal noise is mapped to."""

    def sample_shape(self, context: Any) -> tuple[int, ...]:
        """The shape of one sample."""
        return self.event_shape

    def noise_shape(self, context: Any) -> tuple[int, ...]:
        """The shape of the noise of one sample."""
        return self.sample_shape(context)

    def draw(self, n: int) -> Tensor:
        """`(n, *event)`, for a base that draws its random numbers itself."""
        raise NotImplementedError

    @final
    def rsample(self, n: int, context: Any = None, *, temperature: float = 1.0, noise: Tensor | None = None) -> Tensor:
        """`(n, *event)`, differentiable in the parameters; `temperature` multiplies the standard deviation."""
        expect_count(n, "the number of samples", at_least=0)
        expect(temperature > 0, "a positive temperature", temperature)
        if self.draws_itself:
            expect(noise is None, f"no noise for {self.description()}, which draws its own", "some")
            expect(temperature == 1, f"a temperature of 1 for {self.description()}", temperature)
            return self.draw(n)
        shape = (n, *self.noise_shape(context))
        if noise is None:
            noise = torch.randn(shape, dtype=self._like.dtype, device=self._like.device)  # type: ignore[arg-type]
        expect(tuple(noise.shape) == shape, f"noise of shape {shape}", tuple(noise.shape))
        return self.transform_noise(noise, temperature)


def normal_log_density(standard: Tensor, log_std: Tensor | float = 0.0) -> Tensor:
    """log N(x; mean, std²), entry by entry, at x = mean + std · `standard`."""
    return -0.5 * (standard.square() + LOG_2PI) - log_std


@final
class StandardNormal(Base):
    """Independent standard normals.

    Example:
        >>> StandardNormal((2,)).log_prob(torch.zeros(1, 2))
        tensor([-1.8379])
    """

    def log_prob(self, z: Tensor) -> Tensor:
        return normal_log_density(z).flatten(1).sum(1)

    def transform_noise(self, noise: Tensor, temperature: float) -> Tensor:
        return temperature * noise


@final
class Logistic(Base):
    """Independent logistics around zero, with heavier tails than normals: log p falls linearly.

    This is the distribution of log(F / (1 − F)) for a variable with distribution function F, as in mixture layers.

    Args:
        event_shape: the shape of an event.
        scale: 1 for the standard logistic, `UNIT_VARIANCE` (√3/π) for a variance of one.

    Example:
        >>> Logistic((2,)).log_prob(torch.zeros(1, 2))
        tensor([-2.7726])
    """

    def __init__(self, event_shape: Sequence[int], scale: float = 1.0) -> None:
        super().__init__(event_shape)
        expect(scale > 0, "a positive scale", scale)
        self.scale = scale

    def log_prob(self, z: Tensor) -> Tensor:
        standard = z / self.scale
        return (F.logsigmoid(standard) + F.logsigmoid(-standard) - math.log(self.scale)).flatten(1).sum(1)

    def transform_noise(self, noise: Tensor, temperature: float) -> Tensor:
        exact = noise.to(torch.promote_types(noise.dtype, torch.float32))  # torch has no log_ndtr of halves
        standard = torch.special.log_ndtr(exact) - torch.special.log_ndtr(-exact)
        return temperature * self.scale * standard.to(noise.dtype)


@final
class NodeNormal(Base):
    """Independent standard normals at the nodes of graphs, of any number of nodes; padding has no density.

    Args:
        event_shape: `(N, features)`; N is used for samples if no context gives the number of nodes.

    Example:
        >>> NodeNormal((4, 2)).log_prob(torch.zeros(1, 7, 2)).shape
        torch.Size([1])
    """

    sees_context: ClassVar[bool] = True

    def log_prob(self, z: Tensor, context: Any = None) -> Tensor:
        density, mask = normal_log_density(z), node_mask(context)
        if mask is not None:  # a product would turn padding whose square is infinite into NaN
            density = torch.where(mask.unsqueeze(-1), density, 0)
        return density.flatten(1).sum(1)

    def sample_shape(self, context: Any) -> tuple[int, ...]:
        adjacency, mask = split_graph(context)
        known = adjacency if adjacency is not None else mask
        if known is None:
            return self.event_shape
        expect(isinstance(known, Tensor) and known.ndim >= 2, "a graph as the context, or none", type(known).__name__)
        return known.shape[-1], self.event_shape[-1]

    def transform_noise(self, noise: Tensor, temperature: float) -> Tensor:
        return temperature * noise


@final
class DiagonalGaussian(Base):
    """Independent normals with learned means and standard deviations, one for each entry of the event."""

    def __init__(self, event_shape: Sequence[int]) -> None:
        super().__init__(event_shape)
        self.mean = nn.Parameter(torch.zeros(self.event_shape))
        self.log_std = nn.Parameter(torch.zeros(self.event_shape))

    def log_prob(self, z: Tensor) -> Tensor:
        shape = tuple(z.shape[1:])
        expect(shape == self.event_shape, f"latents of shape (batch, *{self.event_shape})", f"events {shape}")
        standard = (z - self.mean) * (-self.log_std).exp()
        return normal_log_density(standard, self.log_std).flatten(1).sum(1)

    def transform_noise(self, noise: Tensor, temperature: float) -> Tensor:
        return self.mean + temperature * self.log_std.exp() * noise
