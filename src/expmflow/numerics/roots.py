"""Roots of increasing functions of one variable, and triangular systems solved by substitution."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from expmflow._transformed import largest_of_all
from expmflow._validation import expect_unexported, expect_untraced
from expmflow.numerics.solve import ConvergenceError, Solution

MAX_ROUNDS = 400  # bisection alone needs 64 rounds for 64 bits


def tanh_root(v: Tensor, gain: Tensor, slope: Tensor, offset: Tensor) -> Tensor:
    """a with a + gain · tanh(slope · a + offset) = v, entry by entry; it exists and is unique if gain · slope > −1.

    Newton's method inside a shrinking bracket, with bisection where a Newton step would leave the bracket or stall. No
    gradient. Raises `ConvergenceError` if an entry does not settle, for example because it is not finite.
    """
    expect_untraced("an iteration, whose rounds depend on its input")
    expect_unexported("an iteration, whose rounds depend on its input")
    with torch.no_grad():
        v, gain, slope, offset = torch.broadcast_tensors(v, gain, slope, offset)
        low, high = v - gain.abs(), v + gain.abs()
        # the largest defect that rounding can leave
        floor = 4 * torch.finfo(v.dtype).eps * (v.abs() + gain.abs() * (1 + offset.abs()) + torch.finfo(v.dtype).tiny)
        a, last = v, high - low
        defect = v.new_zeros(v.shape)
        for _ in range(MAX_ROUNDS):
            h = torch.tanh(slope * a + offset)
            defect, rise = a + gain * h - v, 1 + gain * slope * (1 - h * h)
            low, high = torch.where(defect <= 0, a, low), torch.where(defect >= 0, a, high)
            newton = a - defect / rise
            good = (newton >= low) & (newton <= high) & (2 * defect.abs() <= last * rise)
            moved = torch.where(good, newton, (low + high) / 2)
            settled = (defect.abs() <= floor) | (moved == a)  # false for NaN
            if not largest_of_all((~settled).any()):
                return a
            a, last = moved, (moved - a).abs()
    worst = largest_of_all(defect.abs().amax())
    raise ConvergenceError(
        f"Expected a root of a + gain · tanh(slope · a + offset) − v within {MAX_ROUNDS} rounds; got {worst:g} left. "
        "There is one root if gain · slope > −1 and all are finite.",
        Solution(a, MAX_ROUNDS, worst, False),
    )


def substitute(step: Callable[[Tensor], Tensor], start: Tensor) -> Solution:
    """x with x = step(x), for a step whose entry k reads only entries before k, in some order of the d entries.

    Updates all entries at once: after k rounds the first k are right, whatever the others were. So d + 1 rounds are
    enough, and mostly far fewer. Raises `ConvergenceError` if x still changes after that.

    Args:
        step: maps `(batch, *event)` to the same shape, each row on its own.
        start: the initial x.
    """
    expect_untraced("an iteration, whose rounds depend on its input")
    expect_unexported("an iteration, whose rounds depend on its input")
    eps, largest = torch.finfo(start.dtype).eps, torch.finfo(start.dtype).max ** 0.25
    rounds = start[:1].numel() + 1
    x, change = start, start.new_zeros(())
    for done in range(1, rounds + 1):
        # an entry that is not right yet may be anything; it must not turn others into NaN as infinity times zero
        moved = step(x.nan_to_num(0.0, 0.0, 0.0).clamp(-largest, largest))
        change = (moved - x).abs() / x.abs().clamp_min(1)
        change = torch.where(moved.abs() <= largest, change, torch.inf)  # nor is NaN
        x = moved
        if x.numel() == 0 or largest_of_all(change.amax()) <= 4 * eps:
            return Solution(x, done, largest_of_all(change.amax()) if x.numel() else 0.0, True)
    worst = largest_of_all(change.amax())
    solution = Solution(x, rounds, worst, worst <= 64 * eps)
    if not solution.converged:
        raise ConvergenceError(
            f"Expected entries that stand still after {rounds} rounds; got a relative change of {worst:g}. A map that "
            "stretches by so much has no inverse in this precision.",
            solution,
        )
    return solution
