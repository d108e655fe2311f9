"""Graphs in the plane: the nodes of many of them, and a few on their own."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

from torch import Tensor

from expmflow.data.drawing.panels import COLOURS, FAINT, INK, Extent, decorate, extent_of, frame, new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SINGLE = 4  # graphs that are shown on their own, in a line
MOST_NODES = 6000  # points in one scatter


def graphs_figure(data: Tensor | None, samples: Tensor) -> Figure:
    """`(n, N, 2)` samples, beside the data if given: all nodes in one panel, then graph after graph.

    Nodes of a graph are numbered in their order in the row, and all are linked, as they are for the model.
    """
    lines = [(samples, "samples", COLOURS[0])]
    if data is not None:
        lines.insert(0, (data, "data", FAINT))
    extent = extent_of((samples if data is None else data)[..., :2].flatten(0, 1))
    single = min(SINGLE, *(len(graphs) for graphs, _, _ in lines))
    figure = new_figure(2.6 * (single + 1), 2.75 * len(lines))
    panels = figure.subplots(len(lines), single + 1, squeeze=False)
    for (graphs, title, colour), axes in zip(lines, panels, strict=True):
        nodes = graphs[..., :2].flatten(0, 1)[:MOST_NODES]
        axes[0].scatter(nodes[:, 0].numpy(), nodes[:, 1].numpy(), s=3, color=colour, alpha=0.4, linewidths=0)
        frame(axes[0], f"{title}: {-(-len(nodes) // graphs.shape[1])} graphs", extent)
        for k in range(single):
            _graph(axes[k + 1], graphs[k], f"graph {k + 1}", colour, extent)
    return figure


def _graph(axis: Axes, graph: Tensor, title: str, colour: str, extent: Extent) -> None:
    points = graph[:, :2].tolist()
    for (x0, y0), (x1, y1) in itertools.combinations(points, 2):
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
