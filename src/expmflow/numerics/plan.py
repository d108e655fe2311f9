"""How many steps and terms the exponential series needs: a plan, with its proven and its expected error.

exp(A) = exp(A/s)^s, each factor by T terms of its series. Let ‖A‖ ≤ ρ and ‖exp(tA)‖ ≤ e^{tμ}, μ ≥ 0. Errors are
relative to e^μ, the growth that the result itself may have:

- Truncation, proven. One step omits R = Σ_{i>T} (ρ/s)^i / i!. Through all steps this grows to at most
  s R (1 + R)^{s-1} e^{-μ/s}.
- Rounding, proven. An entry of A x that adds up n numbers is off by at most γ |A||x|, γ ≈ n u. So with ‖|A|‖ ≤ α, one
  step is off by at most ε = (γ α/s + γ_T) e^{ρ/s + γα/s}, and all of them by s ε (1 + R + ε)^{s-1} e^{-μ/s} (Higham,
  2002, section 3; underflow apart). This covers numbers of one sign, which may all round in the same direction.
- Rounding, expected. Independent roundings accumulate like their square root (Higham and Mary, 2019), which gives
  1.5 u √(sT) e^{ρ/s}. This is an estimate; its factor is twice the largest measured with random numbers.

The expected error determines the plan, because the proven one is pessimistic by orders of magnitude for mixed signs.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from expmflow._transformed import largest_of_all
from expmflow._validation import expect, expect_count, expect_type

_ROUNDINGS_PER_PRODUCT = 1.5
_DEFAULT_TOL = {torch.float64: 1e-14, torch.float32: 1e-6}
_MAX_TERMS = 200
_MANY_PRODUCTS = 100_000  # seconds, whatever the operator
_FEW = 64
# step sizes ρ/s to try: beyond 32, cancellation destroys every digit of float64
_STEP_SIZES = tuple(32.0 * 0.985**i for i in range(480))


@dataclass(frozen=True)
class SeriesPlan:
    """`steps` times `terms` products, with their proven and expected error relative to e^{max(μ, 0)} ‖x‖.

    Attributes:
        steps: s.
        terms: T.
        error_bound: the expected error, `truncation_bound + expected_rounding`.
        truncation_bound: a proven bound on the omitted terms of the series.
        rounding_bound: a proven bound on worst-case rounding; infinite if the length of the operator's sums is unknown.
        expected_rounding: the rounding error to expect if roundings do not all go in the same direction.
    """

    steps: int
    terms: int
    error_bound: float
    truncation_bound: float = math.nan
    rounding_bound: float = math.inf
    expected_rounding: float = math.nan

    @property
    def proven_bound(self) -> float:
        """A bound of the whole error for any data, `truncation_bound + rounding_bound`."""
        return self.truncation_bound + self.rounding_bound

    @property
    def products(self) -> int:
        """The number of operator applications."""
        return self.steps * self.terms


def default_tol(dtype: torch.dtype) -> float:
    """The tolerance used when none is given: 1e-6 in float32, 1e-14 in float64, the spacing of coarser dtypes."""
    return _DEFAULT_TOL.get(dtype, torch.finfo(dtype).eps)


def tol_or_default(tol: float | None, dtype: torch.dtype) -> float:
    """The tolerance, or that of the dtype if None."""
    return default_tol(dtype) if tol is None else float(tol)


def plan_series(
    norm: float | Tensor,
    tol: float | None = None,
    dtype: torch.dtype = torch.float32,
    *,
    log_norm: float | Tensor = 0.0,
    sum_length: int | None = None,
    absolute_norm: float | Tensor | None = None,
) -> SeriesPlan:
    """The plan with the fewest products whose truncation and expected rounding together stay within `tol`.

    Errors are relative to e^{max(μ, 0)} ‖x‖, with μ any bound of the operator's log-norm. `certify` collects these
    arguments from an operator.

    Args:
        norm: an upper bound of ‖A‖ (`op.norm_bound(event_shape)`).
        tol: the tolerance; the dtype's default if None. If the dtype cannot hold it at this norm, it is doubled until
            it can; `error_bound` states the accuracy that is reached.
        dtype: the arithmetic that the series runs in.
        log_norm: an upper bound of λmax((A + Aᵀ)/2) if known: growth makes the same error relatively smaller.
        sum_length: how many numbers an entry of A x adds up (`op.sum_length(event_shape)`); without it there is no
            proven bound on rounding.
        absolute_norm: an upper bound of ‖|A|‖ (`op.absolute_norm_bound(event_shape)`); √sum_length · norm if not given,
            which holds where no column of A has more entries than a row.

    Example:
        >>> plan_series(0.9, tol=1e-6)
        SeriesPlan(steps=1, terms=9, error_bound=...)
        >>> plan = plan_series(0.9, tol=1e-6, sum_length=27)
        >>> plan.truncation_bound < plan.error_bound < plan.proven_bound < 1e-4
        True
    """
    rho, mu = largest_of_all(norm), max(largest_of_all(log_norm), 0.0)
    expect(math.isfinite(rho) and rho >= 0, "a finite norm of at least 0", rho)
    expect(math.isfinite(mu), "a finite log-norm", mu)
    expect_type(dtype.is_floating_point, "a real floating-point dtype", dtype)
    check_tol(tol)
    unit = torch.finfo(dtype).eps / 2
    plan = _plan(rho, tol_or_default(tol, dtype), unit, min(mu, rho))
    if sum_length is None:
        return plan
    expect_count(sum_length, "sum_length", at_least=0)
    absolute = math.sqrt(sum_length) * rho if absolute_norm is None else largest_of_all(absolute_norm)
    return with_rounding(plan, proven_rounding(rho, plan, unit, min(mu, rho), sum_length, absolute))


def with_rounding(plan: SeriesPlan, bound: float) -> SeriesPlan:
    """The plan with a proven bound on its rounding, which also caps the expected rounding."""
    expected = min(plan.expected_rounding, bound)
    error = plan.truncation_bound + expected
    return replace(plan, error_bound=error, rounding_bound=bound, expected_rounding=expected)


def fixed_plan(norm: float, terms: int, dtype: torch.dtype, log_norm: float = 0.0) -> SeriesPlan:
    """The plan of the paper's series, truncated after `terms`, and its error."""
    return _with_errors(norm, 1, terms, torch.finfo(dtype).eps / 2, min(max(log_norm, 0.0), norm))


def proven_rounding(
    norm: float,
    plan: SeriesPlan,
    unit: float,
    log_norm: float,
    sum_length: int,
    absolute_norm: float,
    *,
    collapses: bool = False,
) -> float:
    """The worst that rounding can do, as derived in the module's docstring.

    The sum of n numbers is charged with six more roundings, for an entry of t·A/(s·i). A series that may first be
    summed as one matrix is, in absolute values, Σ |A|^i / i!, with as many sums and one more.
    """
    steps, terms, size = plan.steps, plan.terms, absolute_norm / plan.steps
    product, sums = gamma(sum_length + 6, unit), gamma(terms, unit)
    off = (product * size + sums) * _exp(norm / steps + product * size)
    if collapses and steps == 1:
        off = max(off, (product * size + gamma(sum_length + 4 * terms, unit)) * _exp(size + product * size))
    if not math.isfinite(off):
        return math.inf
    damped = _exp(-log_norm / steps)
    left_out = _exp(log_remainder(norm / steps, terms))
    return steps * off * damped * _exp((steps - 1) * math.log1p((left_out + off) * damped))


def gamma(roundings: int, unit: float) -> float:
    """γ_n = n u / (1 − n u), which bounds (1 + u)^n − 1."""
    return roundings * unit / (1 - roundings * unit) if roundings * unit < 1 else math.inf


def check_tol(tol: float | None) -> None:
    """Raise unless `tol` is None or a number of at least 0."""
    if tol is None:
        return
    expect_type(isinstance(tol, int | float) and not isinstance(tol, bool), "tol to be a number", repr(tol))
    expect(tol >= 0 and math.isfinite(tol), "a finite tol of at least 0", tol)


def check_plan(
    plan: SeriesPlan, t: float, tol: float | None, dtype: torch.dtype, cheaper: str, *, stacklevel: int
) -> None:
    """Raise where no digit of the result is known; warn where it takes long, and say what is `cheaper`."""
    expect(
        plan.error_bound < max(1.0, 0.0 if tol is None else tol),
        f"an exponential of which {dtype} keeps a digit",
        f"t = {t:g}, where rounding may take them all: take a smaller t, a tighter norm bound, or a wider dtype",
    )
    if plan.products > _MANY_PRODUCTS:
        cost = f"The exponential at t = {t:g} takes {plan.products:,} products, about as many as t times the norm."
        warnings.warn(f"{cost} {cheaper}", stacklevel=stacklevel + 1)


def log_remainder(size: float, terms: int) -> float:
    """The logarithm of Σ_{i > terms} size^i / i!, bounded by its first term and a geometric series."""
    if size == 0:
        return -math.inf
    if size >= terms + 2:
        return math.inf
    return (terms + 1) * math.log(size) - math.lgamma(terms + 2) - math.log1p(-size / (terms + 2))


def series_error(norm: float, steps: int, terms: int, unit: float, log_norm: float = 0.0) -> float:
    """The expected error of a given plan; `unit` is the unit roundoff."""
    return _truncation(norm, steps, terms, log_norm) + _rounding(norm, steps, terms, unit, log_norm)


def _truncation(norm: float, steps: int, terms: int, log_norm: float) -> float:
    left_out = _exp(log_remainder(norm / steps, terms))
    if left_out >= 1:
        return math.inf
    return steps * left_out * _exp((steps - 1) * math.log1p(left_out) - log_norm / steps)


def _with_errors(norm: float, steps: int, terms: int, unit: float, log_norm: float) -> SeriesPlan:
    truncation, rounding = _truncation(norm, steps, terms, log_norm), _rounding(norm, steps, terms, unit, log_norm)
    return SeriesPlan(steps, terms, truncation + rounding, truncation, expected_rounding=rounding)


def _rounding(norm: float, steps: int, terms: int, unit: float, log_norm: float) -> float:
    """A rounding of the terms is at most e^{ρ/s}, one of the result at most e^μ; the latter grows with the result.

    Roundings of the operator's own entries are the same in every product, and accumulate: they count ρ times.
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
                    break  # more terms would add more rounding
                if series_error(norm, steps, terms, unit, log_norm) <= tol:
                    best = _with_errors(norm, steps, terms, unit, log_norm)
                    break
        if best is not None:
            return best
        tol *= 2


def _candidates(norm: float) -> Iterator[int]:
    """Numbers of steps, in increasing order; the search rarely goes beyond the first ones."""
    yield from range(1, _FEW + 1)
    yield from sorted({steps for size in _STEP_SIZES if (steps := math.ceil(norm / size)) > _FEW})
