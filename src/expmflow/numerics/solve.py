"""Fixed points, with the evidence that they were reached."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from expmflow._validation import expect, expect_count, expect_tensor
from expmflow.numerics.plan import check_tol


@dataclass(frozen=True)
class Solution:
    """The value an iteration reached, after how many rounds, and how far from a solution it is (largest entry)."""

    value: Tensor
    iterations: int
    residual: float
    converged: bool


class ConvergenceError(RuntimeError):
    """An iteration ended above its tolerance; `solution` holds what it had reached."""

    def __init__(self, message: str, solution: Solution) -> None:
        super().__init__(message)
        self.solution = solution


def fixed_point(
    g: Callable[[Tensor], Tensor],
    y: Tensor,
    *,
    tol: float | None = None,
    max_iterations: int = 1000,
    raise_on_failure: bool = True,
) -> Solution:
    """Solve x + g(x) = y for x by x ← y − g(x), starting at x = y.

    Converges if g is a contraction, and also if its Jacobian is triangular with a diagonal inside (−1, 1). Rows of the
    batch that have converged are left alone while the others go on.

    Args:
        g: maps `(batch, *event)` to the same shape, each row on its own.
        y: the right-hand side.
        tol: the largest entry of |x + g(x) − y| that counts as solved, relative to max(1, max |y|).
        max_iterations: the number of evaluations of g after which to give up.
        raise_on_failure: raise `ConvergenceError` then; otherwise `converged` is False.

    Example:
        >>> solution = fixed_point(lambda x: 0.5 * torch.sin(x), torch.ones(1, 3))
        >>> solution.converged, (solution.value + 0.5 * torch.sin(solution.value)).round(decimals=5)
        (True, tensor([[1., 1., 1.]]))
    """
    expect_tensor(y, "the right-hand side")
    expect(y.ndim >= 1, "a right-hand side of shape (batch, *event)", "a scalar")
    expect_count(max_iterations, "max_iterations")
    check_tol(tol)
    tol = 16 * torch.finfo(y.dtype).eps if tol is None else tol
    scale = _largest_entries(y.detach()).clamp_min(1)
    x = y.clone()
    residual = y.new_full((y.shape[0],), float("inf"))
    active = torch.arange(y.shape[0], device=y.device)
    iterations = 0
    while active.numel() and iterations < max_iterations and y.numel():
        current, target = x[active], y[active]
        proposal = target - g(current)
        iterations += 1
        residual[active] = _largest_entries((current - proposal).detach())
        going_on = ~(residual[active] <= tol * scale[active])
        active = active[going_on]
        if iterations < max_iterations:  # otherwise nobody would see the residual of the proposal
            x = x.index_copy(0, active, proposal[going_on])
    worst = float(residual.amax()) if y.numel() else 0.0
    solution = Solution(x, iterations, worst, active.numel() == 0 or not y.numel())
    if raise_on_failure and not solution.converged:
        raise ConvergenceError(
            f"Expected a residual of at most {tol:g} within {max_iterations} iterations; got {worst:g} in "
            f"{active.numel()} of {y.shape[0]} rows. Allow more iterations, a larger tol, or a smaller slope of g.",
            solution,
        )
    return solution


def _largest_entries(x: Tensor) -> Tensor:
    """The largest |entry| of each row of the batch."""
    rows = x.abs().reshape(x.shape[0], -1) if x.numel() else x.new_zeros(x.shape[0], 1)
    return rows.amax(1)
