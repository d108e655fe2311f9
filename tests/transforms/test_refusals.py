"""What a layer refuses: a `ValueError` that says which layer, what it expected and what it got."""

from __future__ import annotations

import pytest
import torch

from expmflow import nn
from expmflow import transforms as T
from transform_cases import CASES
from transform_registry import BATCH, draw, points

DIRECTIONS = ["forward", "inverse"]
WRONG_CONTEXTS = [(name, i) for name, make in CASES.items() for i in range(len(make().wrong_contexts))]
WITH_CONTEXT = [name for name, make in CASES.items() if isinstance(make().context, torch.Tensor)]
TAKES_ANY_EVENT = {"flip", "chain-empty"}


def sentence(culprit: str) -> str:
    return rf"^({culprit}): Expected .+; got .+\.$"


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("name", sorted(CASES.keys() - TAKES_ANY_EVENT))
def test_wrong_channels(name, direction):
    case = CASES.ready(name)
    start = torch.zeros(BATCH, *case.wrong_event, dtype=torch.float64)
    with pytest.raises(ValueError, match=sentence(case.culprit)):
        getattr(case.layer, direction)(start, case.context)


@pytest.mark.parametrize("name", sorted(TAKES_ANY_EVENT))
def test_layers_that_take_any_event(name):
    case = CASES.ready(name)
    assert case.wrong_event is None
    x = draw(name, BATCH, 2, 5, 4)
    assert torch.equal(case.layer.inverse(case.layer(x)[0])[0], x)


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize(("name", "which"), WRONG_CONTEXTS)
def test_wrong_context(name, which, direction):
    case = CASES.ready(name)
    context = case.wrong_contexts[which]
    with pytest.raises(ValueError, match=sentence(case.culprit)):
        getattr(case.layer, direction)(points(name, case), context)


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("name", CASES)
def test_input_that_is_not_finite(name, value, direction):
    case = CASES.ready(name)
    x = points(name, case)
    x[1].view(-1)[0] = value
    with pytest.raises(
        ValueError, match=rf"^{case.name}: Expected the input to be finite; got NaN or infinity in it\.$"
    ):
        getattr(case.layer, direction)(x, case.context)


@pytest.mark.parametrize("x", [torch.zeros(4), torch.tensor(1.0)], ids=["vector", "scalar"])
def test_input_without_a_batch(x):
    with pytest.raises(ValueError, match=r"^Flip: Expected an input of shape \(batch, \*event\); got "):
        T.Flip()(x)


@pytest.mark.parametrize("x", [[[1.0, 2.0]], torch.zeros(2, 4, dtype=torch.int64)], ids=["list", "integers"])
def test_input_of_another_kind(x):
    with pytest.raises(TypeError, match=r"^Flip: Expected the input "):
        T.Flip()(x)


@pytest.mark.parametrize("name", ["linear-exp", "conv-sylvester", "graph-exp", "actnorm", "chain-multiscale"])
def test_input_of_another_dtype(name):
    case = CASES.ready(name)
    with pytest.raises(
        TypeError, match=r"^\w+: Expected an input of dtype torch.float64, as the layer; got torch.float32"
    ):
        case.layer(points(name, case).float(), case.context)


@pytest.mark.parametrize("name", WITH_CONTEXT)
def test_context_of_another_dtype(name):
    """One-hot classes are integers as torch makes them."""
    case = CASES.ready(name)
    with pytest.raises(
        TypeError, match=rf"^({case.culprit}): Expected an? .+ of dtype torch.float64, .+ torch.int64\.$"
    ):
        case.layer(points(name, case), case.context.long())


@pytest.mark.parametrize("context", [torch.ones(4, 4), (torch.ones(4, 4), torch.ones(2, 4, dtype=torch.bool))])
def test_graph_of_another_dtype(context):
    layer, x = T.GraphConvExp(2).double(), draw("graph dtype", 2, 4, 2)
    with pytest.raises(TypeError, match=r"^GraphConvExp: Expected .*float64.*; got torch.float32"):
        layer(x, context)


def test_networks_that_do_not_fit_their_coupling():
    with pytest.raises(ValueError, match=r"^AffineCoupling: Expected 4 channels from the network; got 3\.$"):
        T.AffineCoupling(nn.MLP(2, 3), 4)(torch.zeros(1, 4))


def test_levels_that_do_not_keep_the_shape():
    level = T.Split(T.Squeeze(), None)
    with pytest.raises(ValueError, match=r"^Split: Expected a rest that keeps the shape; got \(4, 1, 1\)\.$"):
        level(torch.zeros(1, 2, 2, 2))


CONSTRUCTIONS = {
    "coeff": (lambda: T.ConvExp(2, coeff=0.0), "a positive coeff"),
    "tol and terms": (lambda: T.LinearExp(2, tol=1e-3, terms=4), "either tol or terms"),
    "even kernel": (lambda: T.ConvExp(2, 4), "odd"),
    "padding": (lambda: T.ConvExp(2, padding="same"), "padding to be one of"),
    "groups": (lambda: T.ConvExp(3, groups=2), "groups that divide 3"),
    "norm": (lambda: T.ConvExp(2, norm="frobenius"), "norm to be 'spectral' or 'power'"),
    "skew reflection": (lambda: T.ConvExp(2, skew=True, padding="reflect"), "zeros or circular padding for a skew"),
    "gamma": (lambda: T.DenseSylvester(2, 4, gamma=1.0), "gamma between 0 and 1"),
    "hidden": (lambda: T.DenseSylvester(2, []), "at least one hidden layer"),
    "inner activation": (
        lambda: T.ConvSylvester(2, 4, activation="tanh"),
        "activation to be one of elu, relu",
    ),
    "max_iterations": (lambda: T.DenseSylvester(2, 4, max_iterations=0), "max_iterations of at least 1"),
    "parametrization": (lambda: T.Conv1x1(2, "qr"), "parametrization to be 'lu' or 'free'"),
    "dim": (lambda: T.ActNorm(2, dim=2), "the channels on axis 1 or -1"),
    "reflections": (lambda: T.Householder(2, 0), "reflections of at least 1"),
    "permutation": (lambda: T.Permute([0, 2]), "a permutation"),
    "factor": (lambda: T.Squeeze(0), "factor of at least 1"),
    "flipped batch": (lambda: T.Flip([0, 1]), "axes of the event"),
    "one channel": (lambda: T.AffineCoupling(nn.MLP(1, 2), 1), "channels of at least 2"),
    "emerging kernel": (lambda: T.Emerging(2, 4), "an odd kernel_size"),
    "emerging 1x1": (lambda: T.Emerging(2, conv1x1=T.Conv1x1(3)), "a 1×1 of 2 channels"),
    "emerging nodes": (lambda: T.Emerging(2, conv1x1=T.Conv1x1(2, dim=-1)), "a 1×1 on axis 1"),
    "no rank": (lambda: T.Woodbury(2, 4, 4, 0, 0), "a channel_rank or a spatial_rank of at least 1"),
    "negative rank": (lambda: T.Woodbury(2, 4, 4, -1, 2), "channel_rank of at least 0"),
    "no height": (lambda: T.Woodbury(2, 0, 4, 1, 2), "height of at least 1"),
    "periodic kernel": (lambda: T.PeriodicConv(2, 2), "an odd kernel_size"),
    "neighbours": (lambda: T.GraphConvExp(2, max_neighbours=0), "max_neighbours of at least 1"),
    "activation": (lambda: nn.MLP(2, 2, activation="cube"), "activation to be one of"),
}


@pytest.mark.parametrize("name", CONSTRUCTIONS)
def test_wrong_arguments(name):
    make, message = CONSTRUCTIONS[name]
    with pytest.raises(ValueError, match=f"^Expected .*{message}.*; got "):
        make()
