"""The plan of the series: its error bound holds, nothing cheaper fits, and it moves the right way."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import expmflow as ef
from expmflow.numerics.plan import log_remainder, series_error

UNIT = {torch.float32: 2.0**-24, torch.float64: 2.0**-53}
NORMS = [0.0, 1e-3, 0.1, 0.5, 0.9, 1.0, 3.0, 10.0, 50.0]
TOLS = [1e-2, 1e-4, 1e-6, 1e-9, 1e-12]


def scalar_series(value: complex, steps: int, terms: int) -> complex:
    """(Σ_{i ≤ terms} (value/steps)^i / i!)^steps with 19 digits."""
    size = np.clongdouble(value) / steps
    term = total = np.clongdouble(1)
    for i in range(1, terms + 1):
        term = term * size / i
        total = total + term
    return total**steps


@given(size=st.fractions(0, 20), terms=st.integers(1, 40))
def test_remainder_is_what_the_series_leaves_out(size, terms):
    exact, term = Fraction(0), Fraction(1)
    for i in range(1, terms + 150):
        term = term * size / i
        exact += term if i > terms else 0
    bound = math.exp(log_remainder(float(size), terms))
    assert bound >= float(exact) * (1 - 1e-12)
    if size <= terms / 2:
        assert bound <= 2 * float(exact) * (1 + 1e-12)


@pytest.mark.parametrize("tol", TOLS)
@pytest.mark.parametrize("norm", NORMS)
def test_truncation_of_growth_decay_and_rotation(norm, tol):
    """A = ρ, −ρ and iρ are the extremes of a norm ρ: for each the plan's series is within its bound of e^A."""
    for value, log_norm in ((norm, norm), (norm, 0.0), (-norm, 0.0), (1j * norm, 0.0)):
        plan = ef.plan_series(norm, tol, torch.float64, log_norm=log_norm)
        truth = np.exp(np.clongdouble(value))
        error = abs(scalar_series(value, plan.steps, plan.terms) - truth) / max(np.exp(np.longdouble(value.real)), 1)
        assert error <= plan.error_bound * (1 + 1e-6)


@pytest.mark.parametrize("norm", NORMS)
def test_the_bound_is_not_idle(norm):
    """One term fewer, or one step fewer, and the bound would not hold its tolerance."""
    plan = ef.plan_series(norm, 1e-9, torch.float64)
    assert plan.error_bound <= 1e-9
    unit = UNIT[torch.float64]
    if plan.terms > 1:
        assert series_error(norm, plan.steps, plan.terms - 1, unit) > 1e-9
    if plan.steps > 1:
        assert series_error(norm, plan.steps - 1, plan.terms, unit) > 1e-9


@pytest.mark.parametrize("dtype", UNIT, ids=str)
@pytest.mark.parametrize("tol", [1e-1, 1e-3, 1e-5, 1e-6, 1e-9, 1e-13])
def test_no_plan_with_fewer_products_fits(dtype, tol):
    for norm, growth in itertools.product([0.0, 1e-3, 0.3, 0.9, 2.0, 5.0, 12.0], [0.0, 0.7]):
        plan = ef.plan_series(norm, tol, dtype, log_norm=growth * norm)
        held = max(tol, UNIT[dtype])
        while held < plan.error_bound:  # where the dtype cannot hold the tolerance, it is doubled until it can
            held *= 2
        for steps in range(1, plan.products):
            for terms in range(1, (plan.products - 1) // steps + 1):
                assert series_error(norm, steps, terms, UNIT[dtype], growth * norm) > held, (norm, growth, steps, terms)
        if held > tol:
            every = itertools.product(range(1, 4 * plan.steps), range(1, 4 * plan.terms))
            assert min(series_error(norm, s, t, UNIT[dtype], growth * norm) for s, t in every) > held / 2


def test_error_of_a_plan_is_its_truncation_and_its_rounding():
    norm, steps, terms, unit, mu = 6.0, 4, 9, UNIT[torch.float32], 2.0
    left_out = sum(1.5**i / math.factorial(i) for i in range(terms + 1, 60))
    truncation = steps * left_out * (1 + left_out) ** (steps - 1) * math.exp(-mu / steps)
    rounding = 1.5 * unit * math.sqrt(steps * terms) * math.exp((norm - mu) / steps)
    error = series_error(norm, steps, terms, unit, mu)
    assert truncation + rounding <= error <= 1.1 * truncation + rounding


@given(norm=st.floats(0, 100), tol=st.sampled_from(TOLS), dtype=st.sampled_from(list(UNIT)))
def test_plans_move_the_right_way(norm, tol, dtype):
    plan = ef.plan_series(norm, tol, dtype)
    fits = plan.error_bound <= tol
    assert plan.products == plan.steps * plan.terms >= 1
    assert math.isfinite(plan.error_bound)
    if fits:
        assert ef.plan_series(norm, 10 * tol, dtype).products <= plan.products
        assert ef.plan_series(norm / 2, tol, dtype).products <= plan.products
        assert ef.plan_series(norm, tol, torch.float64).products <= plan.products
        assert ef.plan_series(norm, tol, dtype, log_norm=norm / 2).products <= plan.products
    steps, terms, unit = plan.steps, plan.terms, UNIT[dtype]
    assert series_error(norm, steps, terms, unit) <= series_error(1.01 * norm, steps, terms, unit)
    assert series_error(norm, steps, terms, unit, norm / 2) <= series_error(norm, steps, terms, unit)
    assert series_error(norm, steps, terms, unit) <= series_error(norm, steps, terms, 2 * unit)


@pytest.mark.parametrize("dtype", UNIT, ids=str)
@pytest.mark.parametrize("norm", [0.0, 0.9, 10.0, 50.0, 1e3, 1e5])
def test_a_tolerance_below_the_dtype_gives_what_it_can_hold(norm, dtype):
    plan = ef.plan_series(norm, 0.0, dtype)
    assert UNIT[dtype] <= plan.error_bound <= 1e3 * (1 + norm) ** 0.5 * UNIT[dtype]
    assert plan == ef.plan_series(norm, UNIT[dtype] / 7, dtype)


def test_defaults_follow_the_dtype():
    assert ef.plan_series(0.9) == ef.plan_series(0.9, 1e-6, torch.float32)
    assert ef.plan_series(0.9, dtype=torch.float64) == ef.plan_series(0.9, 1e-14, torch.float64)
    assert ef.plan_series(0.9, dtype=torch.bfloat16).products < ef.plan_series(0.9).products


def test_large_steps_lose_their_digits_and_are_not_taken():
    """One step of size 30 would be 1e13 times less accurate than the dtype: the plan splits."""
    plan = ef.plan_series(30.0, 1e-6, torch.float64)
    assert plan.steps > 1
    assert series_error(30.0, 1, 200, UNIT[torch.float64]) > 1e-6


def test_norms_may_be_tensors():
    assert ef.plan_series(torch.tensor(0.5), log_norm=torch.tensor(-1.0)) == ef.plan_series(0.5)


@pytest.mark.parametrize(
    ("error", "arguments"),
    [
        (ValueError, {"norm": -1.0}),
        (ValueError, {"norm": float("nan")}),
        (ValueError, {"norm": float("inf")}),
        (ValueError, {"norm": 1.0, "log_norm": float("nan")}),
        (ValueError, {"norm": 1.0, "log_norm": float("inf")}),
        (ValueError, {"norm": 1.0, "tol": -1e-6}),
        (ValueError, {"norm": 1.0, "tol": float("nan")}),
        (ValueError, {"norm": 1.0, "tol": float("inf")}),
        (TypeError, {"norm": 1.0, "tol": "1e-6"}),
        (TypeError, {"norm": 1.0, "tol": True}),
        (TypeError, {"norm": 1.0, "dtype": torch.int32}),
        (TypeError, {"norm": 1.0, "dtype": torch.complex64}),
    ],
)
def test_bad_input(error, arguments):
    with pytest.raises(error, match=r"^Expected .+; got .+\.$"):
        ef.plan_series(**arguments)
