"""Masked networks: each output sees what comes before it, all of it, and nothing else."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from expmflow import nn
from expmflow import transforms as T
from expmflow.nn.masked import hidden_degrees, raster_mask
from transform_registry import draw, randomise

F64 = torch.float64


def sees(network, event: tuple[int, ...]) -> Tensor:
    """`(outputs, inputs)`: whether an output depends on an input, at a generic point."""
    x = draw("point", 1, *event)
    jacobian = torch.autograd.functional.jacobian(lambda x: network(x).flatten(), x)
    return jacobian.flatten(1) != 0


def raster(event: tuple[int, ...]) -> list[tuple[int, ...]]:
    """(channel, *point) of each entry of an event, in the order in which it is stored."""
    return list(itertools.product(*(range(n) for n in event)))


def before(entry: tuple[int, ...], other: tuple[int, ...]) -> bool:
    """Whether `other` comes before `entry`: an earlier point, or an earlier channel of the same."""
    return (*other[1:], other[0]) < (*entry[1:], entry[0])


@pytest.mark.parametrize("hidden", [(1,), (3,), (8,), (5, 7), (16, 16, 16)], ids=str)
@pytest.mark.parametrize("features", [1, 2, 5])
def test_made_sees_the_features_before(features, hidden):
    net = nn.MADE(features, hidden, outputs=2).double()
    randomise(net)
    seen = sees(net, (features,)).reshape(2, features, features)
    allowed = torch.ones(features, features, dtype=torch.bool).tril(-1)
    assert not (seen & ~allowed).any()
    if min(hidden) >= features:
        assert torch.equal(seen, allowed.expand(2, -1, -1))


@pytest.mark.parametrize(
    ("event", "dims"), [((2, 5), 1), ((3, 3, 3), 2), ((1, 4, 4), 2), ((2, 2, 3, 2), 3)], ids=["1d", "2d", "one", "3d"]
)
def test_inner_convolutions_are_strictly_autoregressive(event, dims):
    """All heads; and with three convolutions of which two are 3 wide, two rows back at most."""
    inner = nn.ConvInner(event[0], 2 * event[0], dims=dims).double()
    randomise(inner)

    def heads(x: Tensor) -> Tensor:
        h = torch.nn.functional.elu(inner.first(x))
        return inner.last(torch.nn.functional.elu(inner.middle(h)))

    entries = raster(event)
    seen = sees(heads, event).reshape(4, len(entries), len(entries))
    for i, j in itertools.product(range(len(entries)), repeat=2):
        if seen[:, i, j].any():
            assert before(entries[i], entries[j]), (entries[i], entries[j])
    same_point = [
        (i, j)
        for i, j in itertools.product(range(len(entries)), repeat=2)
        if entries[i][1:] == entries[j][1:] and entries[j][0] < entries[i][0]
    ]
    assert all(seen[:, i, j].all() for i, j in same_point)  # every earlier channel of its own point


def test_raster_masks_by_hand():
    """A 3×3 kernel: the row above, the left neighbour, and at the centre what the degrees allow."""
    degrees = torch.tensor([0, 1])
    strict, loose = (raster_mask(degrees, degrees, (3, 3), strict) for strict in (True, False))
    above_and_left = torch.tensor([[1.0, 1, 1], [1, 0, 0], [0, 0, 0]])
    for mask, centre in ((strict, torch.tensor([[0.0, 0], [1, 0]])), (loose, torch.tensor([[1.0, 0], [1, 1]]))):
        for out, inp in itertools.product(range(2), repeat=2):
            expected = above_and_left.clone()
            expected[1, 1] = centre[out, inp]
            assert torch.equal(mask[out, inp], expected)


def test_hidden_units_are_spread_over_all_degrees():
    assert hidden_degrees(3, 7).bincount().tolist() == [3, 2, 2]
    assert hidden_degrees(7, 3).tolist() == [0, 2, 4]  # too few for all: none of them at the end alone


def test_contexts_reach_every_output():
    """Also the first, which sees no variable."""
    for net, event, context in (
        (nn.DenseInner(3, 6, context_features=2), (3,), draw("vector", 1, 2)),
        (nn.ConvInner(2, 4, context_channels=2), (2, 2, 2), draw("map", 1, 2, 2, 2)),
    ):
        net.double()
        randomise(net)
        x = draw("x", 1, *event)
        jacobian = torch.autograd.functional.jacobian(lambda c, net=net, x=x: net(x, c)[0].flatten(), context)
        assert (jacobian.flatten(1) != 0).any(1).all()


@pytest.mark.parametrize("gamma", [0.1, 0.5, 0.99])
def test_diagonals_are_bounded_by_gamma(gamma):
    inner = nn.DenseInner(4, 8, gamma=gamma).double()
    with torch.no_grad():
        for parameter in inner.parameters():
            parameter.normal_(std=5.0)
    _, diagonal = inner(3 * draw("u", 1000, 4))
    assert gamma * 0.5 < diagonal.detach().abs().max() <= gamma


@pytest.mark.parametrize("layer", [T.DenseSylvester(4, 16), T.ConvSylvester(3, 16)], ids=["dense", "conv"])
def test_flows_start_near_the_identity(layer):
    event = (4,) if isinstance(layer, T.DenseSylvester) else (3, 6, 6)
    x = draw("start", 4, *event).float()
    z, logdet = layer(x)
    assert 0 < (z - x).detach().norm() < 0.1 * x.norm()
    (z.square().sum() - logdet.sum()).backward()
    assert all((p.grad != 0).any() for p in layer.parameters())
