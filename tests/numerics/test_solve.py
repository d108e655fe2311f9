"""Fixed points: x + g(x) = y is solved, and what was not solved says so."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import expmflow as ef
from expmflow.numerics.solve import triangular_fixed_point, with_implicit_gradient

F64 = torch.float64


def strictly_lower(size: int, dtype: torch.dtype = F64) -> torch.Tensor:
    return torch.tril(torch.randn(size, size, dtype=dtype, generator=torch.Generator().manual_seed(0)), -1)


@given(slope=st.floats(-0.9, 0.9), rows=st.integers(0, 4), dtype=st.sampled_from([F64, torch.float32]))
def test_linear_equations_have_a_closed_form(slope, rows, dtype):
    """x + s x = y gives x = y / (1 + s)."""
    y = torch.linspace(-3, 3, 5 * rows, dtype=dtype).reshape(rows, 5)
    solution = ef.fixed_point(lambda x: slope * x, y)
    assert solution.converged
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(solution.value, y / (1 + slope), rtol=0, atol=64 * 3 * eps / (1 - abs(slope)))


@pytest.mark.parametrize("tol", [None, 1e-3, 1e-8])
def test_the_residual_is_that_of_the_value(tol):
    y = 5 * torch.randn(6, 2, 3, dtype=F64)
    solution = ef.fixed_point(lambda x: 0.7 * torch.sin(x), y, tol=tol)
    off = (solution.value + 0.7 * torch.sin(solution.value) - y).abs()
    assert float(off.amax()) == pytest.approx(solution.residual, rel=1e-6, abs=1e-15)
    allowed = (1e-13 if tol is None else tol) * y.abs().amax((1, 2)).clamp_min(1)
    assert (off.amax((1, 2)) <= allowed).all()


def test_triangular_jacobians_converge_however_steep():
    """g with a strictly triangular Jacobian of norm 50 is no contraction; d rounds solve it all the same."""
    steep = 20 * strictly_lower(6)
    assert float(torch.linalg.matrix_norm(steep, ord=2)) > 50
    y = torch.randn(3, 6, dtype=F64)
    solution = ef.fixed_point(lambda x: x @ steep.T, y, tol=1e-9)
    exact = torch.linalg.solve(torch.eye(6, dtype=F64) + steep, y.T).T
    torch.testing.assert_close(solution.value, exact, rtol=1e-9, atol=1e-6)
    assert solution.iterations <= 8


def test_solved_rows_are_left_alone():
    """g sees the rows that are still sought, and no others; each row's result is that of the row alone."""
    seen = []

    def g(x):
        seen.append(len(x))
        return 0.9 * torch.tanh(x)

    y = torch.tensor([[0.0], [1e-3], [1.0], [4.0]], dtype=F64)
    solution = ef.fixed_point(g, y)
    assert seen[0] == 4
    assert seen == sorted(seen, reverse=True)
    assert seen[-1] < 4
    assert solution.iterations == len(seen)
    for row, value in zip(y, solution.value, strict=True):
        alone = ef.fixed_point(lambda x: 0.9 * torch.tanh(x), row[None])
        assert torch.equal(alone.value[0], value)


def test_failure_is_raised_with_what_was_reached():
    y = torch.tensor([[1.0], [0.0]])
    with pytest.raises(
        ef.ConvergenceError, match=r"Expected a residual of at most .*; got .* in 1 of 2 rows"
    ) as failure:
        ef.fixed_point(lambda x: 2 * x, y, max_iterations=5)
    solution = failure.value.solution
    assert not solution.converged
    assert solution.iterations == 5
    assert solution.value.shape == y.shape
    assert float((3 * solution.value - y).abs().amax()) == pytest.approx(solution.residual)
    assert isinstance(failure.value, RuntimeError)


@pytest.mark.parametrize("rounds", [1, 2, 7])
def test_failure_can_be_a_value(rounds):
    y = torch.randn(3, 2, dtype=F64)
    solution = ef.fixed_point(lambda x: 0.99 * x, y, max_iterations=rounds, raise_on_failure=False)
    assert not solution.converged
    assert solution.iterations == rounds
    assert float((1.99 * solution.value - y).abs().amax()) == pytest.approx(solution.residual)


def test_nan_is_no_convergence():
    solution = ef.fixed_point(lambda x: x * float("nan"), torch.ones(2, 2), max_iterations=3, raise_on_failure=False)
    assert not solution.converged


def test_any_shape():
    for shape in ((3,), (0,), (0, 2), (2, 0), (2, 3, 4, 5)):
        solution = ef.fixed_point(lambda x: 0.5 * x, torch.ones(shape, dtype=F64))
        assert solution.converged
        torch.testing.assert_close(solution.value, torch.ones(shape, dtype=F64) / 1.5)


def test_the_right_hand_side_is_left_alone():
    y = torch.ones(2, 2)
    solution = ef.fixed_point(lambda x: 0.5 * x, y)
    solution.value.zero_()
    assert torch.equal(y, torch.ones(2, 2))


def test_a_right_hand_side_with_a_gradient():
    y = torch.ones(2, 2, dtype=F64, requires_grad=True)
    solution = ef.fixed_point(lambda x: 0.5 * x, y)
    assert isinstance(solution.residual, float)
    torch.testing.assert_close(solution.value.detach(), torch.ones(2, 2, dtype=F64) / 1.5)


@pytest.mark.parametrize(
    ("error", "y", "options"),
    [
        (TypeError, [1.0], {}),
        (TypeError, torch.ones(2, dtype=torch.int64), {}),
        (TypeError, torch.ones(2, dtype=torch.complex64), {}),
        (ValueError, torch.tensor(1.0), {}),
        (ValueError, torch.ones(2), {"tol": -1.0}),
        (ValueError, torch.ones(2), {"tol": float("nan")}),
        (ValueError, torch.ones(2), {"max_iterations": 0}),
        (TypeError, torch.ones(2), {"max_iterations": 1.5}),
    ],
)
def test_bad_input(error, y, options):
    with pytest.raises(error, match=r"^Expected .+; got .+\.$"):
        ef.fixed_point(lambda x: 0.5 * x, y, **options)


def autoregressive(weight: torch.Tensor, diagonal: float):
    """u ↦ L tanh(u) + d sin(u), triangular, and its diagonal d cos(u)."""
    return lambda u: (torch.tanh(u) @ weight.T + diagonal * torch.sin(u), diagonal * torch.cos(u))


@pytest.mark.parametrize("diagonal", [0.4, 0.95], ids=["preconditioned", "plain"])
def test_a_known_diagonal(diagonal):
    f = autoregressive(3 * strictly_lower(5), diagonal)
    v = torch.randn(4, 5, dtype=F64)
    solution = triangular_fixed_point(lambda u, rows: f(u), v)
    torch.testing.assert_close(solution.value + f(solution.value)[0], v)


def test_the_implicit_gradient_is_the_derivative_of_the_solution():
    lower = strictly_lower(4)

    def solve(v, scale):
        f = autoregressive(scale * lower, 0.4)
        with torch.no_grad():
            u = triangular_fixed_point(lambda u, rows: f(u), v).value
        return with_implicit_gradient(f, u, v)

    v = torch.randn(2, 4, dtype=F64, requires_grad=True)
    scale = torch.tensor(1.5, dtype=F64, requires_grad=True)
    assert torch.autograd.gradcheck(solve, (v, scale))
