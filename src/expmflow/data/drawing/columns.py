"""Rows of numbers: points in the plane, or a histogram for each column."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from expmflow.data.drawing.panels import COLOURS, FAINT, Extent, aspect, decorate, extent_of, frame, new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST_PANELS = 12
LONGEST_NAME = 28  # the longest that fits above a panel


def columns_figure(
    data: Tensor | None,
    samples: Tensor,
    names: Sequence[str] = (),
    density: tuple[Tensor, Extent] | None = None,
) -> Figure:
    """Samples beside the data: points in the plane, and the density if given, or a histogram for each column.

    Args:
        data, samples: `(rows, columns)`.
        names: the names of the columns; x1, x2, … if there are none.
        density: values on a square grid, with rows going up, and the range of the grid.
    """
    names = names or [f"x{k + 1}" for k in range(samples.shape[1])]
    if samples.shape[1] == 2:
        return _plane(data, samples, names, density)
    return _histograms(data, samples, names)


def _plane(data: Tensor | None, samples: Tensor, names: Sequence[str], density: tuple[Tensor, Extent] | None) -> Figure:
    panels = (data is not None) + (density is not None) + 1
    shown = samples if data is None else data
    extent = density[1] if density is not None else extent_of(shown)
    figure = new_figure(3.6 * panels + 0.2, 0.55 + 3.5 * aspect(extent))
    axes = list(figure.subplots(1, panels, squeeze=False)[0])
    if data is not None:
        _points(axes.pop(0), data, "data", FAINT, extent)
    if density is not None:
        axis = axes.pop(0)
        axis.imshow(density[0].numpy(), origin="lower", extent=extent, cmap="magma", interpolation="bilinear", vmin=0)
        frame(axis, "density of the model", extent)
    _points(axes.pop(0), samples, "samples of the model", COLOURS[0], extent)
    for axis in figure.axes:
        axis.set_xlabel(names[0], fontsize=8)
    figure.axes[0].set_ylabel(names[1], fontsize=8)
    return figure


def _histograms(data: Tensor | None, samples: Tensor, names: Sequence[str]) -> Figure:
    count = min(samples.shape[1], MOST_PANELS)
    columns = min(count, 4)
    lines = math.ceil(count / columns)
    figure = new_figure(2.5 * columns, 2.0 * lines + 0.4)
    panels = figure.subplots(lines, columns, squeeze=False).flatten()
    bars = bins(samples if data is None else data)
    for k, axis in enumerate(panels):
        if k >= count:
            axis.axis("off")
            continue
        column = (samples if data is None else data)[:, k].double()
        low, high = column.quantile(0.002).item(), column.quantile(0.998).item()
        reach = (low, high) if high > low else (low - 0.5, low + 0.5)
        if data is not None:
            axis.hist(data[:, k].numpy(), bins=bars, range=reach, density=True, color=FAINT, alpha=0.6, label="data")
        style = {"histtype": "step", "color": COLOURS[0], "linewidth": 1.5, "label": "samples"}
        axis.hist(samples[:, k].numpy(), bins=bars, range=reach, density=True, **style)
        decorate(axis, _short(names[k]), "")
        axis.set_yticks([])
    panels[0].legend(frameon=False, fontsize=8)
    if count < samples.shape[1]:
        figure.suptitle(f"{count} of {samples.shape[1]} columns", fontsize=9, x=0.01, ha="left")
    return figure


def bins(rows: Tensor) -> int:
    """The number of bars in a histogram of `rows` rows."""
    return max(8, min(50, int(2 * math.sqrt(len(rows)))))


def _short(name: str) -> str:
    return name if len(name) <= LONGEST_NAME else f"{name[: LONGEST_NAME - 1]}…"


def _points(axis: Axes, points: Tensor, title: str, colour: str, extent: Extent) -> None:
    axis.scatter(points[:, 0].numpy(), points[:, 1].numpy(), s=3, color=colour, alpha=0.5, linewidths=0)
    frame(axis, title, extent)
