"""A layer as a `torch.distributions` transform."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.distributions import ComposeTransform, Independent, Normal, TransformedDistribution

import expmflow as ef
import vector_flow_cases
from expmflow import interop
from expmflow import transforms as T
from transform_cases import CASES
from transform_registry import draw, points, randomise

F64 = torch.float64

# layers that keep their shape, as those in a distribution do
NAMES = ["linear-exp", "conv-exp", "dense-sylvester-context", "conv-sylvester", "coupling-graph", "chain-multiscale"]
NAMES += list(vector_flow_cases.CASES)
NAMES += ["residual-conv", "residual-mlp-context", "triangular-conv-sylvester-wide"]


def adapter(name: str):
    case = CASES.ready(name)
    return case, interop.as_transform(case.layer, context=case.context, event_dim=len(case.event))


def standard(event: tuple[int, ...]) -> Independent:
    return Independent(Normal(torch.zeros(event, dtype=F64), torch.ones(event, dtype=F64)), len(event))


@pytest.mark.parametrize("name", NAMES)
def test_call_inverse_and_log_determinant(name):
    case, transform = adapter(name)
    x = points(name, case)
    z, logdet = case.layer(x, case.context)
    got = transform(x)
    torch.testing.assert_close(got, z)
    torch.testing.assert_close(transform.log_abs_det_jacobian(x, got), logdet)
    back = transform.inv(z)
    torch.testing.assert_close(back, x, rtol=0, atol=1e-11)
    torch.testing.assert_close(transform.inv.log_abs_det_jacobian(z, back), -logdet, rtol=0, atol=1e-11)
    torch.testing.assert_close(transform.log_abs_det_jacobian(x.clone(), z.clone()), logdet)
    assert transform.domain.event_dim == transform.codomain.event_dim == len(case.event)


@pytest.mark.parametrize("name", NAMES)
def test_a_transformed_distribution_is_a_flow(name):
    """Its base is mapped by the inverse layer, noise to data."""
    case = CASES.ready(name)
    layer = T.Inverse(case.layer)
    transform = interop.as_transform(layer, context=case.context, event_dim=len(case.event))
    distribution = TransformedDistribution(standard(case.event), [transform])
    flow = ef.Flow(case.layer, ef.distributions.StandardNormal(case.event)).double()
    x = points(name, case)
    torch.testing.assert_close(distribution.log_prob(x), flow.log_prob(x, case.context), rtol=0, atol=1e-10)
    assert distribution.event_shape == case.event
    assert distribution.sample((3,)).shape == x.shape


def test_any_number_of_batch_axes():
    case, transform = adapter("linear-exp")
    x = draw("batches", 2, 3, 4, 5)
    z = transform(x)
    assert z.shape == x.shape
    assert transform.log_abs_det_jacobian(x, z).shape == (2, 3, 4)
    torch.testing.assert_close(z.reshape(-1, 5), case.layer(x.reshape(-1, 5))[0])
    single = draw("single", 5)
    assert transform(single).shape == (5,)
    assert transform.log_abs_det_jacobian(single, transform(single)).shape == ()


def test_composition_with_torchs_own():
    _, transform = adapter("linear-exp")
    shift = torch.distributions.AffineTransform(draw("loc", 5), 2.0, event_dim=1)
    both = ComposeTransform([transform, shift])
    x = draw("x", 4, 5)
    expected = transform.log_abs_det_jacobian(x, transform(x)) + 5 * torch.tensor(2.0, dtype=F64).log()
    torch.testing.assert_close(both.log_abs_det_jacobian(x, both(x)), expected)
    torch.testing.assert_close(both.inv(both(x)), x, rtol=0, atol=1e-12)
    for cache_size in (0, 1):
        torch.testing.assert_close(both.with_cache(cache_size)(x), both(x))


SQUEEZES = {
    "squeeze": T.Squeeze(),
    "unsqueeze": T.Inverse(T.Squeeze()),
    "chain": T.Chain([T.Squeeze(), T.Flip(), T.Squeeze()]),
}


@pytest.mark.parametrize("name", SQUEEZES)
def test_layers_that_change_the_shape(name):
    """A density of moved entries is the density of the entries."""
    transform = interop.as_transform(SQUEEZES[name], event_dim=3)
    base = standard((4, 4, 8))
    distribution = TransformedDistribution(base, [transform])
    assert transform.inverse_shape(distribution.event_shape) == base.event_shape
    x = distribution.sample((3, 2))
    assert x.shape == (3, 2, *distribution.event_shape)
    assert distribution.batch_shape == ()
    torch.testing.assert_close(distribution.log_prob(x), base.log_prob(transform.inv(x)))
    assert distribution.expand((2,)).sample((3,)).shape == x.shape
    assert transform.inv.forward_shape(distribution.event_shape) == base.event_shape


def test_shapes_that_no_layer_takes_are_refused():
    transform = interop.as_transform(T.Squeeze(), event_dim=3)
    with pytest.raises(ValueError, match=r"Squeeze: Expected a height and width that 2 divides; got \(3, 4\)"):
        TransformedDistribution(standard((1, 3, 4)), [transform])
    with pytest.raises(ValueError, match="Expected events of 3 axes; got shape"):
        transform(torch.ones(2, 2))


@pytest.mark.parametrize("direction", ["call", "inverse"])
def test_copies_after_a_call_with_gradient(direction):
    layer = T.LinearExp(2).double()
    transform = interop.as_transform(layer)
    distribution = TransformedDistribution(standard((2,)), [transform])
    x = draw("x", 3, 2).requires_grad_()
    transform(x) if direction == "call" else distribution.log_prob(x).sum().backward()
    for copied in (copy.deepcopy(transform), copy.deepcopy(distribution).transforms[0]):
        torch.testing.assert_close(copied(x), transform(x))
        with torch.no_grad():
            for parameter in copied.transform.parameters():
                parameter.add_(1)
        assert not torch.allclose(copied(x), transform(x))
    torch.testing.assert_close(copy.deepcopy(distribution).log_prob(x), distribution.log_prob(x))


def test_each_pair_is_computed_once():
    calls = []

    class Counting(T.Transform):
        def _forward(self, x, context):
            calls.append("forward")
            return 2 * x, x.new_zeros(len(x))

        def _inverse(self, z, context):
            calls.append("inverse")
            return z / 2, z.new_zeros(len(z))

    transform = interop.as_transform(Counting())
    x = torch.randn(3, 2)
    transform.log_abs_det_jacobian(x, transform(x))
    assert calls == ["forward"]
    calls.clear()
    distribution = TransformedDistribution(Independent(Normal(torch.zeros(2), torch.ones(2)), 1), [transform])
    distribution.log_prob(x)
    assert calls == ["inverse"]


class TestTraining:
    """What is kept from one call to the next must not outlive the weights, or the graph it was made in."""

    def made(self):
        torch.manual_seed(0)
        layer = T.Chain([T.ActNorm(2), T.DenseSylvester(2, 8)]).double()
        randomise(layer)
        transform = interop.as_transform(T.Inverse(layer))
        return layer, TransformedDistribution(standard((2,)), [transform])

    def test_the_same_batch_again(self):
        """A full batch is the same tensor at every step."""
        layer, distribution = self.made()
        optimizer = torch.optim.Adam(layer.parameters(), lr=0.05)
        x = 3 + 0.5 * draw("data", 64, 2)
        losses = []
        for _ in range(40):
            loss = -distribution.log_prob(x).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        assert losses[-1] < losses[0] - 0.3
        assert len(set(losses)) == len(losses)

    def test_weights_changed_in_between(self):
        layer, distribution = self.made()
        x = draw("x", 4, 2)
        with torch.no_grad():
            before = distribution.log_prob(x)
            for parameter in layer.parameters():
                parameter.mul_(0.5)
            after = distribution.log_prob(x)
            flow = ef.Flow(layer, ef.distributions.StandardNormal((2,))).double()
            torch.testing.assert_close(after, flow.log_prob(x), rtol=0, atol=1e-10)
        assert (before - after).abs().max() > 1e-3

    def test_a_sample_without_gradient_has_a_likelihood_with_one(self):
        """As the score function needs: the sample is data, its likelihood depends on the weights."""
        layer, distribution = self.made()
        x = distribution.sample((8,))
        distribution.log_prob(x).sum().backward()
        expected = [p.grad.clone() for p in layer.parameters()]
        layer.zero_grad()
        distribution.log_prob(x.clone()).sum().backward()
        torch.testing.assert_close(expected, [p.grad for p in layer.parameters()], rtol=1e-9, atol=1e-10)
        assert all((grad != 0).any() for grad in expected)

    def test_a_log_determinant_asked_for_twice(self):
        """Each answer has a graph of its own."""
        layer = CASES.ready("dense-sylvester").layer
        transform = interop.as_transform(layer)
        x = draw("x", 4, 5)
        z = transform(x)
        for _ in range(2):
            transform.log_abs_det_jacobian(x, z).sum().backward()

    def test_reparametrised_samples_have_gradients(self):
        layer, distribution = self.made()
        distribution.rsample((8,)).square().sum().backward()
        assert all(p.grad is not None for p in layer.parameters())


def test_wrong_arguments():
    with pytest.raises(TypeError, match="Expected a Transform; got Linear"):
        interop.as_transform(torch.nn.Linear(2, 2))
    with pytest.raises(ValueError, match="Expected event_dim of at least 1; got 0"):
        interop.as_transform(T.Flip(), event_dim=0)
