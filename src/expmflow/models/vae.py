"""Variational autoencoders with a flow posterior."""

from __future__ import annotations

from typing import Any, ClassVar, NoReturn, final

import torch
from torch import Tensor, nn

from expmflow._validation import expect, expect_count, expect_type
from expmflow.distributions import Bernoulli, Density, Draw, FlowPosterior, Likelihood, NonFiniteError, TorchBase
from expmflow.distributions.describe import count_parameters
from expmflow.distributions.gaussian import normal_log_density
from expmflow.distributions.protocol import Latents, Noise, given_noise
from expmflow.transforms.base import unread

PATH_STEPS = 9  # from one row to another
KL_SAMPLES, KL_ROWS = 256, 8  # for each row, and rows at a time


@final
class VAE(Density):
    """p(x) = ∫ p(x | z) N(z; 0, I) dz, bounded by log p(x | z) + log N(z) − log q(z | x) at one z ~ q.

    A result that is not finite raises `NonFiniteError` with the name of the part where that began.

    Args:
        encoder: maps data (integers scaled to [−1, 1]) to the parameters of the posterior, `(batch,
            posterior.params_per_sample)`; at each point of the latents, if those are images.
        posterior: q(z | x); its base is `AmortizedGaussian` or another one of this package.
        decoder: maps latents to the parameters of `likelihood`.
        likelihood: p(x | z); `Bernoulli`, for images of zeros and ones, if None.

    Example:
        >>> posterior = ef.distributions.FlowPosterior(T.DenseSylvester(2, 8), ef.distributions.AmortizedGaussian((2,)))
        >>> encoder = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(16, posterior.params_per_sample))
        >>> decoder = torch.nn.Sequential(torch.nn.Linear(2, 16), torch.nn.Unflatten(1, (1, 4, 4)))
        >>> vae = ef.models.VAE(encoder, posterior, decoder)
        >>> vae(torch.randint(2, (5, 1, 4, 4))).shape, vae.sample(3).shape
        (torch.Size([5]), torch.Size([3, 1, 4, 4]))
    """

    is_bound = True
    takes_beta: ClassVar[bool] = True

    def __init__(
        self,
        encoder: nn.Module,
        posterior: FlowPosterior,
        decoder: nn.Module,
        *,
        likelihood: Likelihood | None = None,
    ) -> None:
        super().__init__()
        for name, network in (("encoder", encoder), ("decoder", decoder)):  # the parameters of others are not trained
            expect_type(isinstance(network, nn.Module), f"a torch.nn.Module as the {name}", type(network).__name__)
        expect_type(isinstance(posterior, FlowPosterior), "a FlowPosterior", type(posterior).__name__)
        base = posterior.base
        if isinstance(base, TorchBase):  # a density draws no number that it was not given
            expect_type(False, "a posterior whose base takes noise, as AmortizedGaussian", base.description())
        likelihood = Bernoulli() if likelihood is None else likelihood
        got = f"the class {likelihood.__name__}" if isinstance(likelihood, type) else f"a {type(likelihood).__name__}"
        expect_type(isinstance(likelihood, Likelihood), "a Likelihood of expmflow.distributions, as Bernoulli()", got)
        self.encoder = encoder
        self.posterior = posterior
        self.decoder = decoder
        self.likelihood = likelihood
        self._event_shape = self._find_event_shape()

    @torch.no_grad()
    def _find_event_shape(self) -> tuple[int, ...]:
        """Find the shape of the data from the decoder's output for zero latents."""
        modes = [(part, part.training) for part in self.decoder.modules()]  # some may be in evaluation mode on purpose
        params = _tensor("decoder", self.decoder.eval()(torch.zeros(1, *self.posterior.event_shape).to(self._like)))
        for part, training in modes:
            part.training = training
        expect(params.ndim >= 2, "a decoder to parameters of shape (batch, channels, *n)", tuple(params.shape))
        return (self.likelihood.data_channels(params.shape[1]), *params.shape[2:])

    @property
    def event_shape(self) -> tuple[int, ...]:
        return self._event_shape

    @property
    def levels(self) -> int | None:
        return self.likelihood.levels

    @property
    def draws(self) -> tuple[Draw, ...]:
        return (Draw("normal", self.posterior.event_shape),)

    @property
    def sample_draws(self) -> tuple[Draw, ...]:
        return (*self.draws, *self.likelihood.draws(self.event_shape))

    @property
    def _like(self) -> Tensor:
        """A tensor of the model's dtype and device."""
        return next(self.parameters(), torch.zeros(()))

    def forward(self, x: Tensor, context: Any = None, *, noise: Noise = None, beta: Tensor | None = None) -> Tensor:
        """One sample of the lower bound on log p(x), `(batch,)`; `beta` weighs log q(z | x) − log N(z)."""
        expect(context is None, "no context for a VAE", "one")
        params = self._encoded(x)
        (epsilon,) = given_noise(self.draws, noise, x.shape[0], self._like)
        with unread():  # the result is checked
            z, log_q = self.posterior.rsample_and_log_prob(params, epsilon)
        decoded = self._decoded(z)
        kl = log_q - normal_log_density(z).flatten(1).sum(1)
        result = self.likelihood.log_prob(x, decoded) - (kl if beta is None else beta * kl)
        if not torch.compiler.is_compiling() and not _finite(result):
            _raise_not_finite(x, params, z, log_q, decoded)
        return result

    @torch.no_grad()
    def sample(self, n: int, context: Any = None, *, temperature: float = 1.0, noise: Noise = None) -> Tensor:
        """`(n, *event)`; `temperature` multiplies the standard deviation of the latents."""
        expect(context is None, "no context for a VAE", "one")
        expect_count(n, "the number of samples", at_least=0)
        expect(temperature > 0, "a positive temperature", temperature)
        latents, *rest = given_noise(self.sample_draws, noise, n, self._like)
        return self.likelihood.sample(self._decoded(temperature * latents), tuple(rest))

    @torch.no_grad()
    def encode(self, x: Tensor, *, noise: Tensor | None = None) -> Tensor:
        """A sample of z for each row; zero noise gives the centre of a Gaussian posterior."""
        return self.posterior.rsample_and_log_prob(self._encoded(x), noise)[0]

    @torch.no_grad()
    def decode(self, z: Tensor) -> Tensor:
        """The expectation of x given latents, `(batch, *event)`, as floats; for integers on their own scale."""
        return self.likelihood.mean(self._decoded(z))

    @torch.no_grad()
    def latents(self, x: Tensor) -> Latents:
        """Reconstructions, a path between two rows, and the KL of each latent dimension; deterministic.

        The KL of a dimension is that of a normal with its mean and variance under q(z | x), to N(0, 1).
        """
        expect(len(x) > 1, "at least two rows, for a path between them", len(x))
        params, shape = self._encoded(x), (len(x), *self.posterior.event_shape)
        centres, _ = self.posterior.rsample_and_log_prob(params, params.new_zeros(shape))
        share = torch.linspace(0, 1, PATH_STEPS, dtype=centres.dtype, device=centres.device)
        line = torch.lerp(centres[0], centres[1], share.reshape(-1, *(1,) * (centres.ndim - 1)))
        generator = torch.Generator().manual_seed(0)
        kl = torch.cat([self._kl(part, generator) for part in params.split(KL_ROWS)])
        return Latents(x, self.decode(centres), self.decode(line), kl.mean(0))

    def _kl(self, params: Tensor, generator: torch.Generator) -> Tensor:
        """For each row and each latent dimension, estimated from samples."""
        shape = (len(params) * KL_SAMPLES, *self.posterior.event_shape)
        noise = torch.randn(shape, generator=generator, device="cpu").to(params)
        many, _ = self.posterior.rsample_and_log_prob(params.repeat_interleave(KL_SAMPLES, 0), noise)
        variance, mean = torch.var_mean(many.reshape(len(params), KL_SAMPLES, -1), 1)
        return 0.5 * (mean.square() + variance - 1 - variance.log())

    def description(self) -> str:
        """The parts, and their numbers of parameters."""
        parts = {
            "encoder": self.encoder,
            "posterior": self.posterior,
            "decoder": self.decoder,
            "likelihood": self.likelihood,
        }
        latents = " × ".join(map(str, self.posterior.event_shape))
        layers = ", ".join(type(layer).__name__ for layer in self.posterior.transform) or "no flow"
        lines = [f"{name}: {count_parameters(part):,} parameters" for name, part in parts.items()]
        lines[1] += f"; {latents} latents, {self.posterior.params_per_sample} numbers per sample; {layers}"
        return "\n".join([*lines, f"parameters in all: {count_parameters(self):,}"])

    def _encoded(self, x: Tensor) -> Tensor:
        expect_type(isinstance(x, Tensor), "data to be a tensor", type(x).__name__)
        shape = tuple(x.shape[1:])
        expect(shape == self.event_shape, f"data of shape (batch, *{self.event_shape})", f"events {shape}")
        if x.stride(0) == 0 and len(x) > 1 and not torch.is_grad_enabled():  # one row repeated, for importance weights
            return self._encoded(x[:1]).expand(len(x), *(-1 for _ in range(len(self.posterior.event_shape))))
        dtype = self._like.dtype
        return _tensor("encoder", self.encoder(self.likelihood.scaled(x, dtype))).to(dtype)

    def _decoded(self, z: Tensor) -> Tensor:
        return _tensor("decoder", self.decoder(z)).to(z.dtype)


def _tensor(network: str, output: Any) -> Tensor:
    """The output of a network, for example not a pair of means and variances."""
    expect_type(isinstance(output, Tensor), f"one tensor from the {network}", type(output).__name__)
    return output


def _raise_not_finite(x: Tensor, params: Tensor, z: Tensor, log_q: Tensor, decoded: Tensor) -> NoReturn:
    """Raise with the name of the part where NaN or infinity began."""
    parts = (("the input", (x,)), ("encoder", (params,)), ("posterior", (z, log_q)), ("decoder", (decoded,)))
    where = next((name for name, made in parts if not _finite(*made)), "likelihood")
    raise NonFiniteError(f"Expected a finite result; got NaN or infinity, first in {where}.", where)


def _finite(*tensors: Tensor) -> bool:
    return all(bool(torch.isfinite(tensor.detach()).all()) for tensor in tensors)
