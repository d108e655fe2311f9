"""How many steps and terms the exponential series needs: a plan with a certificate.

exp(A) = exp(A/s)^s, each factor by T terms of its series. With ‖A‖ ≤ ρ and ‖exp(tA)‖ ≤ e^{tμ}, μ ≥ 0:

- Truncation. One step leaves out R = Σ_{i>T} (ρ/s)^i / i!. Through all steps this grows to at most
  s R (1 + R)^{s-1} e^{μ(s-1)/s}: a proof, relative to the growth e^μ that the result itself may have.
- Rounding. Each of the s·T products and sums rounds by a relative u, on terms that are up to e^{ρ/s} times larger than
  what remains of them. Independent roundings add up like their square root (Higham and Mary, 2019), which gives
  1.5 u √(sT) e^{ρ/s}: an estimate, not a proof; the factor is twice what was ever measured, and the tests hold it
  against general, skew and contractive operators.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from expmflow._validation import expect, expect_type

_ROUNDINGS_PER_PRODUCT = 1.5
_DEFAULT_TOL = {torch.float64: 1e-14, torch.float32: 1e-6}
_MAX_TERMS = 200
_FEW = 64
# the sizes ρ/s of a step that are worth trying: beyond 32 cancellation eats every digit of float64
_STEP_SIZES = tuple(32.0 * 0.985**i for i in range(480))


@dataclass(frozen=True)
class SeriesPlan:
    """`steps` times `terms` products, and a bound of the error relative to e^{max(μ, 0)} ‖x‖."""

    steps: int
    terms: int
    error_bound: float

    @property
    def products(self) -> int:
        """The number of operator applications."""
        return self.steps * self.terms


def default_tol(dtype: torch.dtype) -> float:
    """The tolerance used when none is given: 1e-6 in float32, 1e-14 in float64, the spacing of anything coarser."""
    return _DEFAULT_TOL.get(dtype, torch.finfo(dtype).eps)


def plan_series(
    norm: float | Tensor,
    tol: float | None = None,
    dtype: torch.dtype = torch.float32,
    *,
    log_norm: float | Tensor = 0.0,
) -> SeriesPlan:
    """The plan with the fewest products whose truncation and rounding both stay within `tol`.

    The error it certifies is relative to e^{max(μ, 0)} ‖x‖, μ being any bound of the operator's log-norm.

    Args:
        norm: an upper bound of ‖A‖ (`op.norm_bound(event_shape)`).
        tol: the tolerance; the dtype's default if None. Where the dtype cannot hold it at this norm, it is doubled
            until it can; `error_bound` says what is kept.
        dtype: the arithmetic that the series runs in.
        log_norm: an upper bound of λmax((A + Aᵀ)/2) if known: growth makes the same error relatively smaller.

    Example:
        >>> plan_series(0.9, tol=1e-6)
        SeriesPlan(steps=1, terms=9, error_bound=...)
    """
    rho, mu = float(norm), max(float(log_norm), 0.0)
    expect(math.isfinite(rho) and rho >= 0, "a finite norm of at least 0", rho)
    expect(math.isfinite(mu), "a finite log-norm", mu)
    expect_type(dtype.is_floating_point, "a real floating-point dtype", dtype)
    check_tol(tol)
    return _plan(rho, default_tol(dtype) if tol is None else float(tol), torch.finfo(dtype).eps / 2, min(mu, rho))


def check_tol(tol: float | None) -> None:
    """Raise unless `tol` is None or a number of at least 0."""
    if tol is None:
        return
    expect_type(isinstance(tol, int | float) and not isinstance(tol, bool), "tol to be a number", repr(tol))
    expect(tol >= 0 and math.isfinite(tol), "a finite tol of at least 0", tol)


def log_remainder(size: float, terms: int) -> float:
    """The logarithm of Σ_{i > terms} size^i / i!, bounded by its first term and the geometric series beyond it."""
    if size == 0:
        return -math.inf
    if size >= terms + 2:
        return math.inf
    return (terms + 1) * math.log(size) - math.lgamma(terms + 2) - math.log1p(-size / (terms + 2))


def series_error(norm: float, steps: int, terms: int, unit: float, log_norm: float = 0.0) -> float:
    """The error bound of a given plan, as the module's docstring derives it; `unit` is the unit roundoff."""
    left_out = _exp(log_remainder(norm / steps, terms))
    if left_out >= 1:
        return math.inf
    truncation = steps * left_out * _exp((steps - 1) * math.log1p(left_out) - log_norm / steps)
    return truncation + _rounding(norm, steps, terms, unit, log_norm)


def _rounding(norm: float, steps: int, terms: int, unit: float, log_norm: float) -> float:
    """A rounding of the terms is at most e^{ρ/s}, one of the result at most e^μ; the latter grows with the result.

    Those of the operator's own numbers are the same in every product, and add up: they are felt ρ times.
    """
    of_terms = _ROUNDINGS_PER_PRODUCT * unit * math.sqrt(steps * terms) * _exp((norm - log_norm) / steps)
    return of_terms + 2 * unit * norm


def _exp(x: float) -> float:
    return math.exp(min(x, 700.0))  # still a float, and beyond any tolerance


@lru_cache(maxsize=4096)
def _plan(norm: float, tol: float, unit: float, log_norm: float) -> SeriesPlan:
    tol = max(tol, unit)
    while True:
        best: SeriesPlan | None = None
        for steps in _candidates(norm):
            if best is not None and steps >= best.products:
                break
            most = _MAX_TERMS if best is None else (best.products - 1) // steps
            for terms in range(1, most + 1):
                if _rounding(norm, steps, terms, unit, log_norm) > tol:
                    break  # and more terms round more
                error = series_error(norm, steps, terms, unit, log_norm)
                if error <= tol:
                    best = SeriesPlan(steps, terms, error)
                    break
        if best is not None:
            return best
        tol *= 2


def _candidates(norm: float) -> Iterator[int]:
    """Numbers of steps, from few to many; the search seldom gets beyond the first ones."""
    yield from range(1, _FEW + 1)
    yield from sorted({steps for size in _STEP_SIZES if (steps := math.ceil(norm / size)) > _FEW})
