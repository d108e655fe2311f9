"""The report's own pictures: how training went."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from expmflow.data.drawing.panels import COLOURS, INK, decorate, new_figure
from expmflow.report.summary import Summary

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def curves_figure(summaries: Sequence[Summary]) -> Figure:
    """The training and validation nll, and the learning rate, of all runs over their steps."""
    figure = new_figure(9.6, 3.4)
    left, right = figure.subplots(1, 2, gridspec_kw={"width_ratios": [1.7, 1]})
    names = {summary.unit.name for summary in summaries}
    shown: list[float] = []
    for summary, colour in zip(summaries, _colours(len(summaries)), strict=True):
        unit = summary.unit.per_nat if len(names) == 1 else 1.0
        label = f"{summary.name}: " if len(summaries) > 1 else ""
        steps, values = _series(summary.records, "nll", unit)
        left.plot(steps, values, color=colour, alpha=0.35, linewidth=1, label=f"{label}training")
        steps, values = _series(summary.records, "validation_nll", unit)
        left.plot(steps, values, color=colour, linewidth=1.8, marker="o", markersize=3, label=f"{label}validation")
        if steps:
            best = summary.best
            left.plot([best["step"]], [unit * best["validation_nll"]], marker="o", markersize=7, mfc="none", mec=colour)
        right.plot(*_series(summary.records, "lr"), color=colour, linewidth=1.8)
        shown += [v for name in ("nll", "validation_nll") for v in _series(summary.records, name, unit)[1]]
    _limit(left, shown)
    decorate(left, f"negative log-likelihood ({names.pop() if len(names) == 1 else 'nats'})", "step")
    decorate(right, "learning rate", "step")
    for axis in (left, right):
        axis.xaxis.get_major_locator().set_params(integer=True)
    right.set_ylim(bottom=0)
    right.yaxis.set_major_formatter(lambda value, place: f"{value:g}")
    if left.lines:
        left.legend(frameon=False, fontsize=8, labelcolor=INK)
    return figure


def _limit(axis: Axes, values: Sequence[float]) -> None:
    """The first steps are far off and would flatten all others."""
    finite = sorted(v for v in values if math.isfinite(v))
    if len(finite) > 4:
        low, high = finite[0], finite[int(0.95 * (len(finite) - 1))]
        margin = 0.12 * max(high - low, 1e-3)
        axis.set_ylim(low - margin, high + margin)


def _series(records: Sequence[dict[str, Any]], name: str, factor: float = 1.0) -> tuple[list[int], list[float]]:
    found = [(r["step"], factor * float(r[name])) for r in records if isinstance(r.get(name), int | float)]
    return [step for step, _ in found], [value for _, value in found]


def _colours(count: int) -> list[str]:
    return [COLOURS[k % len(COLOURS)] for k in range(count)]
