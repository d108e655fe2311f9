"""Both gradients are the derivative, and each other, for x, for t and for every parameter of every operator."""

from __future__ import annotations

import math

import pytest
import torch
from torch.autograd.gradcheck import GradcheckError

import expmflow as ef
from operator_cases import CASES

F64 = torch.float64
PLANS = {"one step": ef.SeriesPlan(1, 5, math.nan), "three steps": ef.SeriesPlan(3, 2, math.nan)}


def problem(name: str, dtype: torch.dtype = F64):
    """An operator with a gradient wherever it can have one, and the inputs x, t and its parameters."""
    op, event = CASES[name](dtype)
    # a fresh leaf in place of what was computed; a function holds its own leaves
    op = op.rebuild([p if p.is_leaf and p.requires_grad else p.detach().requires_grad_() for p in op.parameters])
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(op.batch_size or 2, *event, generator=generator, dtype=F64).to(dtype).requires_grad_()
    t = torch.tensor(0.8, dtype=dtype, requires_grad=True)
    return op, [x, t, *(p for p in op.parameters if p.requires_grad)]


def exponential(op: ef.LinearOperator, **options):
    """A function of x, t and the parameters: the operator reads the latter itself, perturbed in place or not."""
    return lambda x, t, *parameters: ef.expm_apply(op, x, t, **options)


@pytest.mark.parametrize("gradient", ["recompute", "autograd"])
@pytest.mark.parametrize("name", CASES)
def test_gradcheck(name, gradient):
    op, inputs = problem(name)
    for plan in PLANS.values():
        assert torch.autograd.gradcheck(exponential(op, terms=plan, gradient=gradient), inputs, fast_mode=True)


@pytest.mark.parametrize("name", ["dense", "conv1d-3-reflect", "graph-masked-shared", "scaled-function-by-tensor"])
@pytest.mark.parametrize("gradient", ["recompute", "autograd"])
def test_gradcheck_entry_by_entry(name, gradient):
    op, inputs = problem(name)
    assert torch.autograd.gradcheck(exponential(op, gradient=gradient), inputs)


def test_gradcheck_sees_the_parameters():
    """A detached parameter, whose gradient would be zero, fails the checks above."""
    op, inputs = problem("dense")
    detached = ef.DenseOperator(op.matrix.detach())
    with pytest.raises(GradcheckError):
        torch.autograd.gradcheck(exponential(detached, terms=3), inputs, fast_mode=True)


@pytest.mark.parametrize("dtype", [F64, torch.float32], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_the_two_gradients_are_equal_to_rounding(name, dtype):
    op, inputs = problem(name, dtype)
    for plan in PLANS.values():
        values, grads = [], []
        for gradient in ("recompute", "autograd"):
            z = ef.expm_apply(op, *inputs[:2], terms=plan, gradient=gradient)
            values.append(z.detach())
            grads.append(torch.autograd.grad(z.square().sum(), inputs, materialize_grads=True))
        eps = torch.finfo(dtype).eps
        torch.testing.assert_close(*values, rtol=10 * eps, atol=10 * eps)
        for a, b in zip(*grads, strict=True):
            assert float((a - b).norm()) <= 50 * eps * max(float(b.norm()), 1.0)


def test_it_is_not_the_product_of_two_truncated_sums():
    """The shortcut Σᵢⱼ a_i p_j of published memory-saving versions differs from the gradient at few terms."""
    matrix = torch.randn(4, 4, dtype=F64, requires_grad=True)
    x, g = torch.randn(1, 4, dtype=F64), torch.randn(1, 4, dtype=F64)
    (grad,) = torch.autograd.grad(ef.expm_apply(ef.DenseOperator(matrix), x, terms=3), matrix, g)
    op = ef.DenseOperator(matrix.detach())
    shortcut = ef.expm_apply(op.adjoint(), g, terms=3).T @ ef.expm_apply(op, x, terms=3)
    assert float((grad - shortcut).norm()) > 0.1 * float(grad.norm())


@pytest.mark.parametrize("name", ["dense", "conv2d-1x3-circular", "graph-edges-weighted", "function-parameters"])
def test_only_what_needs_a_gradient_gets_one(name):
    op, (x, t, *_) = problem(name)
    for needs in ([x], [t], list(op.parameters[:1])):
        for tensor in (x, t, *op.parameters):
            tensor.requires_grad_(any(tensor is n for n in needs))
        for gradient in ("recompute", "autograd"):
            z = ef.expm_apply(op, x, t, terms=3, gradient=gradient)
            grads = torch.autograd.grad(z.sum(), needs)
            assert all(float(g.abs().sum()) > 0 for g in grads)
    for tensor in (x, t, *op.parameters):
        tensor.requires_grad_(False)
    assert not ef.expm_apply(op, x, t, terms=3).requires_grad


def test_a_gradient_that_is_expanded_or_transposed():
    """Gradients arrive in any memory layout, also as one number repeated."""
    for name in ("conv2d-3x3-channels-last-zeros", "graph-sparse", "conv2d-3x3-zeros"):
        op, (x, _, *parameters) = problem(name)
        inputs = [x, *parameters]
        weight = torch.randn(x.shape[::-1], dtype=F64).permute(*reversed(range(x.ndim)))
        for g in (torch.ones((), dtype=F64).expand(x.shape), weight):
            plain, saving = (
                torch.autograd.grad(ef.expm_apply(op, x, terms=4, gradient=gradient), inputs, g)
                for gradient in ("autograd", "recompute")
            )
            for a, b in zip(plain, saving, strict=True):
                torch.testing.assert_close(a, b)


@pytest.mark.parametrize("name", ["dense", "conv1d-3-zeros", "conv1d-3-reflect", "graph-edges", "function-parameters"])
def test_double_backward_with_autograd(name):
    op, inputs = problem(name)
    assert torch.autograd.gradgradcheck(exponential(op, terms=3, gradient="autograd"), inputs, fast_mode=True)


@pytest.mark.parametrize("name", ["dense", "conv1d-3-reflect", "graph-edges", "function-parameters"])
def test_double_backward_with_recompute_is_refused(name):
    op, inputs = problem(name)
    z = ef.expm_apply(op, *inputs[:2], terms=3)
    with pytest.raises(RuntimeError, match=r"Expected gradient='autograd' .*; got gradient='recompute'"):
        torch.autograd.grad(z.sum(), inputs, create_graph=True)


def test_parameters_that_change_between_the_passes_are_refused():
    """The backward pass would recompute another series."""
    for make in (ef.DenseOperator, lambda w: ef.FunctionOperator(lambda x: x @ w.T, [w])):
        matrix = torch.randn(3, 3, requires_grad=True)
        z = ef.expm_apply(make(matrix), torch.randn(2, 3), terms=3)
        with torch.no_grad():
            matrix.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            z.sum().backward()


def test_without_grad_mode_nothing_is_kept():
    op, (x, *_) = problem("dense")
    for mode in (torch.no_grad(), torch.inference_mode()):
        with mode:
            for gradient in ("recompute", "autograd"):
                assert not ef.expm_apply(op, x, gradient=gradient).requires_grad


@pytest.mark.parametrize("gradient", ["recompute", "autograd"])
def test_rows_that_share_their_memory(gradient):
    matrix, row = torch.randn(3, 3, dtype=F64), torch.randn(1, 3, dtype=F64, requires_grad=True)
    ef.expm_apply(ef.DenseOperator(matrix), row.expand(4, 3), gradient=gradient).sum().backward()
    torch.testing.assert_close(row.grad, 4 * torch.matrix_exp(matrix).sum(0, keepdim=True))


def test_derivatives_by_torch_func():
    """It asks for derivatives that can be differentiated again, and for batches of anything."""
    op, x = ef.DenseOperator(torch.randn(3, 3, dtype=F64)), torch.randn(4, 3, dtype=F64)
    exact = torch.matrix_exp(op.matrix)
    found = torch.func.grad(lambda y: ef.expm_apply(op, y).sum())(x)
    torch.testing.assert_close(found, exact.sum(0).expand(4, 3))
    torch.testing.assert_close(torch.func.jacrev(lambda y: ef.expm_apply(op, y[None])[0])(x[0]), exact)
    rows = torch.func.vmap(lambda y: ef.expm_apply(op, y[None], gradient="autograd")[0])(x)
    torch.testing.assert_close(rows, x @ exact.T)
