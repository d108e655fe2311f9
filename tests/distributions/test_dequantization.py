"""Integers under a continuous density: bounds below the true probabilities, and how close they come."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import expmflow as ef
from expmflow import distributions as D
from expmflow import nn
from expmflow import transforms as T
from transform_registry import draw, randomise

F64 = torch.float64
LEVELS = 8


class Uniform(D.Base):
    """The uniform density on [−½, ½): every integer image has the probability levels^−d."""

    def log_prob(self, z: Tensor) -> Tensor:
        inside = ((z >= -0.5) & (z < 0.5)).flatten(1).all(1)
        return torch.where(inside, 0.0, -1e6).to(z)

    def transform_noise(self, noise: Tensor, temperature: float) -> Tensor:
        return torch.special.ndtr(noise) - 0.5


def gaussian_flow(scale: float) -> ef.Flow:
    """y ~ N(0, scale²) in each of two entries."""
    flow = ef.Flow(T.ActNorm(2), D.StandardNormal((2,))).double().eval()
    with torch.no_grad():
        flow.transform.log_scale.fill_(-math.log(scale))
    return flow


def gaussian_log_probability(x: Tensor, scale: float) -> Tensor:
    """The mass of each cell, by the normal's distribution function."""
    edge = x.to(F64) / LEVELS - 0.5
    mass = torch.special.ndtr((edge + 1 / LEVELS) / scale) - torch.special.ndtr(edge / scale)
    return mass.log().sum(1)


def all_pairs() -> Tensor:
    return torch.cartesian_prod(torch.arange(LEVELS), torch.arange(LEVELS))


def variational(channels: int = 2, hidden: int = 6, *, fresh: bool = False) -> D.VariationalDequantization:
    """The paper's: couplings conditioned on what a network sees in the image. Fresh, it is u = sigmoid(ε)."""
    torch.manual_seed(0)
    half = channels // 2
    steps = [
        T.AffineCoupling(nn.DenseNet(half, 2 * half, growth=hidden, depth=1, context_channels=3), channels),
        T.Flip([1]),
        T.AffineCoupling(nn.DenseNet(half, 2 * half, growth=hidden, depth=1, context_channels=3), channels),
    ]
    made = D.VariationalDequantization(T.Chain(steps), nn.DenseNet(channels, 3, growth=hidden, depth=1)).double()
    if not fresh:
        randomise(made)
    return made.eval()


def test_uniform_noise_under_a_uniform_density_is_exact():
    flow = D.DequantizedFlow(ef.Flow(T.Flip(), Uniform((2,))), D.UniformDequantization(), levels=LEVELS).double()
    x = all_pairs()
    exact = torch.full((len(x),), -2 * math.log(LEVELS), dtype=F64)
    torch.testing.assert_close(flow(x), exact)
    torch.testing.assert_close(flow.importance_weighted(x, samples=5), exact)
    torch.testing.assert_close(D.bits_per_dim(flow(x), (2,)), torch.full((len(x),), 3.0, dtype=F64))


@pytest.mark.parametrize("scale", [0.2, 0.05])
def test_the_bound_is_below_the_probability_and_reaches_it(scale):
    """The mean of one-sample bounds lies below log P by Jensen's inequality; many samples close the gap."""
    torch.manual_seed(0)
    flow = D.DequantizedFlow(gaussian_flow(scale), D.UniformDequantization(), levels=LEVELS)
    x = all_pairs()[27:37]
    truth = gaussian_log_probability(x, scale)
    weights = flow.log_weights(x, samples=20_000, chunk=5000)
    assert (D.elbo(weights) < truth).all()
    ratios = (weights - truth).exp()
    error = ratios.std(0) / len(ratios) ** 0.5
    assert (error < 0.04).all()  # what four of them allow is not much, beside gaps of up to eight nats
    assert ((ratios.mean(0) - 1).abs() < 4 * error).all()
    torch.testing.assert_close(D.importance_weighted(weights), truth + ratios.mean(0).log())


def test_probabilities_of_all_integers_sum_to_one():
    """The true ones do; with importance weighting so do the estimates, nearly."""
    torch.manual_seed(0)
    scale = 0.1
    x = all_pairs()
    assert float(gaussian_log_probability(x, scale).exp().sum()) == pytest.approx(1, abs=1e-5)
    flow = D.DequantizedFlow(gaussian_flow(scale), D.UniformDequantization(), levels=LEVELS)
    assert float(flow.importance_weighted(x, samples=4000, chunk=1000).exp().sum()) == pytest.approx(1, abs=0.02)
    assert float(flow.elbo(x, samples=4000).exp().sum()) < 0.95


class TestVariational:
    def test_density_of_its_noise_by_the_jacobian(self):
        """log q(u | x) = log N(ε) − log |du/dε|, with the Jacobian that autograd finds."""
        dequantizer = variational()
        x, noise = torch.rand(3, 2, 2, 2, dtype=F64), draw("noise", 3, 2, 2, 2)
        u, log_q = dequantizer(x, noise)
        assert ((u > 0) & (u < 1)).all()
        for i in range(3):
            jacobian = torch.autograd.functional.jacobian(
                lambda e, i=i: dequantizer(x[i : i + 1], e.reshape(1, 2, 2, 2))[0].flatten(), noise[i].flatten()
            )
            log_normal = torch.distributions.Normal(0.0, 1.0).log_prob(noise[i]).sum()
            torch.testing.assert_close(log_q[i], log_normal - torch.linalg.slogdet(jacobian)[1])

    def test_density_of_its_noise_integrates_to_one(self):
        """∫ q(u | x) du over the unit square, by inverting the map on a grid of logits, du = u (1 − u) dlogit."""
        dequantizer = variational()
        x = torch.full((1, 2, 1, 1), 0.4, dtype=F64)
        axis = torch.linspace(-25, 25, 501, dtype=F64)
        logits = torch.cartesian_prod(axis, axis).reshape(-1, 2, 1, 1)
        with torch.no_grad():
            context = dequantizer.context(x - 0.5).expand(len(logits), -1, -1, -1)
            noise, _ = dequantizer.transform(logits, context)
            u, log_q = dequantizer(x.expand_as(logits), noise)
        torch.testing.assert_close(u, torch.sigmoid(logits), rtol=0, atol=1e-12)
        slopes = (torch.sigmoid(logits) * torch.sigmoid(-logits)).flatten(1).prod(1)
        assert float((log_q.exp() * slopes).sum()) * 0.1**2 == pytest.approx(1, abs=1e-4)

    def test_the_image_matters(self):
        dequantizer, noise = variational(), draw("noise", 1, 2, 2, 2)
        first, second = (dequantizer(torch.full((1, 2, 2, 2), v, dtype=F64), noise)[0] for v in (0.1, 0.9))
        assert (first - second).abs().max() > 1e-3

    def test_its_bound_is_below_the_probability_too(self):
        torch.manual_seed(0)
        made = ef.Flow(T.ActNorm(2), D.StandardNormal((2, 1, 1))).double().eval()
        with torch.no_grad():
            made.transform.log_scale.fill_(math.log(5))
        flow = D.DequantizedFlow(made, variational(fresh=True), levels=LEVELS)
        x = all_pairs()[::7]
        truth = gaussian_log_probability(x, 0.2)
        weights = flow.log_weights(x.reshape(-1, 2, 1, 1), samples=20_000, chunk=5000)
        assert (D.elbo(weights) < truth - 0.2).all()
        # the weights have heavy tails: sigmoid(ε) hardly ever comes close to the edges of a cell
        torch.testing.assert_close(D.importance_weighted(weights), truth, rtol=0, atol=0.3)

    def test_training_reaches_every_parameter(self):
        made = ef.Flow(T.ConvExp(2), D.StandardNormal((2, 2, 2))).double()
        flow = D.DequantizedFlow(made, variational(), levels=LEVELS)
        randomise(flow)
        flow(torch.randint(0, LEVELS, (4, 2, 2, 2))).sum().backward()
        for name, parameter in flow.named_parameters():
            assert parameter.grad is not None, name
            assert (parameter.grad != 0).any(), name


def test_given_noise_replaces_the_random_numbers():
    flow = D.DequantizedFlow(gaussian_flow(0.3), D.UniformDequantization(), levels=LEVELS)
    x, noise = all_pairs()[:5], torch.rand(5, 2, dtype=F64)
    expected = flow.flow.log_prob((x + noise) / LEVELS - 0.5) - 2 * math.log(LEVELS)
    torch.testing.assert_close(flow(x, noise=noise), expected)


@pytest.mark.parametrize("chunk", [1, 3, 4, 100])
def test_chunks_are_the_whole(chunk):
    """The random numbers of one row come in the same order, however many are drawn at once."""
    flow = D.DequantizedFlow(gaussian_flow(0.3), D.UniformDequantization(), levels=LEVELS)
    x = torch.tensor([[3, 5]])
    torch.manual_seed(0)
    whole = flow.log_weights(x, samples=10, chunk=10)
    torch.manual_seed(0)
    torch.testing.assert_close(flow.log_weights(x, samples=10, chunk=chunk), whole, rtol=0, atol=1e-13)
    assert whole.shape == (10, 1)
    assert whole.unique().numel() == 10


def test_rows_and_samples_are_not_mixed_up():
    """Weight k of row i belongs to row i: rows of very different probability stay apart."""
    flow = D.DequantizedFlow(gaussian_flow(0.1), D.UniformDequantization(), levels=LEVELS)
    x = torch.tensor([[4, 4], [0, 0], [7, 0]])
    truth = gaussian_log_probability(x, 0.1)
    weights = flow.log_weights(x, samples=50, chunk=7)
    assert weights.shape == (50, 3)
    assert ((weights - truth).abs() < 8).all()
    assert float((truth[0] - truth[1]).abs()) > 16


def test_contexts_go_with_their_rows():
    coupling = T.AffineCoupling(nn.MLP(1, 2, hidden=(4,), context_features=3), 2)
    made = ef.Flow(coupling, D.StandardNormal((2,))).double()
    randomise(made)
    flow = D.DequantizedFlow(made, D.UniformDequantization(), levels=LEVELS)
    x, context = all_pairs()[:4], 3 * draw("context", 4, 3)
    torch.manual_seed(0)
    together = flow.importance_weighted(x, context, samples=3000)
    alone = torch.cat([flow.importance_weighted(x[i : i + 1], context[i : i + 1], samples=3000) for i in range(4)])
    torch.testing.assert_close(together, alone, rtol=0, atol=0.02)
    others = flow.importance_weighted(x, context.roll(1, 0), samples=3000)
    assert float((together - others).abs().max()) > 0.2


def test_samples_are_integers_in_range():
    torch.manual_seed(0)
    flow = D.DequantizedFlow(gaussian_flow(0.5), D.UniformDequantization(), levels=LEVELS)
    x = flow.sample(2000)
    assert x.dtype == torch.int64
    assert int(x.min()) == 0
    assert int(x.max()) == LEVELS - 1
    frequency = float((x == 4).all(1).float().mean())
    expected = float(gaussian_log_probability(torch.tensor([[4, 4]]), 0.5).exp())
    assert frequency == pytest.approx(expected, abs=4 * math.sqrt(expected / 2000))


def test_an_empty_batch():
    flow = D.DequantizedFlow(gaussian_flow(0.5), D.UniformDequantization(), levels=LEVELS)
    assert flow(torch.zeros(0, 2, dtype=torch.int64)).shape == (0,)


@pytest.mark.parametrize("value", [-1, LEVELS, 255])
def test_integers_out_of_range_are_refused(value):
    flow = D.DequantizedFlow(gaussian_flow(0.5), D.UniformDequantization(), levels=LEVELS)
    with pytest.raises(ValueError, match=rf"Expected grey levels from 0 to 7; got {min(value, 0)} to {max(value, 0)}"):
        flow(torch.tensor([[0, value]]))


@pytest.mark.parametrize("x", [torch.zeros(1, 2), torch.zeros(1, 2, dtype=torch.bool), [[0, 1]]])
def test_other_things_than_integers_are_refused(x):
    flow = D.DequantizedFlow(gaussian_flow(0.5), D.UniformDequantization(), levels=LEVELS)
    with pytest.raises(TypeError, match="Expected integers; got"):
        flow(x)


def test_one_level_is_refused():
    with pytest.raises(ValueError, match="Expected levels of at least 2; got 1"):
        D.DequantizedFlow(gaussian_flow(0.5), D.UniformDequantization(), levels=1)
