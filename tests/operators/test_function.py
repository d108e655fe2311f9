"""Any linear callable as an operator: its adjoint, its declared parameters, and the ones somebody forgot."""

from __future__ import annotations

import functools

import pytest
import torch

import expmflow as ef

OUTSIDE = torch.randn(3, 3, requires_grad=True)


def undeclared(fn, parameters=(), x=None):
    with pytest.raises(ValueError, match=r"Expected every tensor .* in `parameters`; got undeclared") as failure:
        ef.expm_apply(ef.FunctionOperator(fn, parameters, norm_bound=1.0), torch.randn(2, 3) if x is None else x)
    return str(failure.value).split("undeclared ")[1]


def test_a_closure_is_named():
    weight = torch.randn(3, 3, requires_grad=True)
    assert undeclared(lambda x: x @ weight) == "`weight`."
    assert undeclared(functools.partial(lambda scale, x: scale * (x @ weight), 2.0)) == "`weight`."


def test_inside_another_operator_it_is_named_too():
    weight = torch.randn(3, 3, requires_grad=True)
    function, sound = ef.FunctionOperator(lambda x: x @ weight), ef.DenseOperator(torch.eye(3))
    for op in (-function, 0.5 * function, function.adjoint(), sound + function, function - sound):
        with pytest.raises(ValueError, match="undeclared `weight`"):
            ef.expm_apply(op, torch.randn(2, 3), terms=2)


def test_a_global_is_named():
    assert undeclared(lambda x: x @ OUTSIDE) == "`OUTSIDE`."


def test_all_that_is_missing_is_named_and_nothing_else():
    first, second, declared = (torch.randn(3, 3, requires_grad=True) for _ in range(3))
    assert undeclared(lambda x: x @ first @ declared + x @ second, [declared]) in (
        "`first`, `second`.",
        "`second`, `first`.",
    )


def test_a_modules_parameter_is_named():
    layer = torch.nn.Linear(3, 3, bias=False)
    assert undeclared(layer) == "`weight`."
    assert undeclared(layer.forward) == "`weight`."
    assert undeclared(lambda x: 2 * layer(x)) == "`layer.weight`."
    deep = torch.nn.Sequential(torch.nn.Linear(3, 4, bias=False), torch.nn.Linear(4, 3, bias=False))
    assert undeclared(deep, [deep[0].weight]) == "`1.weight`."


def test_what_cannot_be_named_is_described():
    hidden = [torch.randn(3, 3, requires_grad=True)]
    assert undeclared(lambda x: x @ hidden[0]) == "tensor of shape (3, 3)."


def test_a_function_of_a_declared_tensor_is_declared():
    """The owner's parameter reaches the function through a tensor that is declared: nothing is missing."""
    raw = torch.randn(3, 3, dtype=torch.float64, requires_grad=True)

    def exponential(raw, gradient):
        skew = raw - raw.T
        return ef.expm_apply(ef.FunctionOperator(lambda x: x @ skew, [skew]), x, terms=6, gradient=gradient)

    x = torch.randn(2, 3, dtype=torch.float64)
    for gradient in ("recompute", "autograd"):
        assert torch.autograd.gradcheck(lambda raw, g=gradient: exponential(raw, g), raw)


def test_constants_without_gradient_need_no_declaration():
    constant = torch.randn(3, 3)
    x = torch.randn(2, 3, requires_grad=True)
    z = ef.expm_apply(ef.FunctionOperator(lambda x: x @ constant, norm_bound=10.0), x)
    torch.testing.assert_close(z, x @ torch.matrix_exp(constant))


def test_the_input_may_have_a_history():
    """What x was computed from is not the function's business."""
    encoder = torch.randn(3, 3, requires_grad=True)
    op = ef.FunctionOperator(lambda x: x.roll(1, -1), norm_bound=1.0)
    ef.expm_apply(op, torch.randn(2, 3) @ encoder).sum().backward()
    assert encoder.grad is not None


def test_without_a_norm_bound_terms_are_required():
    op = ef.FunctionOperator(lambda x: x.roll(1, -1))
    x = torch.randn(2, 4)
    with pytest.raises(ValueError, match=r"Expected a norm bound .*; got none: declare one, or pass terms="):
        ef.expm_apply(op, x)
    expected = x @ torch.matrix_exp(op.dense((4,))).T
    torch.testing.assert_close(ef.expm_apply(op, x, terms=12), expected)


def test_the_adjoint_is_the_vector_jacobian_product():
    ramp = torch.arange(6.0)  # so that the adjoint is another operator
    blur = ef.FunctionOperator(lambda x: torch.nn.functional.avg_pool1d(ramp * x, 3, 1, 1))
    y = torch.randn(2, 1, 6)
    torch.testing.assert_close(blur.adjoint()(y).flatten(1), y.flatten(1) @ blur.dense((1, 6)))


def test_the_zero_map_is_linear():
    x = torch.randn(2, 3, requires_grad=True)
    z = ef.expm_apply(ef.FunctionOperator(torch.zeros_like, norm_bound=0.0), x)
    assert torch.equal(z, x)
    (grad,) = torch.autograd.grad(z.sum(), x)
    assert torch.equal(grad, torch.ones(2, 3))


def test_bounds_and_trace_may_depend_on_the_shape():
    op = ef.FunctionOperator(lambda x: x / x.shape[-1], trace=lambda s: 1.0, norm_bound=lambda s: 1 / s[-1])
    assert [float(op.norm_bound((n,))) for n in (2, 4)] == pytest.approx([0.5, 0.25])
    assert float(op.trace((5,))) == 1.0


def test_a_trace_given_as_a_number_keeps_its_digits():
    weight = torch.eye(1, dtype=torch.float64) / 3
    op = ef.FunctionOperator(lambda x: x @ weight, [weight], trace=1 / 3)
    assert op.trace((1,)).dtype == torch.float64
    assert float(op.trace((1,))) == 1 / 3


def test_a_trace_given_as_a_number_is_where_the_parameters_are():
    unused = torch.zeros(0, device="meta")
    op = ef.FunctionOperator(lambda x: x, [unused], trace=1.0)
    assert op.trace((1,)).device == unused.device


def test_the_function_is_checked_once():
    calls = []
    op = ef.FunctionOperator(lambda x: calls.append(1) or x, norm_bound=1.0)
    for _ in range(3):
        op(torch.randn(1, 2))
    assert len(calls) == 4


def test_the_adjoint_is_found_in_inference_mode():
    matrix = torch.randn(3, 3)
    op, same = ef.FunctionOperator(lambda x: x @ matrix.T, norm_bound=10.0), ef.DenseOperator(matrix)
    with torch.inference_mode():
        y = torch.randn(2, 3)
        torch.testing.assert_close(op.adjoint()(y), same.adjoint()(y))
        torch.testing.assert_close(ef.power_iteration(op, (3,)), ef.power_iteration(same, (3,)))
    assert undeclared_in_inference_mode() == "`weight`."


def undeclared_in_inference_mode() -> str:
    weight = torch.randn(3, 3, requires_grad=True)
    with torch.inference_mode():
        return undeclared(lambda x: x @ weight)


def test_a_function_that_autograd_cannot_follow_has_no_adjoint():
    matrix = torch.randn(3, 3)
    blind = ef.FunctionOperator(lambda x: x.detach() @ matrix.T, norm_bound=10.0)
    x = torch.randn(2, 3, requires_grad=True)
    with pytest.raises(ValueError, match="Expected a function that autograd can follow, for its adjoint"):
        ef.expm_apply(blind, x).sum().backward()
    nothing = ef.FunctionOperator(lambda x: 0 * x.detach(), norm_bound=0.0)
    assert not nothing.adjoint()(x).any()
