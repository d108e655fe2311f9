"""Every operator is in the registry, and every case of it passes the check that is shipped to users."""

from __future__ import annotations

from collections.abc import Iterator
from inspect import isabstract

import pytest
import torch

import expmflow as ef
from expmflow import operators
from expmflow.operators.diffusion import Diffusion
from expmflow.testing import check_operator
from operator_cases import CASES

DTYPES = [torch.float64, torch.float32]


def parts(op: ef.LinearOperator) -> Iterator[ef.LinearOperator]:
    """An operator and the operators it is made of."""
    yield op
    for name in ("inner", "first", "second"):
        if hasattr(op, name):
            yield from parts(getattr(op, name))


def concrete(base: type[ef.LinearOperator]) -> Iterator[type[ef.LinearOperator]]:
    for cls in base.__subclasses__():
        yield from concrete(cls)
        if cls.__module__.startswith("expmflow.") and not isabstract(cls):
            yield cls


def exported(module: object) -> set[type[ef.LinearOperator]]:
    objects = [getattr(module, name) for name in module.__all__]
    classes = {o for o in objects if isinstance(o, type) and issubclass(o, ef.LinearOperator)}
    return classes - {ef.LinearOperator}


def test_every_operator_is_in_the_registry():
    covered = {type(part) for make in CASES.values() for part in parts(make(torch.float64)[0])}
    unbatched = {Diffusion}  # inside the heat kernel: its event is the whole graph; tests/numerics/test_heat.py has it
    missing = (exported(ef) | exported(operators) | set(concrete(ef.LinearOperator))) - covered - unbatched
    assert not missing


def test_the_package_exports_every_operator_of_the_operators():
    assert exported(operators) == exported(ef) != set()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_case_keeps_every_promise(name, dtype, default_dtype):
    default_dtype(dtype)  # for functions without parameters
    op, event_shape = CASES[name](dtype)
    check_operator(op, event_shape)


@pytest.mark.parametrize("gradient", ["recompute", "autograd"])
@pytest.mark.parametrize("name", CASES)
def test_what_inference_mode_leaves_behind_can_be_trained_with(name, gradient):
    (used, event_shape), (fresh, _) = CASES[name](torch.float64), CASES[name](torch.float64)
    x = torch.linspace(-1, 1, (used.batch_size or 2) * torch.Size(event_shape).numel(), dtype=torch.float64)
    x = x.reshape(-1, *event_shape)
    with torch.inference_mode():
        for op in (used, used.adjoint()):
            ef.expm_apply(op, x, terms=3, gradient=gradient)
    gradients = []
    for op in (used, fresh):
        leaf = x.clone().requires_grad_()
        results = [ef.expm_apply(part, leaf, terms=3, gradient=gradient) for part in (op, op.adjoint())]
        torch.stack(results).square().sum().backward()
        gradients.append(leaf.grad)
    torch.testing.assert_close(*gradients, rtol=0, atol=0)


def test_parameters_need_a_gradient_somewhere():
    """Otherwise the tests of gradients would test nothing."""
    for name, make in CASES.items():
        parameters = make(torch.float64)[0].parameters
        assert not parameters or any(p.requires_grad for p in parameters) or name == "graph-laplacian"
