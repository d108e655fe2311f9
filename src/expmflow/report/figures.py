"""The report's own figures: the course of the training."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from expmflow.data.drawing.columns import bins
from expmflow.data.drawing.panels import COLOURS, FAINT, INK, decorate, new_figure
from expmflow.report.summary import Summary

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDE_BARS = 128  # bars are drawn with gaps up to this number


def curves_figure(summaries: Sequence[Summary]) -> Figure:
    """The training and validation nll, and the learning rate, of all runs over their steps."""
    figure = new_figure(9.6, 3.4)
    left, right = figure.subplots(1, 2, gridspec_kw={"width_ratios": [1.7, 1]})
    names = {summary.unit.name for summary in summaries}
    shown: list[float] = []
    validated: list[float] = []
    for summary, colour in zip(summaries, _colours(len(summaries)), strict=True):
        unit = summary.unit.per_nat if len(names) == 1 else 1.0
        label = f"{summary.name}: " if len(summaries) > 1 else ""
        steps, values = _series(summary.records, "nll", unit)
        style: dict[str, Any] = {"alpha": 0.35, "linewidth": 1, "marker": _marker(steps), "markersize": 3}
        left.plot(steps, values, color=colour, label=f"{label}training{_warmup(summary)}", **style)
        steps, values = _series(summary.records, "validation_nll", unit)
        left.plot(steps, values, color=colour, linewidth=1.8, marker="o", markersize=3, label=f"{label}validation")
        if steps:
            best = summary.best
            left.plot([best["step"]], [unit * best["validation_nll"]], marker="o", markersize=7, mfc="none", mec=colour)
        steps, rates = _series(summary.records, "lr")
        right.plot(steps, rates, color=colour, linewidth=1.8, marker=_marker(steps), markersize=3)
        shown += _series(summary.records, "nll", unit)[1]
        validated += values
    _limit(left, shown, validated)
    what = "−ELBO" if all(summary.is_bound for summary in summaries) else "negative log-likelihood"
    decorate(left, f"{what} ({names.pop() if len(names) == 1 else 'nats'})", "step")
    decorate(right, "learning rate", "step")
    for axis in (left, right):
        axis.xaxis.get_major_locator().set_params(integer=True)
    right.set_ylim(bottom=0)
    right.yaxis.set_major_formatter(lambda value, place: f"{value:g}")
    if left.lines:
        left.legend(frameon=False, fontsize=8, labelcolor=INK)
    return figure


def _marker(steps: Sequence[int]) -> str:
    """A dot for the single record of a short run, which makes no line."""
    return "o" if len(steps) == 1 else ""


def _warmup(summary: Summary) -> str:
    """A remark about the training loss: at first, its KL part weighs less than in validations."""
    steps = summary.config["optim"].get("kl_warmup", 0)
    return f", KL part growing until step {steps:,}" if steps else ""


def _limit(axis: Axes, values: Sequence[float], validated: Sequence[float]) -> None:
    """Ignore the first steps, which would flatten all others; show all validations, so that overfitting is visible."""
    finite = sorted(v for v in values if math.isfinite(v))
    inside = [v for v in validated if math.isfinite(v)]
    if len(finite) > 4 or inside:
        low = min([*finite[:1], *inside])
        high = max([*inside, *([finite[int(0.95 * (len(finite) - 1))]] if finite else [])])
        margin = 0.12 * max(high - low, 1e-3)
        axis.set_ylim(low - margin, high + margin)


def scores_figure(summary: Summary) -> Figure:
    """The distribution of the likelihoods of each split, in the unit of the run."""
    figure = new_figure(9.6, 3.0)
    axis = figure.subplots()
    factor = summary.unit.per_nat
    parts = {part: factor * nll[nll.isfinite()] for part, nll in summary.known.nll.items() if len(nll) > 1}
    everything = torch.cat(list(parts.values())) if parts else torch.zeros(1)
    low, high = (float(everything.quantile(q)) for q in (0.002, 0.998))
    reach = (low, high) if high > low else (low - 0.5, low + 0.5)
    for (part, values), colour in zip(parts.items(), (FAINT, *COLOURS), strict=False):
        label = f"{part} ({len(values)} rows, mean {float(values.mean()):.4g})"
        style: dict[str, Any] = {"histtype": "step", "linewidth": 1.6}
        if part == "train":
            style = {"histtype": "stepfilled", "alpha": 0.5}
        axis.hist(values.numpy(), bins=bins(values), range=reach, density=True, color=colour, label=label, **style)
    decorate(axis, f"{'−ELBO' if summary.is_bound else 'nll'} of single rows ({summary.unit.name})", "")
    axis.set_yticks([])
    axis.legend(frameon=False, fontsize=8, labelcolor=INK)
    return figure


def latents_figure(summary: Summary) -> Figure | None:
    """The KL of each latent dimension, from the largest to the smallest; None without latents."""
    if summary.latents is None:
        return None
    kl = summary.latents.kl.double().cpu().sort(descending=True).values
    figure = new_figure(9.6, 2.4)
    axis = figure.subplots()
    axis.bar(range(1, len(kl) + 1), kl.numpy(), width=0.8 if len(kl) <= WIDE_BARS else 1.0, color=COLOURS[0])
    axis.set_xlim(0.4, len(kl) + 0.6)
    axis.locator_params(axis="x", integer=True)
    decorate(axis, f"KL of each latent number, {float(kl.sum()):.4g} in all (nats)", "latent number, largest KL first")
    return figure


def _series(records: Sequence[dict[str, Any]], name: str, factor: float = 1.0) -> tuple[list[int], list[float]]:
    points = [(r["step"], factor * float(r[name])) for r in records if isinstance(r.get(name), int | float)]
    return [step for step, _ in points], [value for _, value in points]


def _colours(count: int) -> list[str]:
    return [COLOURS[k % len(COLOURS)] for k in range(count)]
