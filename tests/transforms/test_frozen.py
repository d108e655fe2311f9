"""What is kept while the weights stand still: used, equal to what it stands for, and dropped when anything changes."""

from __future__ import annotations

import copy

import pytest
import torch

import expmflow as ef
from expmflow import transforms as T
from exponential_cases import CASES
from transform_registry import draw, randomise, settle

NAMES = ["linear-exp", "conv-exp-1x1", "conv-exp", "conv-exp-power", "conv-exp-terms"]  # with and without a matrix


def layer_and_points(name: str):
    case = CASES.ready(name)
    return case.layer, draw(f"{name} frozen", 40, *case.event)


def both(layer, x):
    with torch.no_grad():
        return [layer(x), layer.inverse(x)]


def unfrozen(layer, x):
    """The same by a copy that has kept nothing."""
    fresh = copy.deepcopy(layer)
    fresh._frozen = type(fresh._frozen)()
    return both(fresh, x)


def by_data(weight):
    weight.data.mul_(-1)


def by_assignment(weight):
    weight.data = -weight.data


def in_place(weight):
    with torch.no_grad():
        weight.neg_()


def one_entry(weight):
    with torch.no_grad():
        weight.view(-1)[0] += 1e-3


def by_a_step(weight):
    weight.grad = torch.ones_like(weight)
    torch.optim.SGD([weight], lr=0.1).step()


CHANGES = [by_data, by_assignment, in_place, one_entry, by_a_step]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
@pytest.mark.parametrize("name", NAMES)
def test_a_changed_weight_is_noticed(name, change):
    layer, x = layer_and_points(name)
    before = both(layer, x)
    (weight,) = layer.parameters()
    change(weight)
    after = both(layer, x)
    torch.testing.assert_close(after, unfrozen(layer, x), rtol=0, atol=1e-12)
    assert (after[0][0] - before[0][0]).abs().max() > 1e-6
    assert (after[1][0] - before[1][0]).abs().max() > 1e-6


@pytest.mark.parametrize("name", NAMES)
def test_a_loaded_state_is_noticed(name):
    layer, x = layer_and_points(name)
    other = copy.deepcopy(layer)
    torch.manual_seed(7)
    randomise(other)
    settle(other, x)
    both(layer, x)
    layer.load_state_dict(other.state_dict())
    torch.testing.assert_close(both(layer, x), both(other.eval(), x), rtol=0, atol=1e-13)


@pytest.mark.parametrize("name", NAMES)
def test_a_moved_layer_is_noticed(name):
    """To another dtype and back: float32 has its own plan, and what comes back is what float32 has left."""
    layer, x = layer_and_points(name)
    before = both(layer, x)
    single = both(layer.float(), x.float())
    assert single[0][0].dtype == torch.float32
    torch.testing.assert_close(single[0][0].double(), before[0][0], rtol=0, atol=1e-4)
    after = both(layer.double(), x)
    torch.testing.assert_close(after, unfrozen(layer, x), rtol=0, atol=1e-12)
    assert (after[0][0] - before[0][0]).abs().max() > 0  # the weights were rounded


@pytest.mark.parametrize("name", NAMES)
def test_training_in_between_is_noticed(name):
    layer, x = layer_and_points(name)
    both(layer, x)
    layer.train()
    for _ in range(3):
        in_place(next(layer.parameters()))
        layer(x)
    torch.testing.assert_close(both(layer.eval(), x), unfrozen(layer, x), rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", NAMES)
def test_with_and_without_gradients_agree(name):
    layer, x = layer_and_points(name)
    frozen = both(layer, x)
    with_gradients = [layer(x), layer.inverse(x)]
    assert with_gradients[0][0].requires_grad
    torch.testing.assert_close(with_gradients, frozen, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", NAMES)
def test_what_is_returned_may_be_written_to(name):
    layer, x = layer_and_points(name)
    first = both(layer, x)
    kept = [(z.clone(), logdet.clone()) for z, logdet in first]
    for z, _ in first:
        z.zero_()
    torch.testing.assert_close(both(layer, x), kept, rtol=0, atol=0)


def test_bounds_are_computed_once(monkeypatch):
    """Not at every call; again for another size, another direction, other weights."""
    layer, x = layer_and_points("conv-exp")
    calls = []
    original = ef.ConvOperator._norm_bound

    def count(self, event_shape):
        calls.append(event_shape)
        return original(self, event_shape)

    monkeypatch.setattr(ef.ConvOperator, "_norm_bound", count)
    for _ in range(3):
        both(layer, x)
    once = len(calls)
    assert once in (1, 2)
    both(layer, draw("another size", 2, 2, 6, 6))
    assert len(calls) > once
    again = len(calls)
    in_place(next(layer.parameters()))
    both(layer, x)
    assert len(calls) > again


def test_small_events_use_the_matrix(monkeypatch):
    """exp(A) is formed once, for each direction, where it is cheaper than the series."""
    layer, x = layer_and_points("conv-exp-1x1")
    both(layer, x)
    monkeypatch.setattr(ef.ConvOperator, "apply", None)  # any product with A would fail
    both(layer, x)


def test_a_conditional_chain_is_frozen_too():
    """A context that the layer does not need does not cost it what it keeps."""
    layer, x = layer_and_points("conv-exp-1x1")
    context = torch.ones(len(x), 2, dtype=torch.float64)
    chain = T.Chain([layer]).eval()
    with torch.no_grad():
        chain(x, context)
        expected = chain(x, context)
        assert torch.equal(expected[0], chain(x)[0])
    assert layer._frozen._plans


def test_functional_parameters_are_noticed():
    """As in meta-learning or ensembles: other weights without touching the module's own."""
    layer, x = layer_and_points("conv-exp")
    before = both(layer, x)[0]
    with torch.no_grad():
        called = torch.func.functional_call(layer, {name: -value for name, value in layer.named_parameters()}, (x,))
        twin = copy.deepcopy(layer)
        in_place(next(twin.parameters()))
    torch.testing.assert_close(called, unfrozen(twin, x)[0], rtol=0, atol=1e-12)
    torch.testing.assert_close(both(layer, x)[0], before, rtol=0, atol=0)
    assert (called[0] - before[0]).abs().max() > 1e-3


def test_another_number_of_terms_is_another_series():
    layer, x = T.ConvExp(2).eval(), draw("x", 3, 2, 4, 4).float()
    randomise(layer)
    with torch.no_grad():
        whole = layer(x)[0]
        layer.terms, layer.tol = 1, None
        torch.testing.assert_close(layer(x)[0], x + layer.operator()(x))
        layer.terms, layer.tol = None, 1e-1
        coarse = layer(x)[0]
        layer.tol = None
        assert torch.equal(layer(x)[0], whole)
    assert not torch.equal(coarse, whole)


def test_a_layer_over_batches_of_batches():
    layer, x = T.ConvExp(2).eval(), draw("x", 5, 3, 2, 4, 4).float()
    randomise(layer)
    each = torch.func.vmap(lambda y: layer(y)[0])(x)
    torch.testing.assert_close(each, layer(x.flatten(0, 1))[0].unflatten(0, (5, 3)))
