"""The paper's VAEs: each posterior by name, its log q by its inverse and by the dense Jacobian, one head for all."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from expmflow.distributions import Bernoulli, LogisticMixture, StandardNormal
from expmflow.models import VAE, image_vae, vector_vae
from expmflow.models.posteriors import POSTERIORS, FlowSettings, build_posterior
from transform_registry import draw, randomise, settle

F64 = torch.float64
SMALL = FlowSettings(flows=3, hidden=6, context=2, vectors=2, reflections=2)
TINY = {
    "hidden": 6,
    "context": 2,
    "vectors": 2,
    "reflections": 2,
    "channels": 4,
    "growth": 4,
    "depth": 1,
    "features": 8,
}


def ready(name: str):
    """A posterior with trained-like weights, in float64."""
    torch.manual_seed(0)
    shape = (2, 2, 2) if POSTERIORS[name].spatial else (4,)
    posterior = build_posterior(name, shape, SMALL).double()
    randomise(posterior)
    params = draw(f"{name} params", 3, posterior.params_per_sample, *shape[1:])
    noise = draw(f"{name} noise", 3, *shape)
    own = posterior.base.params_per_sample
    rest = params[:, own:] if posterior.transform.params_per_sample else None
    settle(posterior.transform, noise, rest)
    return posterior.eval(), params, noise


@pytest.mark.parametrize("name", POSTERIORS)
def test_log_q_by_the_inverse_and_by_the_jacobian(name):
    posterior, params, noise = ready(name)
    z, log_q = posterior.rsample_and_log_prob(params, noise)
    torch.testing.assert_close(posterior.log_prob(z, params), log_q, rtol=0, atol=1e-9)
    for row in range(len(noise)):
        one = params[row : row + 1]
        jacobian = torch.autograd.functional.jacobian(
            lambda e, one=one: posterior.rsample_and_log_prob(one, e.reshape(1, *posterior.event_shape))[0].flatten(),
            noise[row].flatten(),
        )
        expected = (
            StandardNormal(posterior.event_shape).log_prob(noise[row : row + 1]) - torch.linalg.slogdet(jacobian)[1]
        )
        torch.testing.assert_close(log_q[row : row + 1], expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize("name", POSTERIORS)
def test_samples_are_drawn_in_closed_form(name):
    """No layer iterates on the way from noise to latents: training does nothing else."""
    posterior, params, noise = ready(name)
    posterior.rsample_and_log_prob(params, noise)
    for layer in posterior.transform.modules():
        if hasattr(layer, "last_iterations"):
            layer.last_iterations = -1
    posterior.rsample_and_log_prob(params, noise)
    assert all(getattr(layer, "last_iterations", -1) == -1 for layer in posterior.transform.modules())


@pytest.mark.parametrize("name", POSTERIORS)
def test_image_vae(name):
    """Bounds of rows on their own, a gradient for every parameter, samples that are images."""
    torch.manual_seed(0)
    vae = image_vae((1, 8, 8), posterior=name, latents=4, flows=2, grey_levels=2, **TINY).double()
    randomise(vae.posterior)
    x = torch.randint(2, (3, 1, 8, 8), generator=torch.Generator().manual_seed(1))
    noise = draw("noise", 3, *vae.posterior.event_shape)
    bound = vae(x, noise=noise)
    bound.sum().backward()
    idle = [key for key, p in vae.named_parameters() if p.grad is None or not torch.isfinite(p.grad).all()]
    assert not idle
    vae.eval()
    with torch.no_grad():
        together = vae(x, noise=noise)
        alone = torch.cat([vae(x[k : k + 1], noise=noise[k : k + 1]) for k in range(3)])
    torch.testing.assert_close(together, alone, rtol=0, atol=1e-9)
    assert vae.sample(2).shape == (2, 1, 8, 8)
    assert vae.decode(vae.encode(x)).shape == x.shape


@pytest.mark.parametrize("name", POSTERIORS)
def test_one_linear_map_is_all_that_the_encoder_has_for_the_posterior(name):
    vae = image_vae((1, 8, 8), posterior=name, latents=4, flows=2, grey_levels=2, **TINY)
    head = list(vae.encoder)[-1]
    assert isinstance(head, nn.Conv2d if POSTERIORS[name].spatial else nn.Linear)
    assert head.weight.shape[0] == vae.posterior.params_per_sample
    amortised = {"planar", "orthogonal", "householder", "triangular", "gaussian", "conv-gaussian"}
    assert (name in amortised) == (not list(vae.posterior.parameters()))


@pytest.mark.parametrize("depth", [1, 4])
@pytest.mark.parametrize("name", ["gaussian", "conv-gaussian"])
def test_signals_pass_networks_that_were_never_trained(name, depth):
    """What differs between rows keeps a tenth of its size at least; by torch's own start a thousandth is left."""
    torch.manual_seed(0)
    sizes = {"channels": 8, "growth": 8, "depth": depth, "features": 32}
    vae = image_vae((1, 16, 16), posterior=name, latents=4, grey_levels=2, **sizes)
    x = torch.randint(2, (50, 1, 16, 16), generator=torch.Generator().manual_seed(1)) * 2.0 - 1
    z = torch.randn(50, *vae.posterior.event_shape)
    for network, rows in ((vae.encoder, x), (vae.decoder, z)):
        share = network[:-1](rows).std(0).mean() / rows.std(0).mean()
        assert 0.1 < share < 3


def test_posteriors_start_near_one_for_all_images():
    torch.manual_seed(0)
    for name in POSTERIORS:
        vae = image_vae((1, 8, 8), posterior=name, latents=4, flows=4, grey_levels=2, **TINY)
        x = torch.randint(2, (50, 1, 8, 8), generator=torch.Generator().manual_seed(1))
        assert float(vae.encode(x, noise=torch.zeros(50, *vae.posterior.event_shape)).std(0).max()) < 0.2


def test_likelihoods_follow_the_grey_levels():
    def made(levels: int, **more) -> VAE:
        return image_vae((3, 8, 8), posterior="gaussian", latents=4, grey_levels=levels, **TINY, **more)

    assert isinstance(made(2).likelihood, Bernoulli)
    assert isinstance(made(256).likelihood, LogisticMixture)
    assert made(16, components=3).likelihood.components == 3
    assert made(2, likelihood="logistic-mixture").likelihood.levels == 2
    x = torch.randint(256, (2, 3, 8, 8))
    assert torch.isfinite(made(256)(x)).all()


@pytest.mark.parametrize("name", [name for name, kind in POSTERIORS.items() if not kind.spatial])
def test_vector_vae(name):
    torch.manual_seed(0)
    vae = vector_vae(3, posterior=name, latents=4, flows=2, hidden=6, context=2, reflections=2, vectors=2)
    x = torch.randn(5, 3)
    assert vae(x).shape == (5,)
    assert vae.sample(2).shape == (2, 3)
    assert vae.levels is None


def test_the_originals_heads():
    """Of 256 features for 64 latents: the numbers of the original's heads, the Gaussian's and the flow's together."""
    for name, flow in (("gaussian", 0), ("planar", 132_612), ("householder", 4_934_400), ("triangular", 4_408_064)):
        posterior = build_posterior(name, (64,), FlowSettings())
        head = nn.Linear(256, posterior.params_per_sample, device="meta")
        assert sum(p.numel() for p in head.parameters()) == 32_896 + flow


REFUSED = {
    "size": (lambda: image_vae((1, 6, 8)), "images whose height and width 4 divides"),
    "posterior": (lambda: image_vae((1, 8, 8), posterior="normal"), "posterior to be one of gaussian, planar"),
    "vectors": (lambda: vector_vae(3, posterior="conv-iaf"), "posterior to be one of gaussian"),
    "bernoulli": (lambda: image_vae((1, 8, 8), likelihood="bernoulli"), "two grey levels for bernoulli"),
    "likelihood": (lambda: image_vae((1, 8, 8), likelihood="normal"), "likelihood to be one of auto, bernoulli"),
    "latents": (lambda: image_vae((1, 8, 8), latents=0), "latents of at least 1"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_wrong_arguments(name):
    make, message = REFUSED[name]
    with pytest.raises(ValueError, match=f"^Expected .*{message}.*; got "):
        make()
