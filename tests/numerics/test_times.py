"""t as a number, as a tensor with a gradient, and several times at once."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import expmflow as ef
from operator_cases import CASES

F64 = torch.float64
NAMES = ["dense", "dense-batched", "conv2d-3x3-reflect", "graph-edges-weighted", "function-parameters", "sum-dense"]
TIMES = {
    "increasing": [0.25, 0.5, 2.0],
    "unsorted": [1.5, -0.5, 0.75],
    "with zero": [0.0, 1.0],
    "only zero": [0.0],
    "repeated": [0.5, 0.5, -1.0, 0.5, -1.0],
    "negative": [-0.25, -2.0, -1.0],
    "one": [1.0],
    "all sorts": [2.0, 0.0, -1.0, 0.0, 2.0, 0.1, -3.0],
}


def problem(name: str) -> tuple[ef.LinearOperator, torch.Tensor]:
    op, event = CASES[name](F64)
    x = torch.randn(op.batch_size or 2, *event, dtype=F64, generator=torch.Generator().manual_seed(0))
    return op, x.requires_grad_()


def test_numbers_and_tensors_agree():
    op, x = problem("dense")
    expected = ef.expm_apply(0.7 * op, x)
    for t in (0.7, torch.tensor(0.7, dtype=F64)):
        torch.testing.assert_close(ef.expm_apply(op, x, t), expected)
    for t in (torch.tensor([0.7], dtype=F64), [0.7], (0.7,)):
        torch.testing.assert_close(ef.expm_apply(op, x, t), expected.unsqueeze(0))
    assert torch.equal(ef.expm_apply(op, x, 1), ef.expm_apply(op, x))
    assert torch.equal(ef.expm_apply(op, x, [0, 1])[0], x)


def test_gradients_flow_into_a_list_of_tensors():
    op, x = problem("dense")
    edges = torch.tensor([[0, 1], [1, 0]])
    for exponential in (
        lambda times: ef.expm_apply(op, x.detach(), times),
        lambda times: ef.heat_kernel(edges, torch.eye(2, dtype=F64), times),
    ):
        first, last = (torch.tensor(t, dtype=F64, requires_grad=True) for t in (0.3, 0.9))
        whole = torch.tensor([0.3, 0.5, 0.9], dtype=F64, requires_grad=True)
        exponential([first, 0.5, last])[:, 0, 0].sum().backward()
        exponential(whole)[:, 0, 0].sum().backward()
        torch.testing.assert_close(torch.stack([first.grad, last.grad]), whole.grad[[0, 2]])


@pytest.mark.parametrize("gradient", ["recompute", "autograd"])
@pytest.mark.parametrize("t", [0.8, -1.3, 0.0])
@pytest.mark.parametrize("name", NAMES)
def test_gradcheck_in_t(name, t, gradient):
    op, x = problem(name)
    time = torch.tensor(t, dtype=F64, requires_grad=True)

    def exponential(time):
        return ef.expm_apply(op, x.detach(), time, gradient=gradient)

    assert torch.autograd.gradcheck(exponential, time, fast_mode=True)


@pytest.mark.parametrize("t", [0.8, 0.0, -2.0])
@pytest.mark.parametrize("name", NAMES)
def test_derivative_in_t_is_the_operator(name, t):
    """d/dt exp(tA)x = A exp(tA)x: ẋ = Ax is solved."""
    op, x = problem(name)
    time = torch.tensor(t, dtype=F64, requires_grad=True)
    z = ef.expm_apply(op, x.detach(), time)
    direction = torch.randn_like(z)
    (slope,) = torch.autograd.grad(z, time, direction)
    torch.testing.assert_close(slope, (direction * op(z.detach())).sum().detach(), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("kind", TIMES)
@pytest.mark.parametrize("name", NAMES)
def test_several_times_are_separate_calls(name, kind):
    """Values and gradients, in x, in every time and in every parameter, for both gradients."""
    op, x = problem(name)
    weight = torch.randn(len(TIMES[kind]), *x.shape, dtype=F64, generator=torch.Generator().manual_seed(1))
    results = {}
    for gradient in ("recompute", "autograd"):
        for together in (True, False):
            t = torch.tensor(TIMES[kind], dtype=F64, requires_grad=True)
            if together:
                z = ef.expm_apply(op, x, t, gradient=gradient)
            else:
                z = torch.stack([ef.expm_apply(op, x, time, gradient=gradient) for time in t])
            inputs = [x, t, *(p for p in op.parameters if p.requires_grad)]
            grads = torch.autograd.grad(z, inputs, weight, retain_graph=True)
            results[gradient, together] = [z.detach(), *grads]
    expected = results["autograd", False]
    assert expected[0].shape == (len(TIMES[kind]), *x.shape)
    for result in results.values():
        for got, value in zip(result, expected, strict=True):
            torch.testing.assert_close(got, value, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("kind", TIMES)
def test_several_times_keep_the_tolerance(kind):
    """Each of them, although each starts where another ended."""
    matrix = torch.randn(8, 8, dtype=F64, generator=torch.Generator().manual_seed(0))
    op, x = ef.DenseOperator(matrix - matrix.T), torch.randn(3, 8, dtype=F64)
    exact = torch.stack([x @ torch.matrix_exp(t * op.matrix).T for t in TIMES[kind]])
    for tol in (1e-2, 1e-5, 1e-9):
        error = (ef.expm_apply(op, x, TIMES[kind], tol=tol) - exact).norm(dim=-1)
        assert (error <= tol * x.norm(dim=-1)).all()


@pytest.mark.parametrize("dtype", [torch.float32, F64], ids=str)
@pytest.mark.parametrize(("count", "end"), [(10, 1.0), (1000, -1.0), (3000, 1.0), (1000, 20.0)])
def test_any_number_of_times_keeps_the_promise(count, end, dtype):
    """Growth, decay and a rotation in closed form, none of which lets roundings average out."""
    times = torch.linspace(0, end, count, dtype=dtype)
    exact_times = times.double().numpy().astype(np.longdouble)
    turn = ef.DenseOperator(torch.tensor([[0.0, -1.0], [1.0, 0.0]], dtype=dtype))
    one = ef.DenseOperator(torch.ones(1, 1, dtype=dtype))
    grown, turned = np.exp(exact_times)[:, None], np.stack([np.cos(exact_times), np.sin(exact_times)], axis=1)
    for op, exact in ((one, grown), (turn, turned)):
        x = torch.eye(exact.shape[1], dtype=dtype)[:1]
        z = ef.expm_apply(op, x, times)[:, 0].double().numpy()
        off = np.linalg.norm((z - exact).astype(np.float64), axis=1) / np.maximum(grown[:, 0] if op is one else 1, 1)
        growth = {"log_norm": max(end, 0.0)} if op is one else {}
        plan = ef.plan_series(abs(end), None, dtype, **growth)
        assert float(off.max()) <= max({torch.float32: 1e-6, F64: 1e-14}[dtype], plan.error_bound)


def test_many_times_are_cheaper_than_as_many_calls():
    calls = []
    op = ef.FunctionOperator(lambda x: calls.append(1) or -x, norm_bound=1.0, log_norm_bound=-1.0)
    x, times = torch.ones(1, 1, dtype=F64), [k / 200 for k in range(1, 201)]
    op(x)
    calls.clear()
    ef.expm_apply(op, x, times)
    together = len(calls)
    calls.clear()
    for t in times:
        ef.expm_apply(op, x, t)
    assert together < 0.8 * len(calls)


def test_one_sweep_is_cheaper_than_separate_calls():
    calls = []
    op = ef.FunctionOperator(lambda x: calls.append(1) or -x, norm_bound=1.0, log_norm_bound=-1.0)
    x, times = torch.ones(1, 1, dtype=F64), [10.0 * k for k in range(1, 6)]
    op(x)
    calls.clear()
    ef.expm_apply(op, x, times)
    together = len(calls)
    calls.clear()
    for t in times:
        ef.expm_apply(op, x, t)
    assert together < len(calls) / 2


def test_terms_with_several_times():
    """A fixed number of terms is the paper's series at each time on its own."""
    op, x = problem("dense")
    times = [0.5, -1.0, 0.0]
    together = ef.expm_apply(op, x, times, terms=3)
    separate = torch.stack([ef.expm_apply(op, x, t, terms=3) for t in times])
    torch.testing.assert_close(together, separate, rtol=0, atol=0)


def test_times_keep_the_inputs_dtype():
    op, x = CASES["dense"](torch.float32)[0], torch.randn(2, 6)
    for t in (0.5, torch.tensor(0.5, dtype=F64), [0.5, 1.0], torch.tensor([0.5, 1.0], dtype=F64)):
        assert ef.expm_apply(op, x, t).dtype == torch.float32
