"""Taps that meet on a small torus, or lead past a small image: bounds and exponentials know them for what they do."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

import expmflow as ef
from reference import conv_matrix, expm_product

F64 = torch.float64
DTYPES = [torch.float32, F64]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("learns", [False, True])
@pytest.mark.parametrize("t", [1.0, 0.3, -2.0])
def test_circular_taps_that_cancel(t, learns, dtype):
    """[10⁶, 0, −999999] on two points swaps them."""
    kernel = torch.tensor([[[1e6, 0.0, -999999.0]]], dtype=dtype, requires_grad=learns)
    op = ef.ConvOperator(kernel, "circular")
    assert float(op.norm_bound((1, 2))) == pytest.approx(1.0)
    z = ef.expm_apply(op, torch.tensor([[[1.0, 0.0]]], dtype=dtype), t).detach().double().flatten()
    exact = torch.tensor([math.cosh(t), math.sinh(t)], dtype=F64)
    promise = {torch.float32: 1e-6, F64: 1e-14}[dtype]
    assert float((z - exact).norm()) <= max(promise, ef.plan_series(abs(t), None, dtype).error_bound) * math.exp(abs(t))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_taps_that_never_touch_the_image(dtype):
    """With dilation 5 only the middle tap of [10⁴, 1, 10⁴] finds any of three points: the identity."""
    kernel = torch.tensor([[[1e4, 1.0, 1e4]]], dtype=dtype)
    op = ef.ConvOperator(kernel, dilation=5)
    assert float(op.norm_bound((1, 3))) == pytest.approx(1.0)
    assert float(op.log_norm_bound((1, 3))) == pytest.approx(1.0)
    assert ef.plan_series(op.norm_bound((1, 3)), dtype=dtype).products < 30
    z = ef.expm_apply(op, torch.ones(1, 1, 3, dtype=dtype))
    torch.testing.assert_close(z, torch.full_like(z, math.e))


@pytest.mark.parametrize("padding", ["zeros", "circular"])
def test_folding_changes_nothing_but_the_kernel(padding):
    """The same matrix, the same bounds or better, and the exponential and its gradients of the same matrix."""
    generator = torch.Generator().manual_seed(0)
    for sizes, dilation in itertools.product([(1, 1), (2, 1), (1, 3), (2, 3), (4, 3)], [(1, 1), (2, 1), (3, 2)]):
        kernel = 0.2 * torch.randn(2, 2, 5, 3, generator=generator, dtype=F64)
        x = torch.randn(2, 2, *sizes, generator=generator, dtype=F64)
        kernel.requires_grad_()
        op = ef.ConvOperator(kernel, padding, dilation=dilation)
        event = (2, *sizes)
        torch.testing.assert_close(op.folded(event).dense(event), op.dense(event))
        matrix = conv_matrix(kernel.detach(), sizes, padding, dilation, 1)
        assert float(op.norm_bound(event)) >= float(torch.linalg.matrix_norm(matrix, ord=2)) * (1 - 1e-12)
        z = ef.expm_apply(op, x)
        torch.testing.assert_close(z.detach().flatten(1), expm_product(matrix, x.flatten(1)))
        (found,) = torch.autograd.grad(z.square().sum(), kernel)
        dense = torch.matrix_exp(op.dense(event)) @ x.flatten(1).T
        (expected,) = torch.autograd.grad(dense.square().sum(), kernel)
        torch.testing.assert_close(found, expected)


def test_sums_scalings_and_adjoints_fold_their_parts():
    kernel = torch.tensor([[[1e6, 0.0, -999999.0]]])
    op = ef.ConvOperator(kernel, "circular")
    part = ef.FunctionOperator(torch.zeros_like, norm_bound=0.0)
    x = torch.tensor([[[1.0, 0.0]]])
    for made in (op.adjoint(), op + part, part + op, (op + part).adjoint()):
        z = ef.expm_apply(made, x).double().flatten()
        exact = torch.tensor([math.cosh(1), math.sinh(1)], dtype=F64)
        assert float((z - exact).norm()) <= 2e-6 * math.e
    plain = ef.ConvOperator(torch.ones(1, 1, 3), "circular")
    for untouched in (plain, plain.adjoint(), plain + plain, part, ef.ConvOperator(torch.ones(1, 1, 3))):
        assert untouched.folded((1, 4)) is untouched


@pytest.mark.parametrize("size", [1e-300, 1e-200, 1e-160, 1e150, 1e200])
@pytest.mark.parametrize("padding", ["zeros", "circular", "reflect"])
def test_bounds_of_very_small_and_very_large_kernels(padding, size):
    """They scale with the kernel; a bound of zero would be none."""
    kernel = torch.randn(2, 2, 3, generator=torch.Generator().manual_seed(0), dtype=F64)
    expected = size * ef.ConvOperator(kernel, padding).norm_bound((2, 5))
    torch.testing.assert_close(ef.ConvOperator(size * kernel, padding).norm_bound((2, 5)), expected, rtol=1e-9, atol=0)
    assert float(ef.ConvOperator(0 * kernel, padding).norm_bound((2, 5))) == 0


def test_bounds_of_graphs_with_very_small_entries():
    """A directed edge between strangers: its square is no number."""
    adjacency = torch.tensor([[0.0, 1e-200], [0.0, 1.0]], dtype=F64)
    op = ef.GraphConvOperator(torch.zeros(1, 1, dtype=F64), torch.ones(1, 1, dtype=F64), adjacency)
    matrix = op.dense((2, 1))
    assert float(op.norm_bound((2, 1))) >= float(torch.linalg.matrix_norm(matrix, ord=2)) * (1 - 1e-12)
