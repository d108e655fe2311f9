"""Densities of sets: blind to order, of total mass one, and what their samples are drawn from."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from expmflow import transforms as T
from expmflow.distributions import DiagonalGaussian, Exchangeable, Flow, NonFiniteError, StandardNormal
from expmflow.models import graph_flow
from transform_registry import draw, randomise

F64 = torch.float64


def simple(nodes: int, features: int) -> Exchangeable:
    return Exchangeable(nodes, features, Flow(T.Chain([]), StandardNormal((nodes * features,)))).double()


def trained_like(nodes: int = 3, features: int = 2) -> Flow:
    torch.manual_seed(0)
    flow = graph_flow(nodes, features, network="sorted", subflows=2, hidden=6).double().eval()
    randomise(flow)
    return flow


@pytest.mark.parametrize("nodes", [1, 2, 4])
def test_every_order_is_as_likely(nodes):
    flow, x = trained_like(nodes), draw("x", 5, nodes, 2)
    expected = flow.log_prob(x)
    for order in itertools.permutations(range(nodes)):
        torch.testing.assert_close(flow.log_prob(x[:, order]), expected)


def test_the_total_mass_is_one():
    """Of two numbers, by the trapezoidal rule over the plane; the density jumps where both are equal."""
    line = torch.linspace(-12, 12, 1201, dtype=F64)
    x = torch.cartesian_prod(line, line + 0.01).unsqueeze(-1)
    mass = simple(2, 1).log_prob(x).exp().sum() * (line[1] - line[0]) ** 2
    assert float(mass) == pytest.approx(1, abs=1e-3)


def test_log_prob_is_the_jacobian_of_what_it_does():
    """x in order, as free numbers: log p = log normal + log |det| − log N!."""
    sets, x = simple(3, 2), draw("x", 1, 3, 2)
    order = x[0, :, 0].argsort()

    def free(ordered):
        gaps = ordered[:, 0].diff()
        heads = torch.cat([ordered[:1, 0], torch.log(torch.expm1(gaps))])
        return torch.stack([heads, ordered[:, 1]], dim=1)

    ordered = x[0, order]
    jacobian = torch.autograd.functional.jacobian(free, ordered).reshape(6, 6)
    normal = -0.5 * (free(ordered).square() + math.log(2 * math.pi)).sum()
    expected = normal + torch.linalg.slogdet(jacobian)[1] - math.log(6)
    torch.testing.assert_close(sets.log_prob(x)[0], expected)


def test_samples_come_from_the_density():
    sets = simple(2, 1)
    torch.manual_seed(0)
    x = sets.rsample(200_000)[..., 0]
    line = torch.linspace(-10, 10, 4001, dtype=F64)
    normal = torch.exp(-0.5 * line**2) / math.sqrt(2 * math.pi) * (line[1] - line[0])
    gap = float((torch.nn.functional.softplus(line) * normal).sum())  # the smaller is standard normal, this is added
    assert float((x[:, 0] - x[:, 1]).abs().mean()) == pytest.approx(gap, abs=0.01)
    assert float(x.amin(1).mean()) == pytest.approx(0, abs=0.01)
    assert float((x[:, 0] < x[:, 1]).double().mean()) == pytest.approx(0.5, abs=0.01)
    entropy = -float(sets.log_prob(x.unsqueeze(-1)).mean())
    line = torch.linspace(-12, 12, 1201, dtype=F64)
    log_p = sets.log_prob(torch.cartesian_prod(line, line + 0.01).unsqueeze(-1))
    assert entropy == pytest.approx(-float((log_p * log_p.exp()).sum() * (line[1] - line[0]) ** 2), abs=0.02)


def test_noise_decides_over_the_sample_and_its_order():
    flow = trained_like()
    noise = draw("noise", 4, 3, 3)
    x = flow.sample(4, noise=noise)
    torch.testing.assert_close(flow.sample(4, noise=noise), x, rtol=0, atol=0)
    turned = noise.clone()
    turned[..., -1] *= -1
    torch.testing.assert_close(flow.sample(4, noise=turned), x.flip(1))
    assert torch.isfinite(flow.log_prob(x)).all()


def test_equal_features_are_no_infinity():
    x = torch.zeros(2, 3, 2, dtype=F64)
    assert torch.isfinite(simple(3, 2).log_prob(x)).all()


def test_description_has_the_layers_inside():
    text = trained_like().description()
    assert "MixtureCoupling" in text
    assert "Exchangeable of shape 3 × 2" in text


def test_refusals():
    flow = trained_like()
    with pytest.raises(ValueError, match=r"Expected no context for a density of sets; got Tensor\."):
        flow.log_prob(draw("x", 2, 3, 2), torch.ones(3, 3, dtype=F64))
    with pytest.raises(ValueError, match=r"Expected sets of shape \(batch, \*\(3, 2\)\); got events \(4, 2\)\."):
        flow.log_prob(draw("x", 2, 4, 2))
    with pytest.raises(ValueError, match=r"Expected a flow of vectors of length 6; got events \(4,\)\."):
        Exchangeable(3, 2, Flow(T.Chain([]), StandardNormal((4,))))
    with pytest.raises(ValueError, match=r"Expected noise of shape \(2, 3, 3\); got \(2, 3, 2\)\."):
        flow.sample(2, noise=draw("noise", 2, 3, 2))
    with pytest.raises(NonFiniteError, match="first in the input"):
        flow.log_prob(torch.full((1, 3, 2), math.nan, dtype=F64))


def test_samples_have_the_mean_and_scale_of_the_base_inside():
    base = DiagonalGaussian((6,))
    with torch.no_grad():
        base.mean.fill_(7.0)
        base.log_std.fill_(-2.0)
    sets = Exchangeable(3, 2, Flow(T.Chain([]), base)).double()
    torch.manual_seed(0)
    with torch.no_grad():
        x = sets.rsample(4000)
    last = x[..., 1]  # the features behind the first are those of the base as they are
    assert float(last.mean()) == pytest.approx(7.0, abs=0.01)
    assert float(last.std()) == pytest.approx(math.exp(-2), rel=0.03)
