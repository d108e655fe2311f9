"""A sweep over times: every time is reached once, within the tolerance, at a bounded price."""

import itertools

import pytest
import torch

from expmflow.numerics.plan import SeriesPlan, plan_series
from expmflow.numerics.sweep import Leg, Planner, plan_sweep

TIMES = {
    "one": [2.0],
    "equal ones": [1.0, 1.0, 3.0],
    "even": [0.1 * k for k in range(1, 31)],
    "far apart": [0.01, 1.0, 50.0],
}


def planner(dtype: torch.dtype, norm: float = 4.0) -> Planner:
    return lambda t, tol: plan_series(norm * t, tol, dtype)


def way_to(stop: int, legs: list[Leg]) -> list[Leg]:
    """The legs from x to a time."""
    way = [legs[stop]]
    while (start := way[-1].start) is not None:
        way.append(legs[start])
    return way


def plans(way: list[Leg], times: list[float], plan: Planner) -> list[SeriesPlan]:
    return [plan(times[leg.stop] - (0.0 if leg.start is None else times[leg.start]), leg.tol) for leg in way]


@pytest.mark.parametrize("name", TIMES)
@pytest.mark.parametrize("tol", [1e-3, 1e-9])
def test_errors_along_each_way_stay_within_the_tolerance(name, tol):
    times, plan = TIMES[name], planner(torch.float64)
    legs = plan_sweep(times, plan, tol)
    assert [leg.stop for leg in legs] == list(range(len(times)))
    assert legs[0].start is None
    assert all(leg.start in (None, before.stop) for before, leg in itertools.pairwise(legs))
    for leg in legs:
        assert sum(p.error_bound for p in plans(way_to(leg.stop, legs), times, plan)) <= tol


def test_where_the_dtype_cannot_hold_the_shares_no_way_costs_much_more_than_a_new_start():
    """In float32 each of a hundred links rounds as much as its share allows: their errors would add up without end."""
    times, plan = [0.2 * k for k in range(1, 101)], planner(torch.float32, norm=1.0)
    legs = plan_sweep(times, plan, 1e-6)
    assert sum(leg.start is None for leg in legs) > 1
    for leg in legs:
        products = sum(p.products for p in plans(way_to(leg.stop, legs), times, plan))
        assert products <= 3 * plan(times[leg.stop], 5e-7).products
