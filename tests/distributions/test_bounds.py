"""Lower bounds: below the truth, ordered among themselves, and the truth in the limit."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from expmflow import distributions as D
from transform_registry import draw

F64 = torch.float64


def gaussian(x: Tensor, mean: Tensor | float, variance: float) -> Tensor:
    return -0.5 * ((x - mean) ** 2 / variance + math.log(2 * math.pi * variance))


class LinearGaussian:
    """u ~ N(0, 1), x | u ~ N(a u, s²), so x ~ N(0, a² + s²); q(u | x) is the posterior, shifted and widened."""

    a, s = 1.5, 0.7

    def __init__(self, shift: float, widening: float) -> None:
        self.shift, self.widening = shift, widening

    def evidence(self, x: Tensor) -> Tensor:
        return gaussian(x, 0.0, self.a**2 + self.s**2)

    def log_weights(self, x: Tensor, samples: int, seed: int = 0) -> Tensor:
        """log p(x, u) − log q(u | x), `(samples, batch)`."""
        precision = 1 + self.a**2 / self.s**2
        mean = self.a / self.s**2 * x / precision + self.shift
        variance = self.widening / precision
        noise = torch.randn(samples, len(x), generator=torch.Generator().manual_seed(seed), dtype=F64)
        u = mean + math.sqrt(variance) * noise
        return gaussian(u, 0.0, 1.0) + gaussian(x, self.a * u, self.s**2) - gaussian(u, mean, variance)


X = torch.linspace(-3, 3, 5, dtype=F64)


def test_the_posterior_gives_the_evidence_exactly():
    exact = LinearGaussian(0.0, 1.0)
    weights = exact.log_weights(X, 7)
    torch.testing.assert_close(weights, exact.evidence(X).expand(7, 5), rtol=0, atol=1e-12)
    torch.testing.assert_close(D.elbo(weights), exact.evidence(X))
    torch.testing.assert_close(D.importance_weighted(weights), exact.evidence(X))


def test_the_importance_weighted_bound_reaches_the_evidence():
    model = LinearGaussian(0.3, 1.8)
    bound = D.importance_weighted(model.log_weights(X, 400_000))
    torch.testing.assert_close(bound, model.evidence(X), rtol=0, atol=5e-3)


def test_the_elbo_misses_it_by_the_divergence_of_q():
    """log p(x) − ELBO = KL(q ‖ posterior), here of two Gaussians."""
    shift, widening = 0.3, 1.8
    model = LinearGaussian(shift, widening)
    precision = 1 + model.a**2 / model.s**2
    divergence = 0.5 * (widening + shift**2 * precision - 1 - math.log(widening))
    gap = model.evidence(X) - D.elbo(model.log_weights(X, 400_000))
    torch.testing.assert_close(gap, torch.full((5,), divergence, dtype=F64), rtol=0, atol=2e-2)


def nested(weights: Tensor, group: int) -> Tensor:
    """The mean over all groups of this size of their importance-weighted bounds."""
    groups = weights.unflatten(0, (-1, group))
    return torch.stack([D.importance_weighted(rows) for rows in groups]).mean(0)


@pytest.mark.parametrize("seed", range(3))
def test_larger_groups_of_the_same_weights_give_tighter_bounds(seed):
    """log of a mean is at least the mean of logs: for any weights whatsoever, not only in expectation."""
    model = LinearGaussian(0.8, 3.0)
    weights = model.log_weights(X, 4096, seed)
    bounds = torch.stack([nested(weights, group) for group in (1, 2, 8, 64, 4096)])
    torch.testing.assert_close(bounds[0], D.elbo(weights))
    torch.testing.assert_close(bounds[-1], D.importance_weighted(weights))
    assert (bounds.diff(dim=0) > 0).all()
    assert (bounds[:2] < model.evidence(X) - 0.2).all()


def test_extreme_weights_do_not_overflow():
    weights = torch.tensor([[1000.0, -1000.0], [1000.0, -3000.0]])
    torch.testing.assert_close(D.importance_weighted(weights), torch.tensor([1000.0, -1000.0 - math.log(2)]))


@pytest.mark.parametrize("chunk", [1, 2, 3, 7, 16])
def test_chunks_are_the_whole(chunk):
    """The same noise, taken in pieces."""
    noise = draw("noise", 7, 4)
    sizes = []

    def sample(count: int) -> Tensor:
        start = sum(sizes)
        sizes.append(count)
        return noise[start : start + count]

    assert torch.equal(D.estimate_log_weights(sample, 7, chunk=chunk), noise)
    assert max(sizes) <= chunk
    assert sum(sizes) == 7


def test_estimates_carry_no_gradient():
    parameter = torch.ones(3, requires_grad=True)
    assert not D.estimate_log_weights(lambda count: parameter.expand(count, 3), 4).requires_grad


def test_bits_per_dim_by_hand():
    """A byte drawn uniformly costs eight bits."""
    uniform = torch.full((2,), -3 * 4 * 4 * math.log(256))
    torch.testing.assert_close(D.bits_per_dim(uniform, (3, 4, 4)), torch.tensor([8.0, 8.0]))
    assert float(D.bits_per_dim(torch.tensor(-math.log(2)), ())) == pytest.approx(1.0)


def test_wrong_arguments():
    with pytest.raises(ValueError, match=r"Expected log weights of shape \(samples, batch\); got \(3,\)"):
        D.elbo(torch.zeros(3))
    with pytest.raises(ValueError, match=r"Expected log weights of shape \(samples, batch\); got \(0, 3\)"):
        D.importance_weighted(torch.zeros(0, 3))
    with pytest.raises(ValueError, match="Expected samples of at least 1; got 0"):
        D.estimate_log_weights(lambda count: torch.zeros(count, 1), 0)
    with pytest.raises(ValueError, match="Expected chunk of at least 1; got 0"):
        D.estimate_log_weights(lambda count: torch.zeros(count, 1), 1, chunk=0)
    with pytest.raises(ValueError, match="Expected an event with at least one entry"):
        D.bits_per_dim(torch.zeros(1), (3, 0))
