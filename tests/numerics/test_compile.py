"""`torch.compile(fullgraph=True)` with a fixed plan: one graph, the same numbers and gradients."""

from __future__ import annotations

import math

import pytest
import torch

import expmflow as ef
from operator_cases import CASES

NAMES = [
    "dense",
    "dense-batched",
    "conv2d-3x3-zeros",
    "adjoint-conv-reflect",
    "graph-dense",
    "graph-edges",
    "graph-hub",
    "function-parameters",
    "sum-conv-and-function",
]

# torch's compiler warns of its own use of torch
pytestmark = [
    pytest.mark.filterwarnings(r"ignore:<class 'torch\.autograd\.function\.Function'> should not be instantiated"),
    pytest.mark.filterwarnings(r"ignore:`torch\.jit\.script_method` is deprecated"),
]


@pytest.fixture(autouse=True)
def _forget_compilations():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compare(name: str, gradient: str, backend: str, terms) -> None:
    op, event = CASES[name](torch.float64)
    x = torch.randn(op.batch_size or 2, *event, dtype=torch.float64, requires_grad=True)
    inputs = [x, *(p for p in op.parameters if p.requires_grad)]

    def exponential(x):
        return ef.expm_apply(op, x, 0.5, terms=terms, gradient=gradient).square()

    expected = exponential(x)
    got = torch.compile(exponential, fullgraph=True, backend=backend)(x)
    torch.testing.assert_close(got, expected)
    for g, e in zip(
        torch.autograd.grad(got.sum(), inputs, retain_graph=True),
        torch.autograd.grad(expected.sum(), inputs, retain_graph=True),
        strict=True,
    ):
        torch.testing.assert_close(g, e)


@pytest.mark.parametrize("gradient", ["recompute", "autograd"])
@pytest.mark.parametrize("name", NAMES)
def test_one_graph(name, gradient):
    compare(name, gradient, "aot_eager", 4)


@pytest.mark.parametrize("gradient", ["recompute", "autograd"])
def test_a_plan_with_steps(gradient):
    compare("conv1d-3-circular", gradient, "aot_eager", ef.SeriesPlan(2, 3, math.nan))


@pytest.mark.parametrize("gradient", ["recompute", "autograd"])
def test_built_inside_the_graph(gradient):
    """As a layer does: the operator is made from its parameters at each call."""
    kernel = torch.randn(2, 2, 3, 3, dtype=torch.float64, requires_grad=True)
    x = torch.randn(2, 2, 4, 4, dtype=torch.float64, requires_grad=True)

    def layer(x):
        op = ef.ConvOperator(kernel / 3, validate=False)
        return ef.expm_apply(op, x, terms=4, gradient=gradient) + op.trace(x.shape[1:])

    expected, got = layer(x), torch.compile(layer, fullgraph=True, backend="aot_eager")(x)
    torch.testing.assert_close(got, expected)
    for g, e in zip(
        torch.autograd.grad(got.sum(), [x, kernel]), torch.autograd.grad(expected.sum(), [x, kernel]), strict=True
    ):
        torch.testing.assert_close(g, e)


def test_a_time_with_a_gradient():
    op, _ = CASES["dense"](torch.float64)
    x, t = torch.randn(2, 6, dtype=torch.float64), torch.tensor(0.5, dtype=torch.float64, requires_grad=True)

    def exponential(t):
        return ef.expm_apply(op, x, t, terms=4).sum()

    (expected,) = torch.autograd.grad(exponential(t), t)
    (got,) = torch.autograd.grad(torch.compile(exponential, fullgraph=True, backend="aot_eager")(t), t)
    torch.testing.assert_close(got, expected)


@pytest.mark.slow
@pytest.mark.parametrize("gradient", ["recompute", "autograd"])
@pytest.mark.parametrize("name", ["dense", "conv2d-3x3-zeros", "function-parameters"])
def test_inductor(name, gradient):
    compare(name, gradient, "inductor", 4)
