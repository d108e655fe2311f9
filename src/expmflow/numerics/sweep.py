"""How a sweep reaches several times: which result each exponential starts from, and with what tolerance."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from expmflow.numerics.plan import SeriesPlan

Planner = Callable[[float, float], SeriesPlan]
"""The plan for exp(t·A) from t ≥ 0 and a tolerance."""

_PRICE = 1.5  # how many times as many products a link may take before the sweep starts again from x
_POINTS = 16  # at which the price of the whole way is looked up


class Leg(NamedTuple):
    """One exponential of a sweep.

    Args:
        start: the index of the time whose result it starts from; None for x.
        stop: the index of the time that it leads to.
        tol: its tolerance.
    """

    start: int | None
    stop: int
    tol: float


def plan_sweep(times: Sequence[float], plan: Planner, tol: float) -> list[Leg]:
    """The legs to increasing positive times, each from the result before it as long as that pays.

    Errors add up from leg to leg, so each leg has a share of the tolerance. Where the dtype cannot hold such a small
    one, the sum of the errors may exceed `tol`. Then the sweep goes on only while its products are at most 1.5 times
    those of the way straight from x; beyond that it starts again from x.

    Args:
        times: in increasing order, above 0.
        plan: the planner.
        tol: the tolerance at each of the times.
    """
    last, previous = times[-1], 0.0
    share = tol / 2 / min(len(times), _PRICE * plan(last, tol / 2).products)
    legs: list[Leg] = []
    start: int | None = None
    products, error = 0, 0.0
    for stop, time in enumerate(times):
        link = plan(time - previous, share)
        products, error = products + link.products, error + link.error_bound
        if error > tol and products > _PRICE * _most_products(time, last, plan, share):
            straight = plan(time, tol / 2)
            products, error = straight.products, straight.error_bound
            legs.append(Leg(None, stop, tol / 2))
        else:
            legs.append(Leg(start, stop, share))
        start, previous = stop, time
    return legs


def _most_products(time: float, last: float, plan: Planner, tol: float) -> int:
    """The most products that any time up to `time` takes from x; plans whose tolerance is doubled get cheaper again."""
    points = range(1, math.ceil(_POINTS * time / last) + 1)
    return max(plan(last * i / _POINTS, tol).products for i in points)
