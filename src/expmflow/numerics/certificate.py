"""Error bounds of an exponential before it is computed: proven and expected."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from expmflow._validation import expect, expect_count, expect_type
from expmflow.numerics.graph_series import has_graph_series, plan_graph_series
from expmflow.numerics.plan import SeriesPlan, check_tol, fixed_plan, proven_rounding, with_rounding
from expmflow.numerics.series import log_norm_at, plan_for
from expmflow.operators import LinearOperator


@torch.no_grad()
def certify(
    op: LinearOperator,
    event_shape: Sequence[int],
    t: float | Tensor = 1.0,
    *,
    tol: float | None = None,
    terms: int | None = None,
    dtype: torch.dtype | None = None,
) -> SeriesPlan:
    """The plan that `expm_apply(op, x, t, tol=tol)` follows, with its proven and its expected error.

    Errors are relative to e^{max(μ, 0)} ‖x‖, with μ the log-norm bound of t·A. No `x` has an error above
    `plan.proven_bound`, apart from underflow and overflow. This bound counts every rounding at its worst, for sums as
    torch adds them up (not Winograd's algorithm, not TF32). It is infinite if the operator does not know its
    `sum_length`. `plan.error_bound` is the error to expect for data of mixed signs.

    Args:
        op: the operator A.
        event_shape: the shape of an event of `x`, without the batch.
        t: one time.
        tol: as for `expm_apply`.
        terms: a fixed number of terms instead of a tolerance.
        dtype: that of `x`, if the operator has no parameters; torch's default if None.

    Example:
        >>> blur = ef.ConvOperator(torch.full((1, 1, 3, 3), 0.1))
        >>> plan = certify(blur, (1, 28, 28))
        >>> plan.terms, plan.truncation_bound <= 1e-6, 1e-6 < plan.proven_bound < 1e-5
        (9, True, True)
    """
    expect_type(isinstance(op, LinearOperator), "a LinearOperator", type(op).__name__)
    expect(tol is None or terms is None, "either tol or terms", "both")
    check_tol(tol)
    shape, factor = tuple(event_shape), torch.as_tensor(t, dtype=torch.float64).detach()
    op.check_event_shape(shape)
    if op.parameters:
        dtype = op.parameters[0].dtype
    elif dtype is None:
        dtype = torch.get_default_dtype()
    norm, log_norm = float(op.norm_bound(shape) * factor.abs()), float(log_norm_at(op, factor, shape))
    if terms is not None:
        expect_count(terms, "terms")
        plan = fixed_plan(norm, terms, dtype, log_norm)
    else:
        scaled = op.folded(shape).scale(float(factor))
        if has_graph_series(scaled) and (found := plan_graph_series(scaled, tol, dtype)) is not None:
            return found
        plan = plan_for(op, factor, shape, dtype, tol)
    length = op.sum_length(shape)
    if length is None:
        return plan
    absolute, growth = float(op.absolute_norm_bound(shape) * factor.abs()), min(max(log_norm, 0.0), norm)
    unit = torch.finfo(dtype).eps / 2
    return with_rounding(plan, proven_rounding(norm, plan, unit, growth, length, absolute, collapses=op.collapses))
