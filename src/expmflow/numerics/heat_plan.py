"""How many terms a heat kernel needs, and its error: proven and expected."""

from __future__ import annotations

import math
from functools import lru_cache

import torch

from expmflow._validation import expect
from expmflow.numerics.decay import Basis, terms_needed
from expmflow.numerics.plan import SeriesPlan, gamma, tol_or_default, with_rounding

_MOST = 5_000_000  # products; their weights take memory, too


@lru_cache(maxsize=256)
def plan_heat(
    tau: float,
    tol: float | None,
    dtype: torch.dtype,
    basis: Basis = "chebyshev",
    sum_length: int | None = None,
    absolute_norm: float = 1.0,
) -> SeriesPlan:
    """The terms that e^{τ(M − 1)} needs, with the proven and the expected error relative to ‖x‖.

    Truncation, proven: at most the sum of the omitted weights. Rounding, expected: the rounded entries of M are felt τ
    times, and so are all sums, which adds 2u(τ + √terms), and nτu/16 more for sums of n = `sum_length` numbers of one
    sign. If `tol` is below this, the dtype cannot hold it, and `error_bound` states the accuracy that is reached.

    Rounding, proven: let ‖|M|‖ ≤ α = `absolute_norm`, and let each product be off by at most γ ≈ (2n + 8)u times α.
    Chebyshev's recurrence propagates the error of a term by polynomials of the second kind, so T_k is off by at most
    (2α + 1)γ k(k + 1)/2, and Σ w_k k² = τ. A power M^k is off by (1 + αγ)^k − 1, and Σ w_k (1 + αγ)^k = e^{ταγ}.
    """
    most = _reach(basis, tau)
    expect(most <= _MOST, f"a time that takes at most {_MOST:,} products", f"one that takes about {most:,}")
    unit = torch.finfo(dtype).eps / 2
    tolerance = max(tol_or_default(tol, dtype), unit)
    rounding = 2 * unit * (tau + math.sqrt(terms_needed(basis, tau, tolerance)[0] + 1))
    terms, left_out = terms_needed(basis, tau, max(tolerance - rounding, rounding / 8))
    rounding += 0.0 if sum_length is None else sum_length * tau * unit / 16
    plan = SeriesPlan(1, terms, left_out + rounding, left_out, expected_rounding=rounding)
    if sum_length is None:
        return plan
    return with_rounding(plan, _proven_rounding(tau, terms, unit, basis, sum_length, absolute_norm))


def _reach(basis: Basis, tau: float) -> int:
    """How many weights there are to choose from: no fewer than there will be products, and not many more."""
    return math.ceil(30 + 10 * math.sqrt(tau) + (tau if basis == "powers" else 0))


def _proven_rounding(tau: float, terms: int, unit: float, basis: Basis, sum_length: int, absolute: float) -> float:
    """Entries contain the roundings of degrees, which are sums of the same length; weights those of their
    recurrence."""
    product, sums = gamma(2 * sum_length + 8, unit), gamma(5 * terms + 8, unit)
    scaling = gamma(4, unit)
    if basis == "powers":
        carried = math.expm1(min(tau * absolute * product, 700.0))
        return carried + (sums + scaling) * (1 + carried)
    product *= 2 * absolute + 1
    reach = product * terms * (terms + 1) / 2
    if reach >= 1:
        return math.inf
    carried = product * (tau + math.sqrt(tau)) / 2 / (1 - reach)
    return carried + (sums + scaling) / (1 - reach) * (1 + carried)
