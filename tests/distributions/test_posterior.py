"""Posteriors: a Gaussian's KL in closed form, and log q of samples by their inverse, and by dense Jacobians."""

from __future__ import annotations

import pytest
import torch

import expmflow as ef
from expmflow import transforms as T
from expmflow.distributions import AmortizedGaussian, FlowPosterior, StandardNormal
from expmflow.models.posteriors import POSTERIORS, FlowSettings, build_posterior
from transform_registry import draw, randomise

F64 = torch.float64


def test_gaussian_moments_and_kl():
    """The variance is a softplus, and KL(q ‖ N(0, 1)) is torch's."""
    base, params = AmortizedGaussian((3,)), draw("params", 5, 6)
    mean, log_std = base.moments(params)
    torch.testing.assert_close(mean, params[:, :3])
    torch.testing.assert_close((2 * log_std).exp(), torch.nn.functional.softplus(params[:, 3:]))
    q = torch.distributions.Normal(mean, log_std.exp())
    p = torch.distributions.Normal(torch.zeros_like(mean), 1.0)
    torch.testing.assert_close(base.kl(params), torch.distributions.kl_divergence(q, p))
    z, log_q = base.rsample_and_log_prob(params, draw("noise", 5, 3))
    torch.testing.assert_close(log_q, q.log_prob(z).sum(1))
    torch.testing.assert_close(base.log_prob(z, params), log_q)


def test_the_mean_of_log_q_minus_log_p_is_the_kl():
    posterior, n = FlowPosterior(None, AmortizedGaussian((2,))), 100_000
    params = draw("one row", 1, 4)
    noise = torch.randn(n, 2, generator=torch.Generator().manual_seed(0), dtype=F64)
    z, log_q = posterior.rsample_and_log_prob(params.expand(n, -1), noise)
    difference = log_q - StandardNormal((2,)).log_prob(z)
    error = 4 * difference.std() / n**0.5
    assert (difference.mean() - posterior.base.kl(params).sum()).abs() < error


@pytest.mark.parametrize("raw", [-500.0, -20.0, -15.0, 0.0, 50.0])
def test_variances_of_any_size_are_finite(raw):
    params = torch.tensor([[0.3, raw]], requires_grad=True)
    z, log_q = FlowPosterior(None, AmortizedGaussian((1,))).rsample_and_log_prob(params, torch.ones(1, 1))
    (grad,) = torch.autograd.grad(z.sum() + log_q.sum(), params)
    assert torch.isfinite(torch.cat([z, log_q.unsqueeze(1), grad], 1)).all()


def jacobian_log_q(posterior: FlowPosterior, params: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """log N(ε) − log |det dz/dε|, by autograd."""
    rows = []
    for row in range(len(noise)):
        one = params[row : row + 1]

        def sample(e, one=one):
            return posterior.rsample_and_log_prob(one, e.reshape(1, *posterior.event_shape))[0].flatten()

        jacobian = torch.autograd.functional.jacobian(sample, noise[row].flatten())
        rows.append(-torch.linalg.slogdet(jacobian)[1])
    return StandardNormal(posterior.event_shape).log_prob(noise) + torch.stack(rows)


FLOWS = {
    "amortised and shared": (
        lambda: T.Chain(
            [T.Planar(4, amortized=True), T.Inverse(T.InverseAutoregressive(4, 6, context_features=2)), T.Flip()]
        ),
        (4,),
        2,
    ),
    "of its own": (lambda: T.DenseSylvester(3, 6), (3,), 0),
    "images": (lambda: T.ConvSylvester(2, 4, context_channels=3), (2, 2, 2), 3),
}


@pytest.mark.parametrize("amortised", [True, False])
@pytest.mark.parametrize("name", FLOWS)
def test_log_q_is_that_of_the_inverse_and_of_the_jacobian(name, amortised):
    torch.manual_seed(0)
    make, event, context = FLOWS[name]
    base = AmortizedGaussian(event) if amortised else StandardNormal(event)
    posterior = FlowPosterior(make(), base, context_features=context).double().eval()
    params = draw("params", 3, posterior.params_per_sample, *event[1:])
    noise = draw("noise", 3, *event)
    z, log_q = posterior.rsample_and_log_prob(params, noise)
    torch.testing.assert_close(posterior.log_prob(z, params), log_q, rtol=0, atol=1e-10)
    torch.testing.assert_close(jacobian_log_q(posterior, params, noise), log_q, rtol=0, atol=1e-10)
    assert posterior.rsample_and_log_prob(params)[0].shape == (3, *event)


@pytest.mark.parametrize("flows", [1, 2])
@pytest.mark.parametrize("name", [name for name, kind in POSTERIORS.items() if kind.spatial])
def test_latents_stay_where_the_encoder_speaks_of_them(name, flows):
    """What the encoder says at one end of an image moves the latents there, and none at the other end."""
    torch.manual_seed(0)
    width = 40
    posterior = build_posterior(name, (2, 1, width), FlowSettings(flows, hidden=8, context=3)).double().eval()
    randomise(posterior)
    params, noise = draw("params", 1, posterior.params_per_sample, 1, width), draw("noise", 1, 2, 1, width)

    def latents(params):
        return posterior.rsample_and_log_prob(params, noise)[0][0].abs().sum((0, 1))

    by_end = torch.autograd.functional.jacobian(latents, params)[:, 0, :, 0, -1]  # (width, numbers)
    here, there = by_end[-1].abs(), by_end[: width // 2].abs()
    assert (here > 1e-4).all()
    assert there.max() < 1e-6 * here.max()


def test_numbers_per_sample_add_up():
    amortised = T.HouseholderSylvester(4, 2, amortized=True)
    flow = T.Chain([T.Flipped(T.Chain([amortised])), T.DenseSylvester(4, 8, context_features=5)])
    posterior = FlowPosterior(flow, AmortizedGaussian((4,)), context_features=5)
    assert posterior.params_per_sample == 8 + 5 + (16 + 12 + 8)


def test_a_base_of_torch_draws_its_own_numbers():
    base = torch.distributions.Independent(torch.distributions.StudentT(torch.full((3,), 5.0, dtype=F64)), 1)
    posterior = FlowPosterior(T.Planar(3, amortized=True), base).double()
    params = draw("params", 4, posterior.params_per_sample)
    z, log_q = posterior.rsample_and_log_prob(params)
    start, logdet = posterior.transform.inverse(z, params)
    torch.testing.assert_close(log_q, base.log_prob(start) + logdet)
    torch.testing.assert_close(posterior.log_prob(z, params), log_q)
    with pytest.raises(TypeError, match=r"^Expected a base that takes noise; got Independent"):
        posterior.rsample_and_log_prob(params, torch.zeros(4, 3, dtype=F64))
    with pytest.raises(TypeError, match=r"^Expected AmortizedGaussian or a base density, .*; got Linear\.$"):
        FlowPosterior(None, torch.nn.Linear(2, 2))


def test_what_does_not_fit_is_refused():
    posterior = FlowPosterior(T.Planar(2, amortized=True), AmortizedGaussian((2,)))
    with pytest.raises(ValueError, match=r"^Expected parameters of shape \(batch, 9\); got \(3, 8\)\.$"):
        posterior.rsample_and_log_prob(torch.zeros(3, 8))
    with pytest.raises(ValueError, match=r"^Expected noise of shape \(3, 2\); got \(3, 3\)\.$"):
        posterior.rsample_and_log_prob(torch.zeros(3, 9), torch.zeros(3, 3))
    with pytest.raises(ValueError, match="event_shape of at least 1"):
        ef.distributions.AmortizedGaussian((0,))
    for shape in (4, ()):
        for base in (AmortizedGaussian, StandardNormal):
            with pytest.raises(TypeError, match=r"^Expected an event_shape such as \(4,\); got (4|\(\))\.$"):
                base(shape)
    with pytest.raises(TypeError, match=r"^Expected a layer or a list of layers; got Linear\.$"):
        FlowPosterior(torch.nn.Linear(2, 2), AmortizedGaussian((2,)))


def test_a_gaussian_takes_its_own_parameters_alone():
    """The numbers of a flow beside them would be read as more means and variances, and a latent be spread over all."""
    posterior = FlowPosterior(T.Planar(2, amortized=True), AmortizedGaussian((2,)))
    params = torch.zeros(3, posterior.params_per_sample + 1)  # an even number of them
    for read in (posterior.base.kl, posterior.base.moments, lambda p: posterior.base.log_prob(torch.zeros(3, 5), p)):
        with pytest.raises(ValueError, match=r"^Expected parameters of shape \(batch, 4\); got \(3, 10\)\.$"):
            read(params)
    with pytest.raises(ValueError, match=r"^Expected latents of shape \(3, 2\); got \(3, 1\)\.$"):
        FlowPosterior(None, AmortizedGaussian((2,))).log_prob(torch.zeros(3, 1), torch.zeros(3, 4))
