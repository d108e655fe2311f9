"""Gradients: of the input in both directions, and of every parameter."""

from __future__ import annotations

import pytest
import torch

from transform_cases import CASES
from transform_registry import draw, points, rows_of
from vector_flow_cases import AMORTIZED

WITHOUT_PARAMETERS = {
    "squeeze",
    "squeeze-by-three",
    "flip",
    "flip-one-axis",
    "permute",
    "permute-random-nodes",
    "chain-empty",
    *AMORTIZED,
}


def loss(name, result):
    """A number that depends on every entry of the output and on each log-determinant."""
    out, logdet = result
    return (out * draw(f"{name} weights", *out.shape)).sum() + (logdet * draw(f"{name} logdet", *logdet.shape)).sum()


@pytest.mark.parametrize("name", sorted(WITHOUT_PARAMETERS))
def test_layers_that_only_move_entries_or_are_amortised_have_no_parameters(name):
    assert not list(CASES[name]().layer.parameters())


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("direction", ["forward", "inverse"])
@pytest.mark.parametrize("name", sorted(CASES.keys() - WITHOUT_PARAMETERS))
def test_every_parameter_gets_a_gradient(name, direction, training):
    case = CASES.ready(name)
    layer = case.layer.train(training)
    loss(name, getattr(layer, direction)(outputs(case, points(name, case), direction), case.context)).backward()
    for parameter_name, parameter in layer.named_parameters():
        assert parameter.grad is not None, parameter_name
        assert torch.isfinite(parameter.grad).all(), parameter_name
        if parameter_name not in case.idle:
            assert parameter.grad.abs().max() > 1e-9, parameter_name


def outputs(case, x, direction):
    """Where a direction starts: points, or what the layer makes of them."""
    if direction == "forward":
        return x
    with torch.no_grad():
        return case.layer(x, case.context)[0]


@pytest.mark.parametrize("direction", ["forward", "inverse"])
@pytest.mark.parametrize("name", CASES)
def test_gradient_of_the_input_is_that_of_finite_differences(name, direction):
    case = CASES.ready(name)
    start = outputs(case, points(name, case), direction)[:2].clone().requires_grad_()
    context = rows_of(case.context, slice(2))
    assert torch.autograd.gradcheck(lambda x: getattr(case.layer, direction)(x, context), start, fast_mode=True)


@pytest.mark.parametrize("name", CASES)
def test_training_and_evaluation_have_the_same_gradients(name):
    case = CASES.ready(name)
    found = []
    for training in (True, False):
        x = points(name, case).requires_grad_()
        layer = case.layer.train(training)
        layer.zero_grad()
        loss(name, layer(x, case.context)).backward()
        found.append([x.grad, *(p.grad for p in layer.parameters())])
    torch.testing.assert_close(found[0], found[1], rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("name", CASES)
def test_inverse_has_the_inverse_gradient(name):
    """x ↦ z ↦ x has the identity for its Jacobian, and does not depend on the parameters."""
    case = CASES.ready(name)
    x = points(name, case).requires_grad_()
    z, logdet = case.layer(x, case.context)
    back, logdet_back = case.layer.inverse(z, case.context)
    weights = draw(f"{name} weights", *x.shape)
    total = (back * weights).sum() + ((logdet + logdet_back) * draw(f"{name} logdet", len(x))).sum()
    grad_x, *rest = torch.autograd.grad(total, [x, *case.layer.parameters()], materialize_grads=True)
    torch.testing.assert_close(grad_x, weights, rtol=1e-9, atol=1e-10)
    for grad in rest:
        assert grad.abs().max() < 1e-9
