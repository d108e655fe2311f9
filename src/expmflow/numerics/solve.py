"""Fixed points with a verified residual, and gradients through them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from expmflow._transformed import largest_of_all, transformed
from expmflow._validation import expect, expect_count, expect_tensor, expect_unexported, expect_untraced
from expmflow.numerics.plan import check_tol

Evaluate = Callable[[Tensor, Tensor], tuple[Tensor, Tensor | None]]


@dataclass(frozen=True)
class Solution:
    """The value an iteration reached, the number of rounds it took, and its residual (largest entry)."""

    value: Tensor
    iterations: int
    residual: float
    converged: bool


class ConvergenceError(RuntimeError):
    """An iteration ended above its tolerance; `solution` holds the last iterate."""

    def __init__(self, message: str, solution: Solution) -> None:
        super().__init__(message)
        self.solution = solution


def fixed_point(
    g: Callable[..., Tensor],
    y: Tensor,
    *,
    tol: float | None = None,
    max_iterations: int = 1000,
    raise_on_failure: bool = True,
    pass_rows: bool = False,
) -> Solution:
    """Solve x + g(x) = y for x by x ← y − g(x), starting at x = y.

    Converges if g is a contraction, and also if its Jacobian is triangular with a diagonal inside (−1, 1). Rows of the
    batch that have converged are frozen while the others go on.

    Args:
        g: maps `(batch, *event)` to the same shape, each row on its own.
        y: the right-hand side.
        tol: the largest entry of |x + g(x) − y| that counts as solved, relative to max(1, max |y|).
        max_iterations: the largest number of evaluations of g.
        raise_on_failure: raise `ConvergenceError` if a row is not solved by then; otherwise `converged` is False.
        pass_rows: call `g(x, rows)`, with the batch indices of the rows that are not yet solved.

    Example:
        >>> solution = fixed_point(lambda x: 0.5 * torch.sin(x), torch.ones(1, 3))
        >>> solution.converged, (solution.value + 0.5 * torch.sin(solution.value)).round(decimals=5)
        (True, tensor([[1., 1., 1.]]))
    """
    search = _Search(lambda x, rows: (g(x, rows) if pass_rows else g(x), None), y, tol)
    search.run(max_iterations, preconditioned=False)
    return search.result(raise_on_failure)


def triangular_fixed_point(
    f: Evaluate,
    v: Tensor,
    *,
    tol: float | None = None,
    max_iterations: int = 200,
    start: Tensor | None = None,
    raise_on_failure: bool = True,
) -> Solution:
    """Solve u + f(u) = v for f with a triangular Jacobian whose diagonal is known.

    Iterates u ← u − (u + f(u) − v) / (1 + diag), which converges if the diagonal stays within ±½. Rows that do not
    settle start again with u ← v − f(u), which converges if it stays within ±1.

    Args:
        f: maps `(u, rows)`, the unsolved rows and their batch indices, to `(f(u), diagonal)`.
        v: the right-hand side, `(batch, *event)`.
        tol: as for `fixed_point`.
        max_iterations: for each of the two iterations.
        start: the first u; v if None.
        raise_on_failure: raise `ConvergenceError` if a row is solved by neither; otherwise `converged` is False.
    """
    search = _Search(f, v, tol, start)
    search.run(max_iterations, preconditioned=True)
    if search.active.numel():
        search.restart()
        search.run(max_iterations, preconditioned=False)
    return search.result(raise_on_failure)


class _Search:
    """x + g(x) = y, row by row; solved rows are frozen."""

    def __init__(self, evaluate: Evaluate, y: Tensor, tol: float | None, start: Tensor | None = None) -> None:
        expect_untraced("an iteration, whose rounds depend on its input")
        expect_unexported("an iteration, whose rounds depend on its input")
        expect_tensor(y, "the right-hand side")
        expect(y.ndim >= 1, "a right-hand side of shape (batch, *event)", "a scalar")
        check_tol(tol)
        self.evaluate = evaluate
        self.y = y
        self.x = y.clone() if start is None else start
        self.tol = 64 * torch.finfo(y.dtype).eps if tol is None else tol
        self.scale = _largest(y.detach()).clamp_min(1)
        self.residual = y.new_zeros(y.shape[0])
        self.active = torch.arange(y.shape[0] if y.numel() else 0, device=y.device)
        self.iterations = 0

    def run(self, max_iterations: int, *, preconditioned: bool) -> None:
        """Iterate until every row is solved, lost or out of iterations; `active` are the rows that are not solved."""
        expect_count(max_iterations, "max_iterations")
        if transformed(self.y):
            return self._run_together(max_iterations, preconditioned=preconditioned)
        lost = [self.active[:0]]
        for remaining in reversed(range(max_iterations)):
            if not self.active.numel():
                break
            rows = self.active
            x = self.x[rows]
            value, diagonal = self.evaluate(x, rows)
            defect = x + value - self.y[rows]
            self.iterations += 1
            self.residual[rows] = _largest(defect.detach())
            finite = torch.isfinite(self.residual[rows])
            unsolved = finite & (self.residual[rows] > self.tol * self.scale[rows])
            step = defect / (1 + diagonal) if preconditioned and diagonal is not None else defect
            self.active = rows[unsolved]
            lost.append(rows[~finite])  # an iterate that is NaN stays NaN
            if remaining:  # otherwise the residual of the next iterate would never be computed
                self.x = self.x.index_copy(0, self.active, (x - step)[unsolved])
        self.active = torch.cat([self.active, *lost])

    def _run_together(self, max_iterations: int, *, preconditioned: bool) -> None:
        """As `run`, for `torch.func`, which cannot select rows: all rows go on until the last of them is solved."""
        for remaining in reversed(range(max_iterations)):
            value, diagonal = self.evaluate(self.x, self.active)
            defect = self.x + value - self.y
            self.iterations += 1
            self.residual = _largest(defect.detach())
            if largest_of_all((self.residual / self.scale).amax()) <= self.tol:
                self.active = self.active[:0]
                return
            step = defect / (1 + diagonal) if preconditioned and diagonal is not None else defect
            if remaining:
                self.x = self.x - step

    def restart(self) -> None:
        self.x = self.y if transformed(self.y) else self.x.index_copy(0, self.active, self.y[self.active])

    def result(self, raise_on_failure: bool) -> Solution:
        worst = largest_of_all(self.residual.amax()) if self.residual.numel() else 0.0
        left = self.active.numel()
        solution = Solution(self.x, self.iterations, worst, left == 0)
        if left and raise_on_failure:
            raise ConvergenceError(
                f"Expected a residual of at most {self.tol:g} (relative) within {self.iterations} iterations; got "
                f"{worst:g} in {left} of {self.y.shape[0]} rows. Allow more iterations or a larger tol.",
                solution,
            )
        return solution


def _largest(x: Tensor) -> Tensor:
    """The largest absolute entry of each row."""
    return x.abs().reshape(x.shape[0], -1).amax(1) if x.numel() else x.new_zeros(x.shape[0])


def with_implicit_gradient(
    f: Callable[[Tensor], tuple[Tensor, Tensor]], solution: Tensor, v: Tensor, *, max_iterations: int = 200
) -> Tensor:
    """`solution` of u + f(u) = v with its exact gradient in v and in the parameters of f.

    By the implicit function theorem, the gradient g of u becomes w with (I + J)ᵀ w = g, J the Jacobian of f at u. J is
    triangular with diagonal diag, so w ← w − (w + Jᵀw − g) / (1 + diag) solves for w as in the forward direction.
    Neither the iterations that computed `solution` nor these are differentiated: there is no second derivative.
    """
    if transformed(solution, v):
        return _unrolled(f, solution, v, max_iterations)
    u = solution.detach().requires_grad_()
    with torch.enable_grad():
        value, diagonal = f(u)
    slope = 1 + diagonal.detach()
    tol = 64 * torch.finfo(v.dtype).eps

    def solve(g: Tensor | None) -> Tensor | None:
        if g is None:  # no gradient is wanted
            return None
        if torch.is_grad_enabled():
            raise RuntimeError("Expected a first derivative through an inverse; got a request for a second one.")
        scale, least = _largest(g), torch.finfo(g.dtype).tiny
        for precondition in (slope, 1):
            w, residual = g, scale
            for _ in range(max_iterations):
                (back,) = torch.autograd.grad(value, u, w, retain_graph=True)
                defect = w + back - g
                residual = _largest(defect)
                # the rounding error of a row's sum; a gradient may vanish
                if bool((residual <= tol * scale.maximum(_largest(w)) + least).all()):
                    return w
                if not bool(torch.isfinite(residual).all()):
                    break
                w = w - defect / precondition
        solution = Solution(w, max_iterations, float(residual.amax()), False)
        raise ConvergenceError(
            f"Expected the gradient through an inverse to settle within {max_iterations} iterations; got a residual of "
            f"{float(residual.amax()):g}. Allow more iterations.",
            solution,
        )

    attached = v - f(solution.detach())[0]
    if attached.requires_grad:
        attached.register_hook(solve)
    return attached


def _unrolled(f: Callable[[Tensor], tuple[Tensor, Tensor]], solution: Tensor, v: Tensor, max_iterations: int) -> Tensor:
    """As `with_implicit_gradient`, for `torch.func`, which takes no hooks: iterations that torch differentiates.

    Each iteration leaves u unchanged, and multiplies the error of its derivative by N = I − (I + J) / (1 + diag), a
    strictly triangular matrix. The derivative along one direction is computed alongside, and shows how many iterations
    are needed.
    """
    with torch.no_grad():
        _, diagonal = f(solution)
    slope, tol = 1 + diagonal.detach(), 64 * torch.finfo(v.dtype).eps
    u, residual = solution.detach(), 1.0
    direction = torch.cos(torch.arange(v.numel(), dtype=v.dtype, device=v.device)).reshape(v.shape)  # generic
    for _ in range(max_iterations):
        u = u - (u + f(u)[0] - v) / slope
        turned = torch.func.jvp(lambda point: f(point)[0], (solution.detach(),), (direction,))[1]
        direction = (direction - (direction + turned) / slope).detach()
        residual = largest_of_all(direction.abs().amax())
        if residual <= tol:
            return u
    raise ConvergenceError(
        f"Expected the gradient through an inverse to settle within {max_iterations} iterations; got a residual of "
        f"{residual:g}. Allow more iterations.",
        Solution(u, max_iterations, residual, False),
    )
