"""Times so large that an exponential takes long, or says nothing: told before the work is done."""

from __future__ import annotations

import warnings

import pytest
import torch

import expmflow as ef

EDGES = torch.tensor([[0, 1, 1, 2, 2, 0], [1, 0, 2, 1, 0, 2]])
ONE_WAY = torch.tensor([[0, 1, 2], [1, 2, 0]])
TURN = ef.DenseOperator(torch.tensor([[0.0, -1.0], [1.0, 0.0]]))


@pytest.mark.parametrize("t", [1e9, -1e9, torch.tensor(1e9), [0.5, 1e9]], ids=["ahead", "back", "tensor", "several"])
def test_where_no_digit_is_kept_nothing_is_computed(t):
    with pytest.raises(
        ValueError, match=r"^Expected an exponential of which torch\.float32 keeps a digit; got t = -?1e\+09"
    ):
        ef.expm_apply(TURN, torch.ones(1, 2), t)
    assert ef.certify(TURN, (2,), t=1e9).error_bound >= 1  # which is what it is refused for


def test_heat_of_which_no_digit_is_kept():
    with pytest.raises(
        ValueError, match=r"^Expected an exponential of which torch\.float32 keeps a digit; got t = 1e\+08"
    ):
        ef.heat_kernel(EDGES, torch.eye(3), [1.0, 1e8])
    for run in (ef.heat_kernel, ef.certify_heat):
        with pytest.raises(
            ValueError, match=r"^Expected a time that takes at most 5,000,000 products; got one that takes"
        ):
            run(ONE_WAY, torch.eye(3, dtype=torch.float64), 1e12)


def test_a_wider_dtype_keeps_some():
    """The heat of a connected graph is even in the end."""
    z = ef.heat_kernel(EDGES, torch.eye(3, dtype=torch.float64), 2e7)
    torch.testing.assert_close(z, torch.full_like(z, 1 / 3), rtol=0, atol=1e-6)


def test_a_coarse_tolerance_is_the_caller_s_own():
    turn, x = ef.DenseOperator(TURN.matrix.bfloat16()), torch.ones(1, 2, dtype=torch.bfloat16)
    assert ef.expm_apply(turn, x, t=150.0, tol=4.0).shape == (1, 2)
    with pytest.raises(ValueError, match=r"torch\.bfloat16 keeps a digit; got t = 150,"):
        ef.expm_apply(turn, x, t=150.0)


def test_many_products_are_warned_of_with_their_number(monkeypatch):
    monkeypatch.setattr("expmflow.numerics.plan._MANY_PRODUCTS", 1000)
    plan = ef.certify(TURN, (2,), t=500.0)
    with pytest.warns(UserWarning, match=rf"at t = 500 takes {plan.products:,} products.*matrix_exp") as caught:
        z = ef.expm_apply(TURN, torch.ones(1, 2), t=500.0)
    assert caught[0].filename == __file__
    expected = torch.ones(1, 2, dtype=torch.float64) @ torch.matrix_exp(500 * TURN.dense((2,)).double()).T
    assert float((z - expected).norm()) < plan.error_bound * 2**0.5
    with pytest.warns(UserWarning, match="takes .* products") as caught:
        ef.expm_apply(TURN, torch.ones(1, 2), t=[0.0, 500.0])
    assert len(caught) == 1
    with pytest.warns(UserWarning, match=r"takes 1,... products.*torch\.matrix_exp\(-t \* L\)") as caught:
        ef.heat_kernel(ONE_WAY, torch.eye(3), 1e3, "rw")
    assert caught[0].filename == __file__


def test_few_are_not():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ef.expm_apply(TURN, torch.ones(1, 2), t=1e2)
        ef.heat_kernel(EDGES, torch.eye(3), 1e6)


def test_a_time_that_is_no_number():
    for t in (1j, "1", None, True, range(3)):
        with pytest.raises(TypeError, match=r"^Expected t to be a number, a tensor or a list of times; got \w+\.$"):
            ef.expm_apply(TURN, torch.ones(1, 2), t)
