"""Layers inside `torch.func`, `torch.jit.trace` and half precision: right, or refused with a sentence."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor
from torch.func import functional_call, jacrev, vmap

import expmflow as ef
from expmflow import transforms as T
from transform_cases import CASES
from transform_registry import mapped, points

# one of each layer, and the ways in which Sylvester layers differ
FIRST = {type(CASES[name]().layer).__name__: name for name in reversed(list(CASES))}
NAMES = sorted({*FIRST.values(), *(name for name in CASES if "sylvester" in name and "amortised" not in name)})


def outcome(run) -> tuple[str, object]:
    """Its result, or the sentence that it was refused with."""
    try:
        return "", run()
    except (TypeError, ValueError) as error:
        assert "Expected " in str(error)  # noqa: PT017
        assert str(error).count("\n") == 0  # noqa: PT017
        return str(error), None


@pytest.mark.parametrize("direction", ["forward", "inverse"])
@pytest.mark.parametrize("name", NAMES)
def test_many_batches_at_once_are_each_of_them(name, direction):
    case = CASES.ready(name)
    layer = case.layer.eval()
    x = points(name, case)
    rows = x if direction == "forward" else layer(x, case.context)[0].detach()
    many = torch.stack([rows, 0.5 * rows])
    run = getattr(layer, direction)
    refused, found = outcome(lambda: vmap(lambda each: run(each, case.context))(many))
    if refused:
        assert isinstance(layer, T.ResidualBlock) or "ResidualBlock" in refused
        return
    for k, each in enumerate(many):
        for one, other in zip(found, run(each, case.context), strict=True):
            torch.testing.assert_close(one[k], other, rtol=0, atol=1e-10)


SYLVESTER = [name for name in NAMES if "sylvester" in name and "graph" not in name and "original" not in name]


@pytest.mark.parametrize("name", SYLVESTER)
def test_jacobians_of_inverses_are_inverse_jacobians(name):
    case = CASES.ready(name)
    layer, x = case.layer.eval(), points(name, case)[:1]
    context = mapped(case.context, lambda tensor: tensor[:1])
    z, logdet = layer(x, context)
    size = x.numel()
    there = jacrev(lambda x: layer(x, context)[0])(x).reshape(size, size)
    back = jacrev(lambda z: layer.inverse(z, context)[0])(z.detach()).reshape(size, size)
    torch.testing.assert_close(there @ back, torch.eye(size, dtype=x.dtype), rtol=0, atol=1e-9)
    torch.testing.assert_close(torch.linalg.slogdet(back).logabsdet, -logdet[0])


@pytest.mark.parametrize("name", ["linear-exp", "conv-exp", "dense-sylvester", "conv-sylvester"])
def test_many_weights_at_once_are_each_of_them(name):
    case = CASES.ready(name)
    layer, x = case.layer.eval(), points(name, case)
    weights = {key: torch.stack([value, 0.3 * value]).detach() for key, value in layer.named_parameters()}

    def run(parameters: dict[str, Tensor]) -> Tensor:
        return functional_call(layer, parameters, (x,))[0]

    together = vmap(run)(weights)
    for k, one in enumerate(together):
        torch.testing.assert_close(one, run({key: value[k] for key, value in weights.items()}), rtol=0, atol=1e-11)


def test_norms_that_are_followed_are_of_one_weight():
    layer = T.ConvExp(2).double().train()
    weights = {key: torch.stack([value, value]) for key, value in layer.named_parameters()}
    with pytest.raises(ValueError, match=r"Expected one weight to follow in training; got many inside torch\.vmap"):
        vmap(lambda p: functional_call(layer, p, (torch.ones(1, 2, 4, 4).double(),))[0])(weights)


@pytest.mark.parametrize("dtype", [torch.bfloat16], ids=str)
@pytest.mark.parametrize("direction", ["forward", "inverse"])
@pytest.mark.parametrize("name", NAMES)
def test_half_precision_works_or_is_refused(name, direction, dtype):
    case = CASES.ready(name)
    context = mapped(case.context, lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor)
    x = points(name, case)
    x = (x if direction == "forward" else case.layer(x, case.context)[0].detach()).to(dtype)
    layer = case.layer.to(dtype).eval()
    refused, found = outcome(lambda: getattr(layer, direction)(x, context))
    if refused:
        assert refused.endswith(f"got {dtype}.")
        assert "torch.float32" in refused
    else:
        assert found[0].dtype == dtype
        assert bool(found[0].isfinite().all())


def test_the_layer_that_has_no_half_precision_is_named():
    layer = T.ConvSylvester(2, 4).to(torch.bfloat16)
    message = (
        r"^\w+: Expected an input and weights of dtype torch\.float32 or torch\.float64, .* got torch\.bfloat16\.$"
    )
    with pytest.raises(TypeError, match=message):
        layer(torch.ones(1, 2, 4, 4, dtype=torch.bfloat16))


@pytest.mark.parametrize("direction", ["forward", "inverse"])
@pytest.mark.parametrize("name", sorted(FIRST.values()))
def test_a_trace_holds_for_other_inputs_or_is_refused(name, direction):
    case = CASES.ready(name)
    if case.context is not None and not isinstance(case.context, Tensor):
        pytest.skip("torch.jit.trace takes tensors alone")
    layer = (case.layer if direction == "forward" else T.Inverse(case.layer)).eval()
    x = points(name, case)
    x = x if direction == "forward" else case.layer(x, case.context)[0].detach()
    inputs = (x,) if case.context is None else (x, case.context)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # tracing warns of every shape that it reads
        refused, traced = outcome(lambda: torch.jit.trace(layer, inputs))
        if refused:
            assert "Expected no torch.jit.trace around" in refused
            return
        other = (0.5 * x - 0.1, *inputs[1:])
        with torch.no_grad():
            for one, expected in zip(traced(*other), layer(*other), strict=True):
                torch.testing.assert_close(one, expected, rtol=0, atol=1e-10)


@pytest.mark.filterwarnings("ignore")
def test_traces_of_training_and_of_exponentials_are_refused():
    x, op = torch.ones(1, 2), ef.DenseOperator(torch.eye(2))
    traced = {
        "a layer in training mode": T.ActNorm(2),
        "an exponential, whose": T.LinearExp(2).eval(),
        "an exponential": lambda x: ef.expm_apply(op, x),
    }
    for reason, run in traced.items():
        with pytest.raises(ValueError, match=rf"Expected no torch\.jit\.trace around {reason}.*; got one"):
            torch.jit.trace(run, x)
