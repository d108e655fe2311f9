"""Mixture couplings: distribution functions, inverted to the last digits."""

from __future__ import annotations

import math

import pytest
import torch

from expmflow import nn
from expmflow import transforms as T
from expmflow.transforms.mixture import _mixture_logit, _quantile
from transform_registry import draw, randomise

F64 = torch.float64


def mixture(components: int = 3, *shape: int) -> tuple[torch.Tensor, ...]:
    weights, means, widths = (draw(name, components, *shape) for name in ("weights", "means", "widths"))
    return torch.log_softmax(weights, 0), 3 * means, widths


def test_the_logit_is_that_of_the_distribution_function():
    log_weights, means, log_widths = mixture(3, 5)
    x = draw("x", 7, 5)
    cdf = (log_weights.exp() * torch.sigmoid((x[:, None] - means) / log_widths.exp())).sum(1)
    found, slope = _mixture_logit(x.unsqueeze(0), log_weights[:, None], means[:, None], log_widths[:, None])
    torch.testing.assert_close(found, torch.logit(cdf))
    (numerical,) = torch.autograd.grad(
        _mixture_logit(x.requires_grad_(), log_weights[:, None], means[:, None], log_widths[:, None])[0].sum(), x
    )
    torch.testing.assert_close(slope.exp(), numerical)


@pytest.mark.parametrize("far", [1e2, 1e4])
def test_tails_are_lines_of_their_widest_component(far):
    """Where a distribution function is 1 to the last digit, its logit is not infinite."""
    log_weights, means, log_widths = mixture(2, 1)
    x = torch.tensor([[far], [-far]], dtype=F64)
    found, slope = _mixture_logit(x, log_weights[:, None], means[:, None], log_widths[:, None])
    widest = float(log_widths.max().exp())
    torch.testing.assert_close(found / x, torch.full_like(x, 1 / widest), rtol=0, atol=10 / far)
    torch.testing.assert_close(slope.exp(), torch.full_like(x, 1 / widest), rtol=0, atol=10 / far)


@pytest.mark.parametrize(("dtype", "digits"), [(F64, 1e-12), (torch.float32, 2e-4)])
@pytest.mark.parametrize("logit", [0.0, -3.0, 20.0, -200.0])
def test_quantiles_are_found(dtype, digits, logit):
    parts = [part.to(dtype) for part in mixture(4, 50)]
    wanted = torch.full((50,), logit, dtype=dtype)
    found, _ = _mixture_logit(_quantile(wanted, *parts), *parts)
    torch.testing.assert_close(found, wanted, rtol=digits, atol=digits)


def test_two_modes_become_one():
    """Half at −1, half at 1, both narrow: one coupling maps them to a logistic density."""
    net = nn.MLP(1, 3 * 2 + 2, hidden=(4,))
    layer = T.MixtureCoupling(net, 2, components=2).double()
    with torch.no_grad():
        net.layers[-1].bias[4:6] = -3.0  # the widths; the means start at −1 and 1
    width = math.exp(5 * math.tanh(-3 / 5))
    x = torch.zeros(4, 2, dtype=F64)
    x[:, 1] = torch.tensor([-1 - width, -1 + width, 1 - width, 1 + width])
    low, high = 1 / (1 + math.e) / 2, 1 / (1 + math.exp(-1)) / 2
    expected = torch.logit(torch.tensor([low, high, 0.5 + low, 0.5 + high], dtype=F64))
    torch.testing.assert_close(layer(x)[0][:, 1], expected, rtol=0, atol=1e-6)


def test_components_part():
    """The gradients of the means differ from the start, although the network starts at zero."""
    layer = T.MixtureCoupling(nn.MLP(1, 3 * 3 + 2, hidden=(4,)), 2, components=3).double()
    layer(draw("x", 6, 2))[1].sum().backward()
    grad = layer.net.layers[-1].bias.grad[3:6]
    assert float((grad[:, None] - grad).abs().max()) > 1e-3


def test_gradients_of_the_inverse_in_the_weights():
    layer = T.MixtureCoupling(nn.MLP(1, 3 * 2 + 2, hidden=(3,), activation="elu"), 2, components=2).double()
    randomise(layer)
    z, weights = draw("z", 2, 2), list(layer.parameters())
    assert torch.autograd.gradcheck(lambda z, *_: layer.inverse(z)[0], (z.requires_grad_(), *weights))


def test_refusals():
    with pytest.raises(ValueError, match="Expected components of at least 1; got 0"):
        T.MixtureCoupling(nn.MLP(1, 2), 2, components=0)
    layer = T.MixtureCoupling(nn.MLP(1, 4, hidden=(3,)), 2, components=2)
    with pytest.raises(ValueError, match="MixtureCoupling: Expected 8 channels from the network; got 4"):
        layer(torch.zeros(1, 2))


def test_second_derivatives_of_the_inverse():
    layer = T.MixtureCoupling(nn.MLP(1, 2 * (3 * 2 + 2), hidden=(4,)), channels=3, components=2).double()
    randomise(layer)
    z = draw("z", 2, 3).requires_grad_()
    assert torch.autograd.gradgradcheck(layer.inverse, (z,))
