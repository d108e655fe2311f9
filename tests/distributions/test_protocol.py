"""The protocol of whatever is trained: asked of flows, of dequantized flows, and of a VAE whose likelihood is known."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import expmflow as ef
from expmflow import transforms as T
from expmflow.data import Dataset
from expmflow.distributions.protocol import Density, Draw, given_noise
from expmflow.training.config import ConfigError, parse_config
from expmflow.training.loop import train
from expmflow.training.randomness import Randomness
from expmflow.training.run import RunFolder

F64 = torch.float64
D = ef.distributions


class GaussianVAE(Density):
    """u ~ N(0, 1), x | u ~ N(w u, I): p(x) = N(0, I + wwᵀ), and the posterior of u is normal, too.

    q(u | x) has the posterior's mean, and its variance times `spread`: with 1, every weight is p(x) itself.
    """

    is_bound = True
    takes_beta = True

    def __init__(self, features: int, spread: float = 1.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, features, dtype=F64))
        self.spread = spread
        self.betas: list[float] = []

    @property
    def event_shape(self) -> tuple[int, ...]:
        return tuple(self.weight.shape)

    @property
    def draws(self) -> tuple[Draw, ...]:
        return (Draw("normal", ()),)

    @property
    def sample_draws(self) -> tuple[Draw, ...]:
        return (Draw("normal", ()), Draw("normal", self.event_shape))

    def forward(self, x, context=None, *, noise=None, beta: Tensor | None = None) -> Tensor:
        (epsilon,) = given_noise(self.draws, noise, len(x), x)
        variance = 1 / (1 + self.weight.square().sum())
        posterior = torch.distributions.Normal(variance * (x @ self.weight), (self.spread * variance).sqrt())
        u = posterior.mean + posterior.stddev * epsilon
        log_likelihood = torch.distributions.Normal(u.unsqueeze(1) * self.weight, 1.0).log_prob(x).sum(1)
        kl = posterior.log_prob(u) - torch.distributions.Normal(torch.zeros_like(u), 1.0).log_prob(u)
        if beta is not None:
            self.betas.append(float(beta))
        return log_likelihood - (1.0 if beta is None else beta) * kl

    def sample(self, n, context=None, *, temperature=1.0, noise=None) -> Tensor:
        u, e = given_noise(self.sample_draws, noise, n, self.weight)
        return (u.unsqueeze(1) * self.weight + temperature * e).detach()

    def description(self) -> str:
        return "a VAE of one latent number"

    def log_prob(self, x: Tensor) -> Tensor:
        covariance = torch.eye(len(self.weight), dtype=F64) + self.weight.outer(self.weight)
        return torch.distributions.MultivariateNormal(torch.zeros_like(self.weight), covariance).log_prob(x)


def flow() -> D.Flow:
    torch.manual_seed(0)
    return D.Flow(T.Chain([T.LinearExp(3), T.ActNorm(3)]), D.StandardNormal((3,))).double().eval()


def images() -> D.DequantizedFlow:
    inner = D.Flow(T.ActNorm(1), D.DiagonalGaussian((1, 2, 2)))
    return D.DequantizedFlow(inner, D.UniformDequantization(), levels=4).double().eval()


class Random(T.Transform):
    """A log-determinant with an error."""

    exact_logdet = False

    def _forward(self, x, context):
        return x, torch.randn(len(x), dtype=x.dtype)

    _inverse = _forward


DENSITIES = {"flow": flow, "images": images, "vae": lambda: GaussianVAE(3)}


def rows_of(density: Density, n: int) -> Tensor:
    if density.levels is not None:
        return torch.randint(density.levels, (n, *density.event_shape), generator=torch.Generator().manual_seed(1))
    return torch.randn(n, *density.event_shape, generator=torch.Generator().manual_seed(1), dtype=F64)


@pytest.mark.parametrize("name", DENSITIES)
class TestEveryDensity:
    def test_rows_are_independent(self, name):
        """Each with its own noise: neither the others nor their order matter."""
        density = DENSITIES[name]()
        x = rows_of(density, 5)
        noise = Randomness(0).draws(density.draws, 5, "noise", 0)
        together = density(x, noise=noise)
        assert together.shape == (5,)
        for k in range(5):
            alone = density(x[k : k + 1], noise=[part[k : k + 1] for part in noise])
            torch.testing.assert_close(alone, together[k : k + 1])

    def test_noise_that_is_given_is_all_the_noise(self, name):
        density = DENSITIES[name]()
        x, noise = rows_of(density, 4), Randomness(0).draws(density.draws, 4, "noise", 0)
        assert torch.equal(density(x, noise=noise), density(x, noise=noise))
        drawn = Randomness(0).draws(density.sample_draws, 4, "sample", 0)
        assert torch.equal(density.sample(4, noise=drawn), density.sample(4, noise=drawn))

    def test_samples_are_events(self, name):
        density = DENSITIES[name]()
        samples = density.sample(6, temperature=0.7)
        assert samples.shape == (6, *density.event_shape)
        assert samples.is_floating_point() == (density.levels is None)
        assert density(samples).shape == (6,)

    def test_exact_is_without_noise(self, name):
        density = DENSITIES[name]()
        assert density.exact == (density.draws == ()) == (not density.is_bound)
        assert isinstance(density.description(), str)

    def test_a_round_trip_comes_back(self, name):
        density = DENSITIES[name]()
        error = density.round_trip_error(rows_of(density, 3))
        if name == "vae":
            assert error is None
        else:
            assert error.shape == (3,)
            assert float(error.max()) < 1e-9

    def test_it_is_trained(self, name, tmp_path: Path):
        """By the loop as it is, which knows no more than the protocol; and a second time, to the same bits."""
        density = DENSITIES[name]().train()
        x = rows_of(density, 40)
        settings = parse_config(
            {
                "optim": {"kl_warmup": 4 if density.takes_beta else 0},
                "train": {"steps": 3, "batch_size": 8, "log_every": 1, "validate_every": 3, "precision": "float64"},
            }
        )
        kind = "vectors" if density.levels is None else "images"
        data = Dataset(x[:24], x[24:32], x[32:], kind=kind)
        trained = train(settings, tmp_path / "first", model=density, data=data)
        again = train(settings, tmp_path / "second", model=DENSITIES[name]().train(), data=data)
        for key, value in trained.state_dict().items():
            assert torch.equal(value, again.state_dict()[key]), key
        assert len([m for m in RunFolder(tmp_path / "first").read_metrics() if "nll" in m]) == 3
        if density.takes_beta:
            assert density.betas == [0.0, 0.25, 0.5]


class TestBound:
    def test_with_the_posterior_every_weight_is_the_likelihood(self):
        vae, x = GaussianVAE(3), torch.randn(4, 3, dtype=F64)
        weights = vae.log_weights(x, samples=7, chunk=3)
        torch.testing.assert_close(weights, vae.log_prob(x).detach().expand(7, 4))

    def test_with_another_the_gap_is_a_kl_and_weights_close_it(self):
        """KL(N(m, s v) ‖ N(m, v)) = (s − 1 − log s) / 2."""
        torch.manual_seed(0)
        vae, x = GaussianVAE(2, spread=2.0), torch.randn(3, 2, dtype=F64)
        truth = vae.log_prob(x).detach()
        gap = truth - vae.elbo(x, samples=20_000)
        torch.testing.assert_close(gap, torch.full((3,), 0.5 * (1 - math.log(2)), dtype=F64), rtol=0.1, atol=0)
        torch.testing.assert_close(vae.importance_weighted(x, samples=20_000), truth, rtol=0, atol=0.02)

    def test_weights_need_a_bound_and_exact_layers(self):
        x = torch.zeros(1, 3, dtype=F64)
        with pytest.raises(ValueError, match="Expected a density known by a bound for importance samples; got one"):
            flow().importance_weighted(x, samples=2)
        random = D.DequantizedFlow(D.Flow(Random(), D.StandardNormal((2,))), D.UniformDequantization())
        assert random.random_layers == ("flow.transform",)
        with pytest.raises(ValueError, match=r"Expected exact log-determinants .*; got random estimates in flow"):
            random.check_weighable(2)
        with pytest.raises(ValueError, match="Expected importance samples of at least 1; got 0"):
            GaussianVAE(2).check_weighable(0)

    def test_a_random_log_determinant_is_not_exact(self):
        assert not D.Flow(Random(), D.StandardNormal((2,))).exact
        assert not D.Flow(Random(), D.StandardNormal((2,))).is_bound


def test_noise_of_another_shape_is_refused():
    vae, x = GaussianVAE(2), torch.zeros(3, 2, dtype=F64)
    with pytest.raises(ValueError, match=r"Expected noise of shape \(3,\); got \(2,\)"):
        vae(x, noise=torch.zeros(2, dtype=F64))
    with pytest.raises(ValueError, match="Expected 2 tensors of noise; got 1"):
        vae.sample(3, noise=torch.zeros(3, dtype=F64))
    with pytest.raises(ValueError, match="Expected no noise for the likelihood of a flow; got some"):
        flow()(torch.zeros(2, 3, dtype=F64), noise=torch.zeros(2, 3))


def test_a_density_without_a_kl_part_has_no_warm_up(tmp_path: Path):
    settings = parse_config({"optim": {"kl_warmup": 4}, "train": {"batch_size": 2}})
    x = torch.zeros(4, 3)
    with pytest.raises(ConfigError, match=r"Expected optim\.kl_warmup=0 for Flow, which has no KL part; got 4\."):
        train(settings, tmp_path, model=flow(), data=Dataset(x, x, x))


def test_draws_of_processes_are_parts_of_a_whole():
    """The first draw of a density is the only one there was before there were several."""
    draws = (Draw("normal", (2,)), Draw("uniform", (3, 1)))
    first, second = Randomness(3).draws(draws, 4, "noise", 5)
    assert torch.equal(first, Randomness(3).noise("normal", (4, 2), "noise", 5))
    assert second.shape == (4, 3, 1)
    assert float(second.min()) >= 0
    assert float(second.max()) < 1
