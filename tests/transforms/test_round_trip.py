"""Float32 through stacks of twenty layers and back, and how many iterations an inverse takes, at trained-like weights.

Trained-like: convolutions at their norm limits, heads of order one. What is documented of these is asserted here.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.utils import parametrize

import expmflow as ef
from expmflow import transforms as T
from transform_registry import randomise, settle

SHAPE, HIDDEN = (12, 8, 8), 64
LARGEST_ERROR = 1e-4  # relative, of the worst row
MOST_ITERATIONS = 15  # at 1e-4, where the paper counts up to 50, and at float32's own tolerance, 7.6e-6
MOST_ITERATIONS_TRAINED = 30  # training finds weights that random ones are not


def stack(make, depth: int) -> tuple[T.Chain, Tensor]:
    """Layers with weights of their own, each settled on what the ones before it make of the data."""
    torch.manual_seed(0)
    chain = T.Chain([make() for _ in range(depth)])
    randomise(chain)
    x = torch.randn(4, *SHAPE)
    h = x
    for layer in chain:
        settle(layer, h, rounds=15)
        with torch.no_grad():
            h, _ = layer.eval()(h)
    return chain.eval(), x


def check_round_trip(make) -> None:
    chain, x = stack(make, 20)
    with torch.no_grad():
        z, logdet = chain(x)
        back, logdet_back = chain.inverse(z)
    assert z.dtype == torch.float32
    error = ((back - x).flatten(1).norm(dim=1) / x.flatten(1).norm(dim=1)).max()
    assert error <= LARGEST_ERROR
    torch.testing.assert_close(logdet_back, -logdet, rtol=1e-5, atol=1e-3)
    assert (z - x).flatten(1).norm(dim=1).min() > x.flatten(1).norm(dim=1).max()  # far from where it started


def test_twenty_exponentials():
    check_round_trip(lambda: T.ConvExp(SHAPE[0]))


@pytest.mark.slow
def test_twenty_sylvester_flows():
    check_round_trip(lambda: T.ConvSylvester(SHAPE[0], HIDDEN, lipschitz=1.5))


def gaussian(weight: Tensor) -> None:
    weight.normal_()


def positive(weight: Tensor) -> None:
    """Every path through the network adds up: the norm limit is reached by smooth images."""
    weight.normal_().abs_()


def constant(weight: Tensor) -> None:
    weight.fill_(1.0)


@pytest.mark.parametrize("tol", [1e-4, None], ids=["1e-4", "default"])
@pytest.mark.parametrize("gamma", [0.5, 0.9])
@pytest.mark.parametrize("kind", [gaussian, positive, constant], ids=lambda kind: kind.__name__)
def test_iterations(kind, gamma, tol):
    torch.manual_seed(0)
    layer = T.ConvSylvester(SHAPE[0], HIDDEN, gamma=gamma, lipschitz=1.5, tol=tol)
    randomise(layer)
    with torch.no_grad():
        for module in layer.inner.modules():
            if isinstance(module, parametrize.ParametrizationList):
                kind(module.original)
    x = torch.randn(8, *SHAPE)
    settle(layer, x)
    with torch.no_grad():
        z, _ = layer.eval()(x)
        back, _ = layer.inverse(z)
        v, _ = layer.basis(z)
        plain = ef.fixed_point(lambda u: layer.inner(u)[0], v, tol=layer.tol)
    assert layer.last_iterations <= MOST_ITERATIONS
    assert layer.last_iterations <= plain.iterations
    assert (back - x).abs().max() <= (2e-3 if tol else 2e-4)


@pytest.mark.slow
def test_iterations_of_trained_layers():
    """Maximum likelihood on smooth images, at a learning rate that moves the weights."""
    torch.manual_seed(0)
    chain = T.Chain([T.ActNorm(SHAPE[0]), *(T.ConvSylvester(SHAPE[0], HIDDEN) for _ in range(3))])
    flow = ef.Flow(chain, ef.distributions.StandardNormal(SHAPE))
    optimizer = torch.optim.Adam(flow.parameters(), lr=3e-3)
    first = last = 0.0
    for step in range(120):
        noise = torch.randn(8, SHAPE[0], 10, 10)
        x = torch.nn.functional.avg_pool2d(noise, 3, stride=1) * (1 + torch.rand(8, 1, 1, 1)) ** 2
        loss = -flow(x).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        first, last = (loss.item(), 0.0) if step == 1 else (first, loss.item())
    assert last < first - 50  # it has learned something
    flow.eval()
    with torch.no_grad():
        z = flow.encode(x)
        back = flow.decode(z)
        flow.sample(8)
    assert max(layer.last_iterations for layer in list(chain)[1:]) <= MOST_ITERATIONS_TRAINED
    assert (back - x).norm() <= LARGEST_ERROR * x.norm()


LINEAR = {
    "emerging": lambda: T.Emerging(SHAPE[0]),
    "periodic": lambda: T.PeriodicConv(SHAPE[0]),
    "woodbury": lambda: T.Chain([T.Conv1x1(SHAPE[0]), T.Woodbury(*SHAPE, 4, 24)]),
}


@pytest.mark.parametrize("name", LINEAR)
def test_trained_linear_layers(name):
    """Maximum likelihood on smooth images, which linear layers make white; float32 there and back."""
    torch.manual_seed(0)
    chain = T.Chain([T.ActNorm(SHAPE[0]), *(LINEAR[name]() for _ in range(4))])
    flow = ef.Flow(chain, ef.distributions.StandardNormal(SHAPE))
    optimizer = torch.optim.Adam(flow.parameters(), lr=1e-2)
    losses = []
    for _ in range(40):
        x = torch.nn.functional.avg_pool2d(torch.randn(8, SHAPE[0], 10, 10), 3, stride=1)
        loss = -flow(x).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[1] - 50  # it has learned something
    flow.eval()
    with torch.no_grad():
        back = flow.decode(flow.encode(x))
        z, logdet = chain(x)
        single, logdet_back = chain.inverse(z)
        exact, exact_logdet = chain.double()(x.double())
    assert (back - x).norm() <= LARGEST_ERROR * x.norm()
    torch.testing.assert_close(single, back)
    torch.testing.assert_close(logdet_back, -logdet, rtol=1e-5, atol=1e-3)
    torch.testing.assert_close(z.double(), exact, rtol=0, atol=1e-3)
    torch.testing.assert_close(logdet.double(), exact_logdet, rtol=1e-5, atol=1e-3)
