"""Layers inside zuko's flows."""

from __future__ import annotations

import pytest
import torch
from torch.distributions import Independent, Normal

import expmflow as ef
from expmflow import interop, nn
from expmflow import transforms as T
from transform_registry import BATCH, draw, points, randomise, settle
from vector_flow_cases import CASES

zuko = pytest.importorskip("zuko")

F64 = torch.float64


def layers(names: str) -> list[T.Transform]:
    torch.manual_seed(0)
    known = {
        "exp": lambda: T.LinearExp(3),
        "sylvester": lambda: T.DenseSylvester(3, 8),
        "norm": lambda: T.ActNorm(3),
        "residual": lambda: T.ResidualBlock(nn.LipschitzMLP(3, (8,)), logdet="exact"),
    }
    made = [known[name]() for name in names.split()]
    for layer in made:
        layer.double()
        randomise(layer)
        settle(layer, draw("warm-up", 8, 3))
        layer.eval()
    return made


def base() -> Independent:
    return Independent(Normal(torch.zeros(3, dtype=F64), torch.ones(3, dtype=F64)), 1)


@pytest.mark.parametrize("names", ["exp", "sylvester", "residual", "norm exp sylvester residual"])
def test_a_composed_transform_is_a_chain(names):
    made = layers(names)
    composed = zuko.transforms.ComposedTransform(*(interop.as_transform(layer) for layer in made))
    chain = T.Chain(made)
    x = draw("x", 5, 3)
    z, logdet = chain(x)
    for value, ladj in (composed.call_and_ladj(x), (composed(x), composed.log_abs_det_jacobian(x, composed(x)))):
        torch.testing.assert_close(value, z, rtol=0, atol=1e-12)
        torch.testing.assert_close(ladj, logdet, rtol=0, atol=1e-12)
    back, ladj = composed.inv.call_and_ladj(z)
    torch.testing.assert_close(back, x, rtol=0, atol=1e-11)
    torch.testing.assert_close(ladj, -logdet, rtol=0, atol=1e-11)


@pytest.mark.parametrize("names", ["exp", "norm residual exp sylvester"])
def test_a_normalizing_flow_is_a_flow(names):
    chain = T.Chain(layers(names)).eval()
    theirs = zuko.distributions.NormalizingFlow(interop.as_transform(chain), base())
    ours = ef.Flow(chain, ef.distributions.StandardNormal((3,))).double()
    x = draw("x", 5, 3)
    torch.testing.assert_close(theirs.log_prob(x), ours.log_prob(x), rtol=0, atol=1e-12)
    sample, log_prob = theirs.rsample_and_log_prob((6,))
    torch.testing.assert_close(ours.log_prob(sample), log_prob, rtol=0, atol=1e-10)
    assert theirs.sample((2, 4)).shape == (2, 4, 3)


@pytest.mark.parametrize("name", CASES)
def test_flows_on_vectors(name):
    case = CASES.ready(name)
    zeros = torch.zeros(case.event, dtype=F64)
    normal = Independent(Normal(zeros, zeros + 1), len(case.event))
    transform = interop.as_transform(case.layer, context=case.context, event_dim=len(case.event))
    theirs = zuko.distributions.NormalizingFlow(transform, normal)
    ours = ef.Flow(case.layer, ef.distributions.StandardNormal(case.event)).double()
    x = points(name, case)
    torch.testing.assert_close(theirs.log_prob(x), ours.log_prob(x, case.context), rtol=0, atol=1e-11)
    sample, log_prob = theirs.rsample_and_log_prob((BATCH,))
    torch.testing.assert_close(ours.log_prob(sample, case.context), log_prob, rtol=0, atol=1e-9)


def test_beside_zukos_own_layers():
    """A neural spline of zuko after an exponential: the density integrates to one along with its samples."""
    torch.manual_seed(0)
    spline = zuko.flows.NSF(3, transforms=1, hidden_features=(16,)).double()
    (layer,) = layers("exp")
    transform = zuko.transforms.ComposedTransform(interop.as_transform(layer), spline().transform)
    flow = zuko.distributions.NormalizingFlow(transform, base())
    x, log_prob = flow.rsample_and_log_prob((7,))
    torch.testing.assert_close(
        flow.log_prob(x), log_prob, rtol=0, atol=1e-4
    )  # splines are inverted to float32's digits


def test_a_lazy_flow_trains():
    """As one of the transforms of `zuko.flows.Flow`, with parameters that its optimizer sees."""
    torch.manual_seed(0)
    layer = T.DenseSylvester(3, 8).double()

    class Lazy(zuko.lazy.LazyTransform):
        def __init__(self):
            super().__init__()
            self.layer = layer

        def forward(self, c=None):
            return interop.as_transform(self.layer, context=c)

    flow = zuko.lazy.Flow([Lazy()], zuko.lazy.UnconditionalDistribution(lambda: base()))
    optimizer = torch.optim.Adam(flow.parameters(), lr=0.05)
    x = 2 * draw("data", 64, 3).tanh()
    losses = []
    for _ in range(30):
        loss = -flow().log_prob(x).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.05
