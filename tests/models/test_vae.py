"""VAEs: a linear one whose evidence is known, bounds that grow, and somebody's own networks in ten lines."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import nn

import expmflow as ef
from expmflow import transforms as T
from expmflow.distributions import AmortizedGaussian, FlowPosterior, LogisticMixture, NonFiniteError, Normal
from expmflow.models import VAE
from transform_registry import draw

F64 = torch.float64


def linear_vae(flow: T.Transform | None = None, *, spread: float = 1.0, features: int = 3, latents: int = 2) -> VAE:
    """x = W z + c + σ e: x ~ N(c, W Wᵀ + σ² I), and the posterior of z is normal with one covariance for all x.

    The encoder's posterior has its mean, and the diagonal of its covariance times `spread`.
    """
    decoder = nn.Linear(latents, features, dtype=F64)
    with torch.no_grad():
        q, _ = torch.linalg.qr(draw("columns", features, latents))
        decoder.weight.copy_(q * torch.linspace(0.5, 1.5, latents))  # orthogonal: the posterior is diagonal
        decoder.bias.copy_(draw("bias", features))
    posterior = FlowPosterior(flow, AmortizedGaussian((latents,)))
    encoder = nn.Linear(features, posterior.params_per_sample)
    vae = VAE(encoder.double(), posterior.double(), decoder, likelihood=Normal(features, std=0.6).double())
    with torch.no_grad():
        w, std = decoder.weight, vae.likelihood.log_std[0].exp()
        covariance = torch.linalg.inv(torch.eye(latents, dtype=F64) + w.T @ w / std**2)
        encoder.weight.zero_()
        encoder.bias.zero_()
        encoder.weight[:latents] = covariance @ w.T / std**2
        encoder.bias[:latents] = -encoder.weight[:latents] @ decoder.bias
        encoder.bias[latents : 2 * latents] = (spread * covariance.diagonal()).expm1().log()
    return vae


def evidence(vae: VAE, x: torch.Tensor) -> torch.Tensor:
    w, std = vae.decoder.weight, vae.likelihood.log_std.exp()
    covariance = w @ w.T + torch.diag(std**2)
    return torch.distributions.MultivariateNormal(vae.decoder.bias, covariance).log_prob(x).detach()


def test_with_the_true_posterior_every_weight_is_the_evidence():
    vae, x = linear_vae(), draw("x", 5, 3)
    weights = vae.log_weights(x, samples=7, chunk=3)
    torch.testing.assert_close(weights, evidence(vae, x).expand(7, 5), rtol=0, atol=1e-10)


def test_with_another_posterior_the_evidence_is_estimated():
    """The gap of the bound is KL(q ‖ p(z | x)), in closed form; importance samples close it."""
    torch.manual_seed(0)
    spread = 2.0
    vae, x = linear_vae(spread=spread), draw("x", 4, 3)
    truth, gap = evidence(vae, x), 2 * 0.5 * (spread - 1 - math.log(spread))
    torch.testing.assert_close(truth - vae.elbo(x, samples=20_000), torch.full((4,), gap, dtype=F64), rtol=0.1, atol=0)
    torch.testing.assert_close(vae.importance_weighted(x, samples=20_000, chunk=5000), truth, rtol=0, atol=0.03)


def test_a_flow_that_undoes_itself_changes_nothing():
    torch.manual_seed(0)
    flow = T.DenseSylvester(2, 6)
    vae, x = linear_vae(T.Chain([flow, T.Inverse(flow)])), draw("x", 4, 3)
    torch.testing.assert_close(vae.log_weights(x, samples=3), evidence(vae, x).expand(3, 4), rtol=0, atol=1e-9)


def test_bounds_grow_with_nested_groups_of_the_same_weights():
    """The mean over groups of the logarithm of their mean weight: never less for groups made of whole smaller ones."""
    torch.manual_seed(0)
    vae, x = linear_vae(spread=4.0), draw("x", 3, 3)
    weights = vae.log_weights(x, samples=64)
    bounds = []
    for size in (1, 2, 4, 8, 16, 32, 64):
        groups = weights.reshape(-1, size, 3)
        bounds.append(torch.stack([ef.distributions.importance_weighted(group) for group in groups]).mean(0))
    assert all((later >= sooner).all() for sooner, later in itertools.pairwise(bounds))
    assert (bounds[-1] > bounds[0]).all()


def test_beta_weighs_the_kl_alone():
    torch.manual_seed(0)
    vae, x, noise = linear_vae(spread=2.0), draw("x", 4, 3), draw("noise", 4, 2)
    zero, half, one = (vae(x, noise=noise, beta=torch.tensor(b, dtype=F64)) for b in (0.0, 0.5, 1.0))
    torch.testing.assert_close(one, vae(x, noise=noise))
    torch.testing.assert_close(half, (zero + one) / 2)
    z = vae.encode(x, noise=noise)
    torch.testing.assert_close(zero, vae.likelihood.log_prob(x, vae.decoder(z)))


def test_samples_have_the_covariance_of_the_model():
    torch.manual_seed(0)
    vae = linear_vae()
    x = vae.sample(40_000)
    expected = vae.decoder.weight @ vae.decoder.weight.T + 0.36 * torch.eye(3, dtype=F64)
    torch.testing.assert_close(torch.cov(x.T), expected.detach(), rtol=0, atol=0.06)
    torch.testing.assert_close(x.mean(0), vae.decoder.bias.detach(), rtol=0, atol=0.03)


def test_what_latents_make_of_rows():
    """Of a Gaussian posterior the KL of each latent is known; the path goes from one row's centre to the other's."""
    torch.manual_seed(0)
    vae, x = linear_vae(), draw("x", 20, 3)
    found = vae.latents(x)
    expected = vae.posterior.base.kl(vae.encoder(x)).mean(0)
    torch.testing.assert_close(found.kl, expected.detach(), rtol=0.05, atol=0.02)
    centres = vae.encoder(x)[:, :2].detach()
    torch.testing.assert_close(found.reconstructions, vae.decode(centres))
    torch.testing.assert_close(found.path[[0, -1]], vae.decode(centres[:2]))
    torch.testing.assert_close(found.path[4], vae.decode(centres[:2]).mean(0))


def test_the_same_rows_have_the_same_latents():
    vae, x = linear_vae(T.DenseSylvester(2, 6)), draw("x", 20, 3)
    torch.manual_seed(1)
    first = vae.latents(x)
    assert torch.equal(vae.latents(x).kl, first.kl)
    assert vae.latents(x[1:]).kl.ne(first.kl).all()


def test_copies_of_one_row_are_encoded_once():
    vae, x, noise = own_networks(), torch.randint(2, (1, 1, 4, 4)), torch.randn(5, 4)
    seen: list[int] = []
    vae.encoder.register_forward_hook(lambda module, received, out: seen.append(len(out)))
    with torch.no_grad():
        copies = vae(x.expand(5, 1, 4, 4), noise=noise)
        each = vae(x.repeat(5, 1, 1, 1), noise=noise)
    assert seen == [1, 5]
    torch.testing.assert_close(copies, each)


def own_networks() -> VAE:
    flow = T.Chain([T.HouseholderSylvester(4, 2, amortized=True) for _ in range(2)])
    posterior = ef.distributions.FlowPosterior(flow, ef.distributions.AmortizedGaussian((4,)))
    encoder = nn.Sequential(nn.Flatten(), nn.Linear(16, 20), nn.ELU(), nn.Linear(20, posterior.params_per_sample))
    decoder = nn.Sequential(nn.Linear(4, 20), nn.ELU(), nn.Linear(20, 16), nn.Unflatten(1, (1, 4, 4)))
    return ef.models.VAE(encoder, posterior, decoder)


def test_somebodys_own_networks_learn():
    """Stripes, of which there are two kinds: less than a bit for each, where a density of pixels would need sixteen."""
    torch.manual_seed(0)
    vae = own_networks()
    stripes = torch.zeros(2, 1, 4, 4, dtype=torch.int64)
    stripes[0, :, ::2], stripes[1, :, :, ::2] = 1, 1
    optimizer = torch.optim.Adam(vae.parameters(), lr=5e-3)
    for step in range(300):
        x = stripes[torch.randint(2, (32,))]
        loss = -vae(x, beta=torch.tensor(min(1.0, step / 100))).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    nats = -vae.importance_weighted(stripes, samples=50)
    assert (nats < 2 * math.log(2)).all()
    torch.testing.assert_close(vae.decode(vae.encode(stripes)).round(), stripes.float())


@pytest.mark.parametrize(
    ("part", "parameter"), [("encoder", "encoder.3.bias"), ("decoder", "decoder.2.bias"), ("posterior", None)]
)
def test_numbers_that_are_not_finite_are_traced_to_their_part(part, parameter):
    vae, x = own_networks(), torch.zeros(2, 1, 4, 4, dtype=torch.int64)
    noise = torch.zeros(2, 4)
    with torch.no_grad():
        if parameter is None:
            noise[1, 2] = torch.inf
        else:
            vae.get_parameter(parameter)[3] = torch.nan
    with pytest.raises(NonFiniteError, match=rf"^Expected a finite result; got NaN or infinity, first in {part}\.$"):
        vae(x, noise=noise)


def test_the_shape_of_the_data_follows_from_the_decoder():
    vae = own_networks()
    assert vae.event_shape == (1, 4, 4)
    assert vae.levels == 2
    assert [draw.shape for draw in vae.draws] == [(4,)]
    assert [draw.shape for draw in vae.sample_draws] == [(4,), (1, 4, 4)]
    mixture = LogisticMixture(3, components=2)
    colour = VAE(
        nn.Conv2d(3, 4, 1),
        FlowPosterior(None, AmortizedGaussian((2, 4, 4))),
        nn.Conv2d(2, mixture.param_channels(3), 1),
        likelihood=mixture,
    )
    assert colour.event_shape == (3, 4, 4)
    assert colour.levels == 256
    x = colour.sample(2)
    assert x.shape == (2, 3, 4, 4)
    assert colour(x).shape == (2,)
    assert "16 numbers" not in colour.description()
    assert "parameters in all" in colour.description()


def test_a_decoder_is_left_as_it_was():
    """To learn the shape of the data it is asked once, as in evaluation; parts kept in that mode stay in it."""
    decoder = nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.Dropout(), nn.Unflatten(1, (1, 4, 4)))
    decoder[1].eval()
    VAE(nn.Linear(16, 8), FlowPosterior(None, AmortizedGaussian((4,))), decoder)
    assert [part.training for part in decoder] == [True, False, True, True]
    assert decoder[1].num_batches_tracked == 0


def test_what_does_not_fit_is_refused():
    vae = own_networks()
    with pytest.raises(ValueError, match=r"^Expected data of shape \(batch, \*\(1, 4, 4\)\); got events \(1, 3, 4\)"):
        vae(torch.zeros(2, 1, 3, 4, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"^Expected levels from 0 to 1; got 0 to 2\.$"):
        vae(torch.tensor([0, 2] * 8).reshape(1, 1, 4, 4))
    with pytest.raises(ValueError, match=r"^Expected no context for a VAE; got one\.$"):
        vae.sample(2, context=torch.zeros(2))
    with pytest.raises(TypeError, match=r"^Expected a FlowPosterior; got Planar\.$"):
        VAE(vae.encoder, T.Planar(4, amortized=True), vae.decoder)
    heavy = torch.distributions.Independent(torch.distributions.StudentT(torch.full((4,), 3.0)), 1)
    with pytest.raises(TypeError, match=r"^Expected a posterior whose base takes noise, .*; got Independent\(StudentT"):
        VAE(vae.encoder, FlowPosterior(T.Planar(4, amortized=True), heavy), vae.decoder)
    for likelihood, got in ((ef.distributions.Bernoulli, "the class Bernoulli"), ("bernoulli", "a str")):
        with pytest.raises(TypeError, match=rf"^Expected a Likelihood .*, as Bernoulli\(\); got {got}\.$"):
            VAE(vae.encoder, vae.posterior, vae.decoder, likelihood=likelihood)
    with pytest.raises(ValueError, match=r"^Expected at least two rows, .*; got 1\.$"):
        vae.latents(torch.zeros(1, 1, 4, 4, dtype=torch.int64))
    posterior = FlowPosterior(None, AmortizedGaussian((4,)))
    wrong = VAE(nn.Sequential(nn.Flatten(), nn.Linear(16, 7)), posterior, vae.decoder)
    with pytest.raises(ValueError, match=r"^Expected parameters of shape \(batch, 8\); got \(2, 7\)\.$"):
        wrong(torch.zeros(2, 1, 4, 4, dtype=torch.int64))


def test_networks_are_modules_that_return_one_tensor():
    """Of a function around a network nothing would be trained; and means and variances are one output, not two."""
    vae, x = own_networks(), torch.zeros(2, 1, 4, 4, dtype=torch.int64)
    with pytest.raises(TypeError, match=r"^Expected a torch\.nn\.Module as the encoder; got function\.$"):
        VAE(lambda x: vae.encoder(x), vae.posterior, vae.decoder)
    with pytest.raises(TypeError, match=r"^Expected a torch\.nn\.Module as the decoder; got function\.$"):
        VAE(vae.encoder, vae.posterior, lambda z: vae.decoder(z))
    pair = nn.LSTM(4, 16)
    with pytest.raises(TypeError, match=r"^Expected one tensor from the decoder; got tuple\.$"):
        VAE(vae.encoder, vae.posterior, pair)
    with pytest.raises(TypeError, match=r"^Expected one tensor from the encoder; got tuple\.$"):
        VAE(nn.Sequential(nn.Flatten(), nn.LSTM(16, 8)), vae.posterior, vae.decoder)(x)


def test_what_is_no_data_is_refused():
    vae, x = linear_vae(), draw("x", 4, 3)
    with pytest.raises(TypeError, match=r"^Expected data to be a tensor; got ndarray\.$"):
        vae(x.numpy())
    with pytest.raises(TypeError, match=r"^Expected data of dtype torch\.float64, as the model; got torch\.float32\.$"):
        vae(x.float())
    with pytest.raises(ValueError, match=r"^Expected data of shape \(batch, \*\(3,\)\); got events \(\)\.$"):
        vae(x[0, 0])
    with pytest.raises(ValueError, match=r"^Expected the number of samples of at least 0; got -1\.$"):
        vae.sample(-1)
