"""−A, c·A, A + B, Aᵀ; what an operator keeps of itself; and that it leaves alone what it was given."""

from __future__ import annotations

import pytest
import torch

import expmflow as ef
from operator_cases import CASES
from reference import matrix_of

F64 = torch.float64


@pytest.mark.parametrize("name", CASES)
def test_algebra_is_that_of_matrices(name):
    op, event = CASES[name](F64)
    a = matrix_of(op, event, F64)
    identities = {
        "negation": (-op, -a),
        "double negation": (-1.0 * -op, a),
        "factor on the left": (3 * op, 3 * a),
        "factor on the right": (op * 0.25, 0.25 * a),
        "tensor factor": (torch.tensor(-2.0, dtype=F64) * op, -2 * a),
        "product of factors": (0.5 * (3.0 * op), 1.5 * a),
        "sum": (op + 2 * op, 3 * a),
        "difference": (op - op.adjoint(), a - a.mT),
        "adjoint": (op.adjoint(), a.mT),
        "adjoint of adjoint": (op.adjoint().adjoint(), a),
        "adjoint of a sum": ((op + 2 * op.adjoint()).adjoint(), a.mT + 2 * a),
        "negated adjoint of a scaled sum": (-(0.5 * (op + op)).adjoint(), -a.mT),
    }
    for identity, (operator, matrix) in identities.items():
        torch.testing.assert_close(matrix_of(operator, event, F64), matrix, rtol=1e-13, atol=1e-14, msg=identity)
        torch.testing.assert_close(
            operator.trace(event).to(F64).detach(), matrix.diagonal(dim1=-2, dim2=-1).sum(-1), msg=identity
        )


@pytest.mark.parametrize("name", CASES)
def test_rows_of_a_batch_do_not_touch(name):
    op, event = CASES[name](F64)
    x = torch.randn(op.batch_size or 3, *event, dtype=F64)
    y = op(x)
    other = torch.cat([torch.randn(1, *event, dtype=F64), x[1:]])
    torch.testing.assert_close(op(other)[1:], y[1:])
    if op.batch_size is None:
        torch.testing.assert_close(op(x[1:2]), y[1:2])


@pytest.mark.parametrize("name", CASES)
def test_nothing_given_is_modified(name):
    op, event = CASES[name](F64)
    x = torch.randn(op.batch_size or 2, *event, dtype=F64)
    given = [x, *op.parameters]
    before, versions = [g.detach().clone() for g in given], [g._version for g in given]
    x.requires_grad_()
    for operator in (op, op.adjoint()):
        operator(x)
        operator.trace(event)
        operator.dense(event)
        z = ef.expm_apply(operator, x, torch.tensor(0.5, dtype=F64), terms=3)
        z.sum().backward(retain_graph=True)
        ef.expm_apply(operator, x, [0.3, -0.2], terms=3, gradient="autograd").sum().backward(retain_graph=True)
        ef.power_iteration(operator, event, start=x.detach()[: op.batch_size or 1], iterations=2)
    assert [g._version for g in given] == versions
    for g, b in zip(given, before, strict=True):
        assert torch.equal(g, b)


def test_results_share_no_memory_with_what_was_given():
    """Writing into a result must not write into the input, even where exp(A) is the identity."""
    x = torch.ones(2, 3)
    for t in (0.0, 1.0, [0.0, 1.0]):
        z = ef.expm_apply(ef.DenseOperator(torch.zeros(3, 3)), x, t)
        z.zero_()
        assert torch.equal(x, torch.ones(2, 3))


@pytest.mark.parametrize("name", ["dense", "conv2d-3x3-zeros", "graph-dense", "function-parameters", "adjoint-dense"])
def test_bounds_follow_an_optimizer_that_writes_in_place(name):
    op, event = CASES[name](F64)
    norm, log_norm = op.norm_bound(event), op.log_norm_bound(event)
    assert float(norm) == float(op.norm_bound(event))
    optimizer = torch.optim.SGD([p for p in op.parameters if p.requires_grad], lr=1.0)
    for p in op.parameters:
        p.grad = -p.detach().clone() if p.requires_grad else None  # p ← 2 p
    optimizer.step()
    fresh = op.rebuild(op.parameters)
    assert float(op.norm_bound(event)) == float(fresh.norm_bound(event))
    assert float(op.norm_bound(event)) > 1.5 * float(norm)
    assert float(op.log_norm_bound(event)) == float(fresh.log_norm_bound(event)) != float(log_norm)


def test_bounds_are_computed_once_and_for_each_shape():
    calls = []
    op = ef.FunctionOperator(lambda x: x, norm_bound=lambda shape: calls.append(shape) or 1.0)
    for _ in range(3):
        op.norm_bound((2,))
        op.norm_bound([2])
        op.norm_bound((3,))
    assert calls == [(2,), (3,)]


def test_bounds_carry_no_gradient():
    for name in ("dense", "conv1d-3-zeros", "graph-weighted", "function-parameters", "scaled-function-by-tensor"):
        op, event = CASES[name](F64)
        for bound in (op.norm_bound(event), op.log_norm_bound(event)):
            assert not bound.requires_grad
            assert bound.dtype == F64


@pytest.mark.parametrize("name", CASES)
def test_trace_has_the_gradient_of_a_trace(name):
    op, event = CASES[name](F64)
    needed = [p for p in op.parameters if p.requires_grad]
    trace, diagonal = op.trace(event).sum(), op.dense(event).diagonal(dim1=-2, dim2=-1).sum()
    assert trace.requires_grad == diagonal.requires_grad
    if not needed or not trace.requires_grad:
        return
    got = torch.autograd.grad(trace, needed, materialize_grads=True)
    expected = torch.autograd.grad(diagonal, needed, materialize_grads=True)
    for g, e in zip(got, expected, strict=True):
        torch.testing.assert_close(g, e)


def test_bounds_follow_an_optimizer_that_leaves_no_trace():
    """A fused optimizer writes into parameters without counting it."""
    weight = torch.nn.Parameter(torch.eye(3, dtype=F64))
    op = ef.DenseOperator(weight)
    assert float(op.norm_bound((3,))) == pytest.approx(1)
    optimizer = torch.optim.Adam([weight], lr=1.0, fused=True)
    weight.sum().backward()
    optimizer.step()
    fresh = ef.DenseOperator(weight.detach().clone())
    assert float(fresh.norm_bound((3,))) > 1.5
    assert torch.equal(op.norm_bound((3,)), fresh.norm_bound((3,)))
    assert torch.equal(op.log_norm_bound((3,)), fresh.log_norm_bound((3,)))
