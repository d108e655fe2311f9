"""Layers, as they are, inside nflows' flows."""

from __future__ import annotations

import pytest
import torch

import expmflow as ef
from expmflow import nn
from expmflow import transforms as T
from transform_registry import BATCH, draw, points, randomise, settle
from vector_flow_cases import CASES

pytest.importorskip("nflows")

from nflows.distributions.normal import StandardNormal
from nflows.flows.base import Flow
from nflows.transforms.base import CompositeTransform
from nflows.transforms.permutations import ReversePermutation


def ready(layer: T.Transform, event: tuple[int, ...], context: torch.Tensor | None = None) -> T.Transform:
    torch.manual_seed(0)
    randomise(layer)
    settle(layer, draw("warm-up", 4, *event).float(), context)
    return layer.eval()


def residual() -> T.ResidualBlock:
    return T.ResidualBlock(nn.LipschitzConvNet(4, 8), logdet="exact")


def test_vectors():
    chain = ready(T.Chain([T.ActNorm(3), T.LinearExp(3), T.DenseSylvester(3, 8)]), (3,))
    theirs, ours = Flow(chain, StandardNormal([3])), ef.Flow(chain, ef.distributions.StandardNormal((3,)))
    x = draw("x", 5, 3).float()
    torch.testing.assert_close(theirs.log_prob(x), ours.log_prob(x))
    torch.testing.assert_close(theirs.transform_to_noise(x), ours.encode(x))
    sample, log_prob = theirs.sample_and_log_prob(6)
    torch.testing.assert_close(ours.log_prob(sample), log_prob, rtol=0, atol=1e-4)


def test_images():
    chain = ready(
        T.Chain([T.Squeeze(), T.ConvExp(4), T.ConvSylvester(4, 8), T.TriangularConvSylvester(4), residual()]), (1, 4, 4)
    )
    theirs, ours = Flow(chain, StandardNormal([4, 2, 2])), ef.Flow(chain, ef.distributions.StandardNormal((4, 2, 2)))
    x = draw("images", 5, 1, 4, 4).float()
    torch.testing.assert_close(theirs.log_prob(x), ours.log_prob(x))
    assert theirs.sample(3).shape == (3, 1, 4, 4)


def test_contexts():
    """nflows repeats the rows of a context for each of their samples."""
    context = draw("context", 4, 2).float()
    layer = ready(T.DenseSylvester(3, 8, context_features=2), (3,), context)
    theirs, ours = Flow(layer, StandardNormal([3])), ef.Flow(layer, ef.distributions.StandardNormal((3,)))
    x = draw("x", 4, 3).float()
    torch.testing.assert_close(theirs.log_prob(x, context), ours.log_prob(x, context))
    sample, log_prob = theirs.sample_and_log_prob(5, context)
    assert sample.shape == (4, 5, 3)
    torch.testing.assert_close(ours.log_prob(sample[:, 2], context), log_prob[:, 2], rtol=0, atol=1e-3)


@pytest.mark.parametrize("name", CASES)
def test_flows_on_vectors(name):
    case = CASES.ready(name)
    layer, x = case.layer.float(), points(name, case).float()
    context = None if case.context is None else case.context.float()
    theirs, ours = Flow(layer, StandardNormal(case.event)), ef.Flow(layer, ef.distributions.StandardNormal(case.event))
    torch.testing.assert_close(theirs.log_prob(x, context), ours.log_prob(x, context))
    sample, log_prob = theirs.sample_and_log_prob(2, context)
    if context is not None:  # for each of its rows two samples
        assert sample.shape == (BATCH, 2, *case.event)
        sample, log_prob = sample[:, 1], log_prob[:, 1]
    torch.testing.assert_close(ours.log_prob(sample, context), log_prob, rtol=0, atol=1e-4)


def test_beside_nflows_own_layers():
    coupling = ready(T.AffineCoupling(nn.MLP(1, 4, hidden=(6,)), 3), (3,))
    composed = CompositeTransform([coupling, ReversePermutation(3), ready(T.LinearExp(3), (3,))])
    x = draw("x", 5, 3).float()
    z, logdet = composed(x)
    back, logdet_back = composed.inverse(z)
    torch.testing.assert_close(back, x, rtol=0, atol=1e-5)
    torch.testing.assert_close(logdet_back, -logdet, rtol=0, atol=1e-5)


def test_training():
    torch.manual_seed(0)
    flow = Flow(T.Chain([T.ActNorm(2), T.DenseSylvester(2, 8)]), StandardNormal([2]))
    optimizer = torch.optim.Adam(flow.parameters(), lr=0.03)
    x = 3 + torch.randn(64, 2) * torch.tensor([0.2, 2.0])
    losses = []
    for _ in range(40):
        loss = -flow.log_prob(x).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.02
