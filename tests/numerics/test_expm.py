"""exp(A)x against other people's exponentials, and against the laws that an exponential obeys."""

from __future__ import annotations

import math

import numpy as np
import pytest
import scipy.sparse.linalg
import torch

import expmflow as ef
from operator_cases import CASES
from reference import matrix_of

F64 = torch.float64
BOUNDED = [name for name in CASES if name not in ("function-bare", "function-frozen-parameter")]


def events(op: ef.LinearOperator, event: tuple[int, ...], dtype: torch.dtype = F64, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(op.batch_size or 2, *event, generator=generator, dtype=F64).to(dtype)


def dense_product(matrix: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return (matrix @ x.flatten(1).unsqueeze(-1)).reshape(x.shape)


def test_only_functions_without_a_bound_have_none():
    for name in CASES:
        op, event = CASES[name](F64)
        if name in BOUNDED:
            op.norm_bound(event)
        else:
            with pytest.raises(ValueError, match="Expected a norm bound"):
                op.norm_bound(event)


@pytest.mark.parametrize("dtype", [F64, torch.float32], ids=str)
@pytest.mark.parametrize("name", BOUNDED)
@torch.no_grad()
def test_against_torch(name, dtype):
    op, event = CASES[name](dtype)
    x = events(op, event, dtype)
    expected = dense_product(torch.matrix_exp(matrix_of(op, event, dtype).double()), x.double())
    growth = math.exp(max(float(op.log_norm_bound(event)), 0))
    error = (ef.expm_apply(op, x).double() - expected).flatten(1).norm(dim=1)
    allowed = {F64: 1e-13, torch.float32: 4e-6}[dtype] * growth
    assert (error <= allowed * x.double().flatten(1).norm(dim=1)).all()


@pytest.mark.parametrize("name", ["dense", "conv2d-3x3-zeros", "conv2d-3x3-groups-reflect", "graph-edges-weighted"])
@torch.no_grad()
def test_against_scipy(name):
    """SciPy is given the products only, as we are."""
    op, event = CASES[name](F64)
    op, size = 3.0 * op, math.prod(event)

    def product(operator):
        return lambda v: operator(torch.from_numpy(np.asarray(v).reshape(1, *event))).numpy().reshape(-1)

    linear = scipy.sparse.linalg.LinearOperator(
        (size, size), matvec=product(op), rmatvec=product(op.adjoint()), dtype=np.float64
    )
    x = events(op, event)
    trace = float(op.trace(event))
    expected = scipy.sparse.linalg.expm_multiply(linear, x.flatten(1).numpy().T, traceA=trace).T
    torch.testing.assert_close(ef.expm_apply(op, x).flatten(1), torch.from_numpy(expected), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", CASES)
def test_terms_are_the_papers_algorithm(name):
    """Algorithm 1: p ← x, z ← x; for i = 1 … T: p ← A p / i, z ← z + p."""
    op, event = CASES[name](F64)
    x = events(op, event)
    p = z = x
    for i in range(1, 9):
        p = op(p) / i
        z = z + p
        for gradient in ("recompute", "autograd"):
            torch.testing.assert_close(ef.expm_apply(op, x, terms=i, gradient=gradient), z, rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize("name", BOUNDED)
@torch.no_grad()
def test_negation_inverts(name):
    op, event = CASES[name](F64)
    x = events(op, event)
    for there, back in ((op, -op), (-op, op)):
        torch.testing.assert_close(ef.expm_apply(back, ef.expm_apply(there, x)), x, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(ef.expm_apply(op, ef.expm_apply(op, x, -2.0), 2.0), x, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("name", BOUNDED)
@torch.no_grad()
def test_times_add_up(name):
    """exp((s + t)A) = exp(sA) exp(tA), in any order."""
    op, event = CASES[name](F64)
    x = events(op, event)
    for s, t in ((0.3, 1.1), (2.0, -0.7), (-1.5, 0.0)):
        whole = ef.expm_apply(op, x, s + t)
        torch.testing.assert_close(ef.expm_apply(op, ef.expm_apply(op, x, t), s), whole, rtol=1e-11, atol=1e-11)
        torch.testing.assert_close(ef.expm_apply(op, ef.expm_apply(op, x, s), t), whole, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("name", BOUNDED)
@torch.no_grad()
def test_determinant_is_the_exponential_of_the_trace(name):
    """log det exp(A) = tr A: the reason why these make flows."""
    op, event = CASES[name](F64)
    size = math.prod(event)
    if op.batch_size is None:
        jacobian = ef.expm_apply(op, torch.eye(size, dtype=F64).reshape(size, *event)).flatten(1).T
    else:
        units = torch.eye(size, dtype=F64).reshape(size, 1, *event).expand(-1, op.batch_size, *event)
        jacobian = torch.stack([ef.expm_apply(op, u.clone()).flatten(1) for u in units], dim=-1)
    sign, logdet = torch.linalg.slogdet(jacobian)
    assert (sign == 1).all()
    torch.testing.assert_close(logdet, op.trace(event).to(F64), rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("name", BOUNDED)
@torch.no_grad()
def test_adjoint_of_the_exponential(name):
    """exp(A)ᵀ = exp(Aᵀ)."""
    op, event = CASES[name](F64)
    x, y = events(op, event), events(op, event, seed=1)
    left = (y * ef.expm_apply(op, x)).flatten(1).sum(1)
    right = (ef.expm_apply(op.adjoint(), y) * x).flatten(1).sum(1)
    torch.testing.assert_close(left, right, rtol=1e-11, atol=1e-11)


def empty_is_fine(op: ef.LinearOperator, event: tuple[int, ...], terms: int | None) -> None:
    x = torch.zeros(0, *event, dtype=F64, requires_grad=True)
    for gradient in ("recompute", "autograd"):
        z = ef.expm_apply(op, x, terms=terms, gradient=gradient)
        assert z.shape == x.shape
        z.sum().backward(retain_graph=True)
        assert x.grad.shape == x.shape
        assert ef.expm_apply(op, x, [1.0, 2.0], terms=terms, gradient=gradient).shape == (2, *x.shape)
    assert op(x).shape == op.adjoint()(x).shape == x.shape


@pytest.mark.parametrize("name", [name for name in CASES if CASES[name](F64)[0].batch_size is None])
def test_an_empty_batch_is_fine(name):
    op, event = CASES[name](F64)
    empty_is_fine(op, event, None if name in BOUNDED else 4)


def test_an_empty_batch_of_operators_is_fine():
    one, none = torch.eye(2, dtype=F64), torch.zeros(0, 2, 2, dtype=F64)
    mask = torch.ones(0, 2, dtype=torch.bool)
    empty_is_fine(ef.DenseOperator(none), (2,), None)
    for op in (
        ef.GraphConvOperator(one, one, none),
        ef.GraphConvOperator(none, one, one),
        ef.GraphConvOperator(one, none, one),
        ef.GraphConvOperator(one, one, one, mask=mask),
        ef.GraphConvOperator(none, none, none, mask=mask),
    ):
        empty_is_fine(op, (2, 2), None)
        assert op.trace((2, 2)).shape == (0,)


def test_a_plan_can_be_passed():
    """s steps of T terms of A/s."""
    op, event = CASES["dense"](F64)
    x = events(op, event)
    z = x
    for _ in range(3):
        z = ef.expm_apply(op, z, 1 / 3, terms=4)
    torch.testing.assert_close(ef.expm_apply(op, x, terms=ef.SeriesPlan(3, 4, math.nan)), z, rtol=1e-14, atol=1e-15)


def test_exp_of_zero_is_exactly_the_identity():
    x = torch.randn(3, 4)
    assert torch.equal(ef.expm_apply(ef.DenseOperator(torch.zeros(4, 4)), x), x)
    assert torch.equal(ef.expm_apply(ef.DenseOperator(torch.randn(4, 4)), x, 0.0), x)


def test_tolerance_decides_the_number_of_products():
    calls = []
    op = ef.FunctionOperator(lambda x: calls.append(1) or x, norm_bound=1.0)
    op(torch.ones(1, 1))
    counts = []
    for tol in (1e-1, 1e-3, 1e-6):
        calls.clear()
        ef.expm_apply(op, torch.ones(1, 1), tol=tol)
        assert len(calls) == ef.plan_series(1.0, tol).products
        counts.append(len(calls))
    assert counts == sorted(set(counts))


def test_what_is_known_of_an_operator_serves_every_time(monkeypatch):
    found = []
    compute = ef.DenseOperator._norm_bound
    monkeypatch.setattr(ef.DenseOperator, "_norm_bound", lambda op, shape: found.append(shape) or compute(op, shape))
    op, x = ef.DenseOperator(torch.randn(4, 4, dtype=torch.float64)), torch.randn(2, 4, dtype=torch.float64)
    for t in (1.0, 0.5, -0.5, torch.tensor(0.3, dtype=torch.float64)):
        torch.testing.assert_close(ef.expm_apply(op, x, t), x @ torch.matrix_exp(t * op.matrix).T)
    assert len(found) == 1
