"""A flow's two directions agree, lose nothing, and say where NaN began."""

from __future__ import annotations

import pytest
import torch

import expmflow as ef
from expmflow import distributions as D
from expmflow import nn
from expmflow import transforms as T
from transform_registry import draw, randomise, settle

CONTEXT = draw("flow context", 6, 2)


def vectors() -> ef.Flow:
    coupling = T.AffineCoupling(nn.MLP(2, 4, hidden=(8,), context_features=2), 4)
    chain = T.Chain([T.ActNorm(4), T.LinearExp(4), T.DenseSylvester(4, 8, context_features=2), T.Permute(4), coupling])
    return ready(ef.Flow(chain, D.DiagonalGaussian((4,))), draw("flow x", 6, 4), CONTEXT)


def images() -> ef.Flow:
    """Two levels, with a split between them."""
    prior = T.AffineCoupling(nn.DenseNet(2, 4, growth=4, depth=1), 4)
    rest = T.Chain([T.ConvExp(2), T.Squeeze(), T.ActNorm(8), T.ConvSylvester(8, 8), T.Inverse(T.Squeeze())])
    split = T.Split(rest, prior)
    chain = T.Chain([T.Squeeze(), T.ActNorm(4), T.Conv1x1(4), T.ConvExp(4), split, T.Inverse(T.Squeeze())])
    return ready(ef.Flow(chain, D.StandardNormal((1, 4, 4))), draw("flow images", 6, 1, 4, 4))


def ready(flow: ef.Flow, x: torch.Tensor, context: torch.Tensor | None = None) -> ef.Flow:
    torch.manual_seed(0)
    flow = flow.double()
    randomise(flow)
    settle(flow.transform, x, context, rounds=10)
    return flow.eval()


FLOWS = {"vectors": (vectors, CONTEXT), "images": (images, None)}


@pytest.mark.parametrize("name", FLOWS)
class TestDirections:
    def flow(self, name):
        make, context = FLOWS[name]
        return make(), context

    def test_sampled_log_probs_are_recomputed(self, name):
        flow, context = self.flow(name)
        x, log_prob = flow.sample_and_log_prob(6, context)
        torch.testing.assert_close(flow.log_prob(x, context), log_prob, rtol=0, atol=1e-10)
        assert torch.equal(flow(x, context), flow.log_prob(x, context))

    def test_encode_and_decode_lose_nothing(self, name):
        flow, context = self.flow(name)
        x = draw(f"{name} data", 6, *flow.base.event_shape)
        z = flow.encode(x, context)
        assert z[0].numel() == x[0].numel()
        torch.testing.assert_close(flow.decode(z, context), x, rtol=0, atol=1e-11)
        torch.testing.assert_close(flow.encode(flow.decode(x, context), context), x, rtol=0, atol=1e-11)

    def test_every_latent_matters(self, name):
        """Those that leave at a split too."""
        flow, context = self.flow(name)
        z = draw(f"{name} latents", 6, *flow.base.event_shape).requires_grad_()
        (grad,) = torch.autograd.grad(flow.decode(z, context).square().sum(), z)
        assert (grad != 0).all()

    def test_samples_are_decoded_noise(self, name):
        flow, context = self.flow(name)
        noise = draw(f"{name} noise", 6, *flow.base.event_shape)
        x = flow.sample(6, context, noise=noise, temperature=0.5)
        half = flow.base.rsample(6, noise=noise, temperature=0.5)
        torch.testing.assert_close(x, flow.decode(half, context), rtol=0, atol=1e-12)
        assert not x.requires_grad
        assert flow.rsample(6, context, noise=noise).requires_grad

    def test_samples_follow_the_seed_and_the_dtype(self, name):
        flow, context = self.flow(name)
        torch.manual_seed(1)
        first = flow.sample(6, context)
        torch.manual_seed(1)
        assert torch.equal(first, flow.sample(6, context))
        single = None if context is None else context.float()
        assert flow.float().sample(6, single).dtype == torch.float32

    def test_samples_of_none(self, name):
        flow, context = self.flow(name)
        x = flow.sample(0, None if context is None else context[:0])
        assert x.shape == (0, *flow.base.event_shape)


def test_each_context_has_its_own_sample():
    flow, context = vectors(), CONTEXT
    noise = draw("one noise", 1, 4).expand(6, 4)
    together = flow.sample(6, context, noise=noise)
    alone = torch.cat([flow.sample(1, context[i : i + 1], noise=noise[:1]) for i in range(6)])
    torch.testing.assert_close(together, alone, rtol=0, atol=1e-12)
    assert torch.cdist(together, together).fill_diagonal_(1).min() > 1e-3


def test_gradients_reach_every_parameter_from_both_sides():
    flow, context = vectors(), CONTEXT
    flow.log_prob(draw("flow x", 6, 4), context).sum().backward()
    assert all((p.grad != 0).any() for p in flow.parameters())
    flow.zero_grad()
    flow.rsample(6, context).square().sum().backward()
    assert all(p.grad is not None for p in flow.parameters())


PLACES = {
    "transform.layers.1 (LinearExp)": lambda flow: flow.transform.layers[1].parametrizations.weight.original,
    "transform.layers.2 (DenseSylvester)": lambda flow: flow.transform.layers[2].inner.net.last.bias,
    "transform.layers.2.basis (Householder)": lambda flow: flow.transform.layers[2].basis.vectors,
    "transform.layers.4 (AffineCoupling)": lambda flow: flow.transform.layers[4].net.layers[0].weight,
    "transform.layers.0 (ActNorm)": lambda flow: flow.transform.layers[0].shift,
}

USES = {
    "log_prob": lambda flow, context: flow.log_prob(draw("flow x", 6, 4), context),
    "encode": lambda flow, context: flow.encode(draw("flow x", 6, 4), context),
    "sample": lambda flow, context: flow.sample(6, context),
    "rsample": lambda flow, context: flow.rsample(6, context),
    "sample_and_log_prob": lambda flow, context: flow.sample_and_log_prob(6, context),
    "decode": lambda flow, context: flow.decode(draw("flow x", 6, 4), context),
}


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("layer", PLACES)
def test_the_layer_with_a_bad_weight_is_named(layer, use, training):
    flow = vectors().train(training)
    with torch.no_grad():
        PLACES[layer](flow).view(-1)[0] = torch.nan
    with pytest.raises(D.NonFiniteError) as failure:
        USES[use](flow, CONTEXT)
    assert failure.value.layer == layer
    assert layer in str(failure.value)


@pytest.mark.parametrize("use", ["log_prob", "encode", "decode"])
def test_a_bad_input_is_named(use):
    flow, x = vectors(), draw("flow x", 6, 4)
    x[3, 1] = torch.inf
    with pytest.raises(D.NonFiniteError, match="first in the input") as failure:
        getattr(flow, use)(x, CONTEXT)
    assert failure.value.layer == "the input"


def test_a_bad_base_is_named():
    flow = vectors()
    with torch.no_grad():
        flow.base.log_std[0] = torch.inf
    with pytest.raises(D.NonFiniteError, match=r"first in base \(DiagonalGaussian\)"):
        flow.log_prob(draw("flow x", 6, 4), CONTEXT)


def test_overflow_is_named_where_it_happens():
    """Weights and inputs are finite; the product of two layers is not."""
    flow = ef.Flow(T.Chain([T.ActNorm(2), T.ActNorm(2), T.LinearExp(2)]), D.StandardNormal((2,)))
    with torch.no_grad():
        for layer in list(flow.transform)[:2]:
            layer.log_scale.fill_(60.0)
    with pytest.raises(D.NonFiniteError, match=r"first in transform\.layers\.1 \(ActNorm\)"):
        flow.eval().log_prob(torch.ones(1, 2))


def test_other_mistakes_keep_their_names():
    with pytest.raises(ValueError, match=r"^ActNorm: Expected 4 channels on axis 1; got 3\.$"):
        vectors().log_prob(torch.zeros(6, 3, dtype=torch.float64), CONTEXT)
    flow = vectors()
    flow.transform.layers[2].max_iterations = 1
    with pytest.raises(ef.ConvergenceError, match=r"^DenseSylvester: "):
        flow.sample(6, CONTEXT)


def test_wrong_arguments_of_a_base():
    base = D.StandardNormal((2,))
    with pytest.raises(ValueError, match="Expected a positive temperature; got 0"):
        base.rsample(3, temperature=0)
    with pytest.raises(ValueError, match=r"Expected noise of shape \(3, 2\); got \(2, 2\)"):
        base.rsample(3, noise=torch.zeros(2, 2))
    with pytest.raises(ValueError, match="Expected the number of samples of at least 0; got -1"):
        base.rsample(-1)
