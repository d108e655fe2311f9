"""Under autocast the networks may be coarse; the series stays in the operator's precision."""

from __future__ import annotations

import pytest
import torch

import expmflow as ef
from operator_cases import CASES
from reference import matrix_of

BF16 = torch.autocast("cpu", dtype=torch.bfloat16)


@pytest.mark.parametrize("name", CASES)
def test_the_result_is_that_without_autocast(name):
    """To the last bit, in value and in gradient, although a single product under autocast is coarse."""
    op, event = CASES[name](torch.float32)
    x = torch.randn(op.batch_size or 2, *event, requires_grad=True)
    inputs = [x, *(p for p in op.parameters if p.requires_grad)]

    def gradients(z):
        return torch.autograd.grad(z.sum(), inputs, materialize_grads=True, retain_graph=True)

    for gradient in ("recompute", "autograd"):
        expected = ef.expm_apply(op, x, 0.5, terms=6, gradient=gradient)
        with BF16:
            got = ef.expm_apply(op, x, 0.5, terms=6, gradient=gradient)
            grads = gradients(got) if gradient == "recompute" else None
        assert got.dtype == torch.float32
        assert torch.equal(got, expected)
        # torch asks for backward passes outside autocast; the recomputing one keeps its precision inside as well
        for a, b in zip(grads or gradients(got), gradients(expected), strict=True):
            assert torch.equal(a, b)


@torch.no_grad()
def test_the_product_alone_is_coarse():
    """So the test above can fail."""
    op, x = ef.DenseOperator(torch.randn(8, 8)), torch.randn(2, 8)
    exact = x.double() @ op.matrix.double().T
    with BF16:
        coarse = op(x)
    assert float((coarse.double() - exact).norm()) > 1e-4 * float(exact.norm())


@torch.no_grad()
def test_coarse_input_is_raised_to_the_operator():
    """What a network made under autocast goes through the series in float32."""
    op, event = CASES["conv2d-3x3-zeros"](torch.float32)
    x = torch.randn(2, *event).bfloat16()
    with BF16:
        z = ef.expm_apply(op, x)
    assert z.dtype == torch.float32
    exact = x.double().flatten(1) @ torch.matrix_exp(matrix_of(op, event, torch.float32).double()).T
    assert float((z.double().flatten(1) - exact).norm()) < 1e-5 * float(exact.norm())


def test_outside_autocast_dtypes_still_may_not_mix():
    op, event = CASES["conv2d-3x3-zeros"](torch.float32)
    with pytest.raises(TypeError, match=r"Expected .*float32.*; got torch\.bfloat16"):
        ef.expm_apply(op, torch.randn(2, *event).bfloat16())
