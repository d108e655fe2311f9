"""Graphs in the plane: the nodes of many graphs, and a few single graphs."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from expmflow.data.drawing.panels import COLOURS, FAINT, INK, Extent, decorate, extent_of, frame, new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SINGLE = 4  # the number of graphs shown on their own, in a line
MOST_NODES = 6000  # points in one scatter plot


Drawn = tuple[Tensor, list[tuple[int, int]]]
"""The features of a graph's nodes, `(N, F)`, and its pairs of linked nodes."""


def complete(row: Tensor) -> Drawn:
    """For a row of features alone: all nodes are linked, as they are for the model."""
    return row, list(itertools.combinations(range(len(row)), 2))


def graphs_figure(data: Tensor | None, samples: Tensor, drawn: Callable[[Tensor], Drawn] = complete) -> Figure:
    """Samples, beside the data if given: all nodes in one panel, by their first two features, then single graphs.

    The nodes of a graph are numbered in the order of the row; `drawn` extracts a graph from a row.
    """
    lines = [([drawn(row) for row in samples], "samples", COLOURS[0])]
    if data is not None:
        lines.insert(0, ([drawn(row) for row in data], "data", FAINT))
    extent = extent_of(torch.cat([x[:, :2] for x, _ in lines[0][0]]))
    single = min(SINGLE, *(len(graphs) for graphs, _, _ in lines))
    figure = new_figure(2.6 * (single + 1), 2.75 * len(lines))
    panels = figure.subplots(len(lines), single + 1, squeeze=False)
    for (graphs, title, colour), axes in zip(lines, panels, strict=True):
        most = max(1, MOST_NODES // max(len(x) for x, _ in graphs))
        nodes = torch.cat([x[:, :2] for x, _ in graphs[:most]])
        axes[0].scatter(nodes[:, 0].numpy(), nodes[:, 1].numpy(), s=3, color=colour, alpha=0.4, linewidths=0)
        frame(axes[0], f"{title}: {min(most, len(graphs))} graphs", extent)
        for k in range(single):
            _graph(axes[k + 1], *graphs[k], f"graph {k + 1}", colour, extent)
    return figure


def _graph(axis: Axes, graph: Tensor, links: list[tuple[int, int]], title: str, colour: str, extent: Extent) -> None:
    points = graph[:, :2].tolist()
    for (x0, y0), (x1, y1) in ((points[a], points[b]) for a, b in links):
        axis.plot([x0, x1], [y0, y1], color="#d1d5db", linewidth=0.5, zorder=1)
    xs, ys = graph[:, 0].numpy(), graph[:, 1].numpy()
    axis.scatter(xs, ys, s=70, color="white", edgecolors=colour, linewidths=1.2, zorder=2)
    style: dict[str, Any] = {"fontsize": 6, "color": INK, "ha": "center", "va": "center_baseline", "clip_on": True}
    for number, (x, y) in enumerate(points, start=1):
        axis.text(x, y, str(number), zorder=3, **style)
    frame(axis, "", extent)
    decorate(axis, title, "", grid=False)
    axis.set_xticks([])
    axis.set_yticks([])
