"""The report's pictures."""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from torch import Tensor

from expmflow.report.summary import Density, Summary

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = ("#2563eb", "#d97706", "#059669", "#db2777", "#7c3aed", "#0891b2", "#dc2626", "#4b5563")
INK, FAINT = "#1f2937", "#9ca3af"
MOST_PANELS = 12
DPI = 160

Extent = tuple[float, float, float, float]
"""Left, right, bottom, top."""


def new_figure(width: float, height: float) -> Figure:
    """A figure outside any window system."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("Expected matplotlib for figures; got none. Install the extra `report`.") from error
    return Figure(figsize=(width, height), dpi=DPI, layout="constrained")


def save_figure(figure: Figure, target: Path | IO[bytes]) -> None:
    """As PNG, whatever the name of the file says."""
    figure.savefig(target, format="png")


def embedded(figure: Figure) -> str:
    """The picture as a `data:` address."""
    buffer = io.BytesIO()
    save_figure(figure, buffer)
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode("ascii")


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


def samples_figure(data: Tensor | None, samples: Tensor, density: Density | None = None) -> Figure:
    """Samples beside the data: points in the plane, and the density if given, or a histogram for each column."""
    if samples.flatten(1).shape[1] == 2:
        return _plane(data, samples, density)
    return _histograms(None if data is None else data.flatten(1), samples.flatten(1))


def _plane(data: Tensor | None, samples: Tensor, density: Density | None) -> Figure:
    panels = (data is not None) + (density is not None) + 1
    shown = samples if data is None else data
    extent = density.extent if density is not None else extent_of(shown)
    figure = new_figure(3.6 * panels + 0.2, 0.55 + 3.5 * _aspect(extent))
    axes = list(figure.subplots(1, panels, squeeze=False)[0])
    if data is not None:
        _points(axes.pop(0), data, "data", FAINT, extent)
    if density is not None:
        axis = axes.pop(0)
        axis.imshow(
            density.values.numpy(), origin="lower", extent=extent, cmap="magma", interpolation="bilinear", vmin=0
        )
        frame(axis, "density of the model", extent)
    _points(axes.pop(0), samples, "samples of the model", COLOURS[0], extent)
    return figure


def _histograms(data: Tensor | None, samples: Tensor) -> Figure:
    count = min(samples.shape[1], MOST_PANELS)
    columns = min(count, 4)
    lines = math.ceil(count / columns)
    figure = new_figure(2.5 * columns, 2.0 * lines + 0.4)
    panels = figure.subplots(lines, columns, squeeze=False).flatten()
    for k, axis in enumerate(panels):
        if k >= count:
            axis.axis("off")
            continue
        column = (samples if data is None else data)[:, k].double()
        low, high = column.quantile(0.002).item(), column.quantile(0.998).item()
        reach = (low, high) if high > low else (low - 0.5, low + 0.5)
        if data is not None:
            axis.hist(data[:, k].numpy(), bins=50, range=reach, density=True, color=FAINT, alpha=0.6, label="data")
        style = {"histtype": "step", "color": COLOURS[0], "linewidth": 1.5, "label": "samples"}
        axis.hist(samples[:, k].numpy(), bins=50, range=reach, density=True, **style)
        decorate(axis, f"x{k + 1}", "")
        axis.set_yticks([])
    panels[0].legend(frameon=False, fontsize=8)
    return figure


def _points(axis: Axes, points: Tensor, title: str, colour: str, extent: Extent) -> None:
    axis.scatter(points[:, 0].numpy(), points[:, 1].numpy(), s=3, color=colour, alpha=0.5, linewidths=0)
    frame(axis, title, extent)


def frame(axis: Axes, title: str, extent: Extent) -> None:
    """The part of the plane that a panel shows."""
    axis.set_xlim(extent[0], extent[1])
    axis.set_ylim(extent[2], extent[3])
    axis.set_aspect("auto" if _stretched(extent) else "equal")
    decorate(axis, title, "", grid=False)


def decorate(axis: Axes, title: str, xlabel: str, *, grid: bool = True) -> None:
    """The look of every panel."""
    axis.set_title(title, fontsize=10, color=INK, loc="left")
    axis.set_xlabel(xlabel, fontsize=9, color=INK)
    axis.tick_params(labelsize=8, colors=INK)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axis.spines[side].set_color(FAINT)
    if grid:
        axis.grid(color="#e5e7eb", linewidth=0.6)
        axis.set_axisbelow(True)


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


def extent_of(points: Tensor) -> Extent:
    """The range of points in the plane, and a margin around it."""
    least, largest = points.double().amin(0), points.double().amax(0)
    margin = 0.08 * (largest - least).clamp_min(1e-6)
    (x0, y0), (x1, y1) = (least - margin).tolist(), (largest + margin).tolist()
    return x0, x1, y0, y1


def _stretched(extent: Extent) -> bool:
    """Whether the axes have units of their own, so that equal scales would leave a thin strip."""
    ratio = (extent[3] - extent[2]) / (extent[1] - extent[0])
    return not 0.3 < ratio < 3


def _aspect(extent: Extent) -> float:
    return 1.0 if _stretched(extent) else (extent[3] - extent[2]) / (extent[1] - extent[0])
