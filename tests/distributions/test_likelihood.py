"""Densities at the end of a decoder: they add up to one, and samples follow them."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from expmflow.distributions import Bernoulli, LogisticMixture, Normal
from transform_registry import draw

F64 = torch.float64

EXTREMES = {  # what a decoder might say: means, logarithms of scales, coefficients, logits
    "random": lambda params: params,
    "large": lambda params: 30 * params,
    "huge": lambda params: 1e4 * params,
    "narrow": lambda params: params - 100,
    "wide": lambda params: params + 60,
    "zero": torch.zeros_like,
}


def all_levels(levels: int, channels: int) -> torch.Tensor:
    """Every colour of one point: `(levels^channels, channels, 1, 1)`."""
    return torch.tensor(list(itertools.product(range(levels), repeat=channels)))[..., None, None]


def mixture_params(mixture: LogisticMixture, kind: str, *, dtype: torch.dtype = F64) -> torch.Tensor:
    count = mixture.param_channels(mixture.channels)
    return EXTREMES[kind](draw(f"mixture {count}", 1, count, 1, 1)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, F64], ids=str)
@pytest.mark.parametrize("kind", EXTREMES)
@pytest.mark.parametrize(("levels", "channels"), [(256, 1), (2, 1), (4, 3), (16, 2)])
def test_all_colours_have_a_probability_of_one_together(levels, channels, kind, dtype):
    mixture = LogisticMixture(channels, components=5, levels=levels)
    x = all_levels(levels, channels)
    params = mixture_params(mixture, kind, dtype=dtype).expand(len(x), -1, 1, 1).clone().requires_grad_()
    log_prob = mixture.log_prob(x, params)
    total = torch.logsumexp(log_prob, 0)
    assert abs(float(total.detach())) < (1e-10 if dtype == F64 else 2e-4)
    assert torch.isfinite(log_prob).all()
    (grad,) = torch.autograd.grad(log_prob.sum(), params)
    assert torch.isfinite(grad).all()


@pytest.mark.parametrize("kind", EXTREMES)
def test_all_levels_of_a_colour_add_up_to_the_colours_before_it(kind):
    """RGB of 256 levels: over all blues it is the density of red and green, over all greens that of red."""
    k, every = 5, torch.arange(256)
    logits, means, log_scales, coefficients = mixture_params(LogisticMixture(3, components=k), kind).split(
        [k, 3 * k, 3 * k, 3 * k], dim=1
    )
    for colours in (3, 2):
        first = colours - 1
        known = torch.tensor([[0, 255], [17, 128], [255, 0]])[:, :first]
        pairs = (colours * (colours - 1) // 2, first * (first - 1) // 2)
        whole, before = (
            torch.cat([logits, means[:, : c * k], log_scales[:, : c * k], coefficients[:, : n * k]], 1)
            for c, n in zip((colours, first), pairs, strict=True)
        )
        x = torch.cat([known.repeat_interleave(256, 0), every.repeat(3).unsqueeze(1)], 1)[..., None, None]
        log_prob = LogisticMixture(colours, components=k).log_prob(x, whole.expand(len(x), -1, 1, 1))
        expected = LogisticMixture(first, components=k).log_prob(known[..., None, None], before.expand(3, -1, 1, 1))
        torch.testing.assert_close(log_prob.reshape(3, 256).logsumexp(1), expected, rtol=1e-10, atol=1e-10)


def test_a_level_by_the_difference_of_distribution_functions():
    """Where float64 can take the difference: one component, the middle and both edges."""
    mixture = LogisticMixture(1, components=1, levels=256)
    mean, log_scale = 0.2, -2.0
    params = torch.tensor([0.0, mean, log_scale], dtype=F64).reshape(1, 3, 1, 1)
    for level in (0, 1, 100, 153, 254, 255):
        at, half = 2 * level / 255 - 1, 1 / 255
        above, below = (1 / (1 + math.exp(-(at + s * half - mean) / math.exp(log_scale))) for s in (1, -1))
        expected = (1.0 if level == 255 else above) - (0.0 if level == 0 else below)
        got = mixture.log_prob(torch.full((1, 1, 1, 1), level), params)
        torch.testing.assert_close(got, torch.tensor([math.log(expected)], dtype=F64), rtol=1e-10, atol=0)


def test_colours_are_conditioned_in_turn_within_one_component():
    """By hand: each component's colours with means that the true values move, one indicator for the whole point."""
    torch.manual_seed(0)
    mixture, k = LogisticMixture(3, components=4, levels=256), 4
    params = draw("by hand", 1, 40, 1, 1)
    logits, means, log_scales, coefficients = params.reshape(10, k).split([1, 3, 3, 3])
    x = torch.tensor([10, 200, 77])
    at = 2 * x.double() / 255 - 1
    c = torch.tanh(coefficients)
    centre = torch.stack([means[0], means[1] + c[0] * at[0], means[2] + c[1] * at[0] + c[2] * at[1]])
    scale = log_scales.exp()
    cdf = [torch.sigmoid((at[:, None] + s / 255 - centre) / scale) for s in (1, -1)]
    expected = (torch.softmax(logits[0], 0) * (cdf[0] - cdf[1]).prod(0)).sum().log()
    torch.testing.assert_close(mixture.log_prob(x.reshape(1, 3, 1, 1), params), expected.reshape(1))


def frequencies(samples: torch.Tensor, levels: int) -> torch.Tensor:
    codes = samples.flatten(1)
    index = sum(codes[:, c] * levels ** (codes.shape[1] - 1 - c) for c in range(codes.shape[1]))
    return torch.bincount(index, minlength=levels ** codes.shape[1]) / len(samples)


def test_samples_follow_the_mixture():
    mixture, n = LogisticMixture(2, components=3, levels=4), 40_000
    params = mixture_params(mixture, "random").expand(n, -1, 1, 1)
    generator = torch.Generator().manual_seed(0)
    noise = tuple(torch.rand(n, *d.shape, generator=generator, dtype=F64) for d in mixture.draws((2, 1, 1)))
    x = all_levels(4, 2)
    expected = mixture.log_prob(x, params[: len(x)]).exp()
    error = (frequencies(mixture.sample(params, noise), 4) - expected).abs()
    assert (error <= 4.5 * (expected * (1 - expected) / n).sqrt() + 1e-5).all()


def test_samples_follow_bernoulli():
    likelihood, n = Bernoulli(), 20_000
    params = torch.tensor([-2.0, 0.5], dtype=F64).reshape(1, 2, 1, 1).expand(n, -1, 1, 1)
    noise = torch.rand(n, 2, 1, 1, generator=torch.Generator().manual_seed(0), dtype=F64)
    found = likelihood.sample(params, (noise,)).double().mean(0).flatten()
    torch.testing.assert_close(found, torch.sigmoid(params[0].flatten()), rtol=0, atol=0.015)
    torch.testing.assert_close(likelihood.mean(params)[0].flatten(), torch.sigmoid(params[0].flatten()))


@pytest.mark.parametrize("size", [0.0, 1.0, 1e4])
def test_bernoulli_adds_up_and_has_finite_gradients(size):
    params = torch.tensor([size, -size], dtype=F64).reshape(2, 1).requires_grad_()
    both = torch.stack([Bernoulli().log_prob(torch.full((2, 1), v), params) for v in (0, 1)])
    torch.testing.assert_close(torch.logsumexp(both, 0), torch.zeros(2, dtype=F64))
    both.sum().backward()
    assert torch.isfinite(params.grad).all()


def test_normal_is_torchs():
    likelihood = Normal(3, std=0.7).double()
    x, params = draw("x", 4, 3, 2), draw("params", 4, 3, 2)
    expected = torch.distributions.Normal(params, 0.7).log_prob(x).flatten(1).sum(1)
    torch.testing.assert_close(likelihood.log_prob(x, params), expected)
    noise = draw("noise", 4, 3, 2)
    torch.testing.assert_close(likelihood.sample(params, (noise,)), params + 0.7 * noise)


@pytest.mark.parametrize("components", [1, 5, 10])
def test_a_mixture_starts_near_one_probability_for_all_levels(components):
    """Of each colour alone: within a factor of four of 1/256, and the same from either end."""
    mixture = LogisticMixture(1, components=components)
    params = mixture.initial_params().reshape(1, -1, 1, 1).expand(256, -1, 1, 1)
    log_prob = mixture.log_prob(all_levels(256, 1), params)
    assert (log_prob[1:-1] + math.log(256)).abs().max() < math.log(4)
    torch.testing.assert_close(log_prob, log_prob.flip(0), rtol=1e-4, atol=1e-4)
    assert LogisticMixture(3, components=components).initial_params().shape == (10 * components,)


def test_means_of_a_mixture_are_levels():
    mixture = LogisticMixture(3, components=2)
    params = torch.zeros(1, 20, 1, 1)
    params[:, 2:8:2] = torch.tensor([-1.0, 0.0, 5.0]).reshape(1, 3, 1, 1)  # the means of the first component
    params[:, 0] = 1
    assert mixture.mean(params).flatten().tolist() == [0.0, 127.5, 255.0]


def test_what_does_not_fit_is_refused():
    mixture = LogisticMixture(3, components=10)
    with pytest.raises(ValueError, match=r"^Expected 100 channels from the network; got 99\.$"):
        mixture.log_prob(torch.zeros(1, 3, 1, 1, dtype=torch.int64), torch.zeros(1, 99, 1, 1))
    with pytest.raises(ValueError, match=r"^Expected levels from 0 to 255; got 0 to 256\.$"):
        mixture.log_prob(torch.tensor([0, 3, 256]).reshape(1, 3, 1, 1), torch.zeros(1, 100, 1, 1))
    with pytest.raises(TypeError, match=r"^Expected integers; got torch.float32\.$"):
        Bernoulli().scaled(torch.zeros(1, 1), torch.float32)
    with pytest.raises(ValueError, match=r"^Expected a positive std; got 0"):
        Normal(2, std=0.0)
