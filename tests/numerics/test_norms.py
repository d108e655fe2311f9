"""Power iteration: from below towards σmax, and where it stopped it can go on."""

from __future__ import annotations

import itertools

import pytest
import torch

import expmflow as ef
from operator_cases import CASES
from reference import matrix_of, sigma_max

F64 = torch.float64


@pytest.mark.parametrize("name", CASES)
def test_converges_from_below(name, default_dtype):
    for dtype, rounds in ((F64, (0, 1, 5, 200)), (torch.float32, (1, 10))):
        default_dtype(dtype)
        op, event = CASES[name](dtype)
        truth, rounding = sigma_max(matrix_of(op, event, dtype)), 1 + 20 * torch.finfo(dtype).eps
        estimates = [float(ef.power_iteration(op, event, iterations=n).detach()) for n in rounds]
        for before, after in itertools.pairwise([*estimates, truth]):
            assert before <= after * rounding
        if dtype == F64:
            assert estimates[-1] == pytest.approx(truth, rel=5e-3)


def test_a_warm_start_goes_on_where_it_stopped():
    op, event = CASES["conv2d-3x3-zeros"](F64)
    whole = ef.power_iteration(op, event, iterations=12)
    _, vector = ef.power_iteration(op, event, iterations=11, return_vector=True)
    sigma, vector = ef.power_iteration(op, event, iterations=1, start=vector, return_vector=True)
    torch.testing.assert_close(sigma, whole)
    assert vector.shape == (1, *event)
    assert float(vector.norm()) == pytest.approx(1)


def test_a_warm_start_follows_a_changing_kernel():
    """One round per step of training is enough."""
    op, event = CASES["dense"](F64)
    _, vector = ef.power_iteration(op, event, iterations=100, return_vector=True)
    moved = ef.DenseOperator(op.matrix.detach() + 1e-3 * torch.randn(6, 6, dtype=F64))
    truth = sigma_max(moved.matrix)
    warm = float(ef.power_iteration(moved, event, iterations=1, start=vector))
    cold = float(ef.power_iteration(moved, event, iterations=1))
    assert abs(warm - truth) < 1e-5 * truth < abs(cold - truth)


def test_the_gradient_is_that_of_the_largest_singular_value():
    """∂σ/∂A = u vᵀ."""
    matrix = torch.randn(5, 5, dtype=F64, requires_grad=True)
    (grad,) = torch.autograd.grad(ef.power_iteration(ef.DenseOperator(matrix), (5,), iterations=2000), matrix)
    u, _, v = torch.linalg.svd(matrix.detach())
    torch.testing.assert_close(grad, torch.outer(u[:, 0], v[0]), rtol=1e-6, atol=1e-6)


def test_no_gradient_flows_through_the_vector():
    op, event = CASES["dense"](F64)
    _, vector = ef.power_iteration(op, event, return_vector=True)
    assert not vector.requires_grad


def test_the_zero_operator():
    op = ef.DenseOperator(torch.zeros(3, 3, requires_grad=True))
    sigma = ef.power_iteration(op, (3,))
    assert float(sigma.detach()) == 0
    (grad,) = torch.autograd.grad(sigma, op.matrix)
    assert torch.isfinite(grad).all()


def test_a_batch_of_operators_gives_the_largest():
    matrices = torch.stack([torch.eye(2), 3 * torch.eye(2), 2 * torch.eye(2)])
    assert float(ef.power_iteration(ef.DenseOperator(matrices), (2,))) == pytest.approx(3)


def test_repeatable_and_without_touching_the_global_seed():
    op, event = CASES["dense"](F64)
    torch.manual_seed(1)
    expected = torch.rand(1)
    torch.manual_seed(1)
    first = ef.power_iteration(op, event, iterations=1)
    assert torch.equal(torch.rand(1), expected)
    assert torch.equal(first, ef.power_iteration(op, event, iterations=1))


@pytest.mark.parametrize(
    ("error", "options"),
    [
        (ValueError, {"iterations": -1}),
        (TypeError, {"iterations": 2.0}),
        (ValueError, {"start": torch.ones(2, 2)}),
        (ValueError, {"start": torch.ones(1, 3)}),
        (TypeError, {"start": torch.ones(1, 2, dtype=F64)}),
    ],
)
def test_bad_input(error, options):
    with pytest.raises(error, match=r"^Expected .+; got .+\.$"):
        ef.power_iteration(ef.DenseOperator(torch.eye(2)), (2,), **options)
    with pytest.raises(ValueError, match=r"^Expected .+; got .+\.$"):
        ef.power_iteration(ef.DenseOperator(torch.eye(2)), (3,))
