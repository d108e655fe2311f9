"""Every layer is in the registry, and every case of it passes the check that is shipped to users."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

from expmflow import transforms as T
from expmflow.nn import PowerConstraint, SpectralConstraint
from expmflow.testing import check_transform
from transform_cases import CASES
from transform_registry import mapped, points, rows_of


def exported() -> set[type[T.Transform]]:
    return {getattr(T, name) for name in T.__all__} - {T.Transform, T.keyed_draws}


def test_every_exported_layer_is_in_the_registry():
    covered = {cls for make in CASES.values() for cls in type(make().layer).__mro__[:2]}  # a constraint adds a class
    assert all(issubclass(cls, T.Transform) for cls in exported())
    assert not exported() - covered


@pytest.mark.parametrize("name", CASES)
def test_the_shapes_of_events_are_known_beforehand(name):
    case = CASES.ready(name)
    z, _ = case.layer(points(name, case), case.context)
    after = tuple(z.shape[1:])
    assert case.layer.output_shape(tuple(case.event)) == after
    assert case.layer.input_shape(after) == tuple(case.event)
    assert T.Inverse(case.layer).output_shape(after) == tuple(case.event)


@pytest.mark.parametrize("name", CASES)
def test_case_keeps_every_promise(name):
    case = CASES.ready(name)
    check_transform(case.layer, points(name, case), case.context)


@pytest.mark.parametrize("name", CASES)
def test_case_keeps_every_promise_in_float32(name):
    """Inside float32 nothing falls back on float64 for its digits."""
    case = CASES.ready(name)
    context = mapped(case.context, lambda tensor: tensor.float() if tensor.is_floating_point() else tensor)
    check_transform(case.layer.float(), points(name, case).float(), context)


@pytest.mark.parametrize("name", CASES)
def test_training_pass_is_undone_by_the_inverse(name):
    """The same weights in both directions, constraints that follow the weights in training included."""
    case = CASES.ready(name)
    x = points(name, case)
    layer = case.layer.train()
    with torch.no_grad():
        z, logdet = layer(x, case.context)
        back, logdet_back = layer.inverse(z, case.context)
    torch.testing.assert_close(back, x, rtol=0, atol=1e-12)
    torch.testing.assert_close(logdet_back, -logdet, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", CASES)
def test_training_and_evaluation_are_the_same_function(name):
    case = CASES.ready(name)
    x = points(name, case)
    with torch.no_grad():
        trained = case.layer.train()(x, case.context)
        evaluated = case.layer.eval()(x, case.context)
    torch.testing.assert_close(trained, evaluated, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", CASES)
def test_an_empty_batch_stays_empty(name):
    case = CASES.ready(name)
    x, context = points(name, case)[:0], rows_of(case.context, slice(0))
    z, logdet = case.layer(x, context)
    back, logdet_back = case.layer.inverse(z, context)
    assert back.shape == x.shape
    assert logdet.shape == logdet_back.shape == (0,)


def constrained(layer: nn.Module):
    """Each weight under a norm constraint, with the norm that it may have."""
    for module in layer.modules():
        if isinstance(module, parametrize.ParametrizationList):
            for step in module:
                if isinstance(step, SpectralConstraint | PowerConstraint):
                    yield module, step


@pytest.mark.parametrize("name", CASES)
def test_constrained_weights_are_at_their_limit(name):
    """Otherwise the cases would test layers close to the identity."""
    case = CASES.ready(name)
    with torch.no_grad():
        for weight, constraint in constrained(case.layer):
            before = weight.original
            for step in list(weight)[:-1]:
                before = step(before)
            assert weight().norm() < 0.9 * before.norm(), type(constraint).__name__
