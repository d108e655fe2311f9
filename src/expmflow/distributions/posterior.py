"""Posteriors of latent variables: an amortised Gaussian, transformed by a flow."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributions import Distribution

from expmflow._validation import expect, expect_type
from expmflow.distributions.foreign import TorchBase
from expmflow.distributions.gaussian import Base, checked_shape, normal_log_density
from expmflow.nn.precision import raised
from expmflow.transforms.amortized import Amortized
from expmflow.transforms.base import Chain, Transform

_SMALL = -15.0  # softplus equals exp below this, to the last digit of float32


@final
class AmortizedGaussian(nn.Module):
    """Independent normals whose means and variances are given for each sample; variances by softplus.

    Args:
        event_shape: that of the latents: `(d,)`, or `(channels, h, w)` with means and variances at each point.

    Example:
        >>> base = AmortizedGaussian((4,))
        >>> base.params_per_sample
        8
    """

    def __init__(self, event_shape: Sequence[int]) -> None:
        super().__init__()
        self.event_shape = checked_shape(event_shape)

    @property
    def params_per_sample(self) -> int:
        """Numbers for each sample, or at each point: a mean and a variance of each feature."""
        return 2 * self.event_shape[0]

    def rsample_and_log_prob(self, params: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """The sample that standard normal noise is mapped to, and its log-density."""
        mean, log_std = self.moments(params)
        return mean + log_std.exp() * noise, normal_log_density(noise, log_std).flatten(1).sum(1)

    def log_prob(self, z: Tensor, params: Tensor) -> Tensor:
        """`(batch,)`."""
        mean, log_std = self.moments(params)
        expect(z.shape == mean.shape, f"latents of shape {tuple(mean.shape)}", tuple(z.shape))
        standard = (z - mean) * (-log_std).exp()
        return normal_log_density(standard, log_std).flatten(1).sum(1)

    def moments(self, params: Tensor) -> tuple[Tensor, Tensor]:
        """Means and log standard deviations."""
        _check_params(params, self.params_per_sample, self.event_shape)
        mean, raw = params.chunk(2, dim=1)
        log_variance = torch.where(raw < _SMALL, raw, F.softplus(raw.clamp_min(_SMALL)).log())
        return mean, 0.5 * log_variance

    def kl(self, params: Tensor) -> Tensor:
        """KL(q ‖ N(0, 1)) of each latent, `(batch, *event)`."""
        mean, log_std = self.moments(params)
        return 0.5 * (mean.square() + (2 * log_std).exp() - 1) - log_std


@final
class FlowPosterior(nn.Module):
    """q(z | x): a base density, transformed by a flow from noise to latents.

    Samples come with their log-density in one pass of the flow's `forward`, so that should be the closed-form
    direction; wrap `InverseAutoregressive` in `T.Inverse`. q depends on x through one tensor `(batch,
    params_per_sample)`, the output of an encoder's linear head: first the parameters of the base, then
    `context_features` for layers that take a context, then the parameters of each amortised layer. For latents that are
    images it is `(batch, params_per_sample, h, w)`.

    Args:
        transform: noise to latents; layers with `amortized=True` take their parameters from the encoder.
        base: `AmortizedGaussian`, or a base density with its own parameters: `StandardNormal`, or any
            `torch.distributions` object with an empty batch shape, which draws its random numbers itself and takes no
            noise.
        context_features: the size of the context that layers of the flow share; 0 for none.

    Example:
        >>> flow = T.Chain([T.HouseholderSylvester(4, 2, amortized=True) for _ in range(3)])
        >>> posterior = FlowPosterior(flow, AmortizedGaussian((4,)))
        >>> encoder = torch.nn.Linear(10, posterior.params_per_sample)
        >>> z, log_q = posterior.rsample_and_log_prob(encoder(torch.randn(5, 10)))
    """

    def __init__(
        self,
        transform: Transform | None,
        base: AmortizedGaussian | Base | Distribution,
        *,
        context_features: int = 0,
    ) -> None:
        super().__init__()
        base = TorchBase(base) if isinstance(base, Distribution) else base
        known = isinstance(base, AmortizedGaussian | Base)
        expect_type(known, "AmortizedGaussian or a base density, ours or of torch.distributions", type(base).__name__)
        self.transform = Amortized(Chain([]) if transform is None else transform, context_features=context_features)
        self.base = base

    @property
    def event_shape(self) -> tuple[int, ...]:
        """The shape of the latents of one sample, and of their noise."""
        return self.base.event_shape

    @property
    def params_per_sample(self) -> int:
        """How many numbers the encoder gives for each sample, or at each point of an image."""
        return self._of_base + self.transform.params_per_sample

    @property
    def _of_base(self) -> int:
        return self.base.params_per_sample if isinstance(self.base, AmortizedGaussian) else 0

    def rsample_and_log_prob(self, params: Tensor, noise: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """A sample z for each row, `(batch, *event)`, and log q(z | x), `(batch,)`; both differentiable.

        Args:
            params: the encoder's output.
            noise: standard normal, `(batch, *event)`; drawn if None.
        """
        own, rest = self._split(params)
        start, log_q = self._start(own, noise)
        z, logdet = self.transform(start, rest)
        return z, log_q - logdet

    def log_prob(self, z: Tensor, params: Tensor) -> Tensor:
        """log q(z | x) of given latents, through the inverse of the flow."""
        own, rest = self._split(params)
        start, logdet = self.transform.inverse(z, rest)
        log_q = (
            self.base.log_prob(start, own) if isinstance(self.base, AmortizedGaussian) else self.base.log_prob(start)
        )
        return log_q + logdet

    def _start(self, own: Tensor, noise: Tensor | None) -> tuple[Tensor, Tensor]:
        """A sample of the base for each row, and its log-density."""
        if noise is None and isinstance(self.base, TorchBase):
            start = self.base.draw(own.shape[0])
            return start, self.base.log_prob(start)
        shape = (own.shape[0], *self.event_shape)
        if noise is None:
            noise = torch.randn(shape, dtype=own.dtype, device=own.device)
        expect(tuple(noise.shape) == shape, f"noise of shape {shape}", tuple(noise.shape))
        if isinstance(self.base, AmortizedGaussian):
            return self.base.rsample_and_log_prob(own, noise)
        start = self.base.transform_noise(noise, 1.0)
        return start, self.base.log_prob(start)

    def _split(self, params: Tensor) -> tuple[Tensor, Tensor | None]:
        """The parameters of the base, and those of the flow."""
        if torch.is_autocast_enabled(params.device.type):  # log-densities need all digits
            params = raised(params, torch.float32)
        _check_params(params, self.params_per_sample, self.event_shape)
        own, rest = params.split([self._of_base, self.transform.params_per_sample], dim=1)
        return own, rest if self.transform.params_per_sample else None


def _check_params(params: Tensor, count: int, event_shape: tuple[int, ...]) -> None:
    """Raise unless there are `count` numbers for each sample, or at each point of an image."""
    shape = (count, *event_shape[1:])
    fits = params.ndim > 0 and tuple(params.shape[1:]) == shape
    expect(fits, f"parameters of shape (batch, {', '.join(map(str, shape))})", tuple(params.shape))
