"""Samples of trained flows."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from expmflow._validation import expect
from expmflow.data.drawing.grids import image_grid
from expmflow.data.drawing.panels import COLOURS, INK, Extent, extent_of, new_figure
from expmflow.runs.evaluation import Trained, open_run
from expmflow.training.files import read_json

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

TABLES = ("residual", "ablation")  # the paper's tables with a convolutional Sylvester flow
FALLBACK = "digits"
SYLVESTER = "convolutional Sylvester flow"
IMAGES = 48, 12  # and how many in a line
MIXTURES = {"mog-4": "MoG-4", "mog-ring": "MoG-Ring", "mog-9": "MoG-9", "mog-16": "MoG-16"}
FLOWS = {"coupling": "coupling", "gnf": "graph normalizing flow", "gnf-exp": "with the graph exponential"}
DATA = {"cifar10": "CIFAR-10"}
GRAPHS, MOST_WITH_EDGES = 500, 4  # shown; the largest graph whose edges can still be told apart


class MissingWeightsError(ValueError):
    """A figure needs trained models whose weights are missing."""


def samples_source(results: Path, run: str | Path | None) -> Trained:
    """The run to sample from: the named one, the best Sylvester flow with weights in `results`, or `digits`.

    Raises `ValueError` if the named run is not a model of images.
    """
    trained = open_run(_best(results) if run is None else run)
    shape = tuple(trained.event_shape)
    expect(len(shape) == 3, "--run to be a model of images", f"events of shape {shape}")
    return trained


def _best(results: Path) -> str | Path:
    elbos = {}
    for table in TABLES:
        for row in _rows(results / f"{table}.json"):
            folder = results / table / f"{row['model']}-{row['seed']}"
            if (folder / "config.json").is_file() and _kind(open_run(folder)) == SYLVESTER:
                elbos[folder] = float(row["elbo"])
    return min(elbos, key=elbos.__getitem__) if elbos else FALLBACK


def _rows(path: Path) -> list[dict[str, Any]]:
    return list(read_json(path)["rows"]) if path.is_file() else []


def samples_figure(trained: Trained) -> Figure:
    """A grid of images, always drawn with the same seed."""
    count, columns = IMAGES
    grid = image_grid(trained.sample(count), trained.levels or 256, columns=columns)
    figure = new_figure(10, 10 * grid.height / grid.width + 0.35)
    axis = figure.subplots()
    axis.imshow(grid, cmap="gray" if grid.mode == "L" else None, interpolation="nearest")
    axis.axis("off")
    data = trained.config.data.name
    axis.set_title(f"Samples of a {_kind(trained)} trained on {DATA.get(data, data)}", fontsize=13, color=INK)
    return figure


def _kind(trained: Trained) -> str:
    sylvester = getattr(trained.config.model, "subflow", "") == "sylvester"
    return SYLVESTER if sylvester else "flow"


def check_graphs(results: Path) -> None:
    """Raise `MissingWeightsError` unless the weights of all graph flows exist."""
    missing = [path for path in _graph_runs(results).values() if not (path / "config.json").is_file()]
    if missing:
        wanted = f"the weights of the graph flows in {results / 'graph'} (--results names another folder than results)"
        raise MissingWeightsError(f"Expected {wanted}; got none of {missing[0].name}.")


def _graph_runs(results: Path) -> dict[tuple[str, str], Path]:
    return {(data, flow): results / "graph" / f"{data}-{flow}-0" for data in MIXTURES for flow in FLOWS}


def graphs_figure(results: Path) -> Figure:
    """A line for each mixture: its graphs, and those of each flow; all nodes, with those of one graph marked."""
    check_graphs(results)
    runs = _graph_runs(results)
    figure = new_figure(10.4, 10.8)
    panels = figure.subplots(len(MIXTURES), 1 + len(FLOWS))
    for line, (data, label) in zip(panels, MIXTURES.items(), strict=True):
        flows = [open_run(runs[data, flow]) for flow in FLOWS]
        graphs = flows[0].data().test[:GRAPHS]
        extent = extent_of(graphs.flatten(0, 1))
        _graphs(line[0], graphs, COLOURS[-1], extent)
        line[0].set_ylabel(label, fontsize=12, color=INK)
        for axis, trained, colour in zip(line[1:], flows, COLOURS, strict=False):
            _graphs(axis, trained.sample(GRAPHS), colour, extent)
    for axis, title in zip(panels[0], ["data", *FLOWS.values()], strict=True):
        axis.set_title(title, fontsize=12, color=INK)
    figure.supxlabel(f"The nodes of {GRAPHS} graphs; circles are those of one of them", fontsize=11, color=INK)
    return figure


def _graphs(axis: Axes, graphs: Tensor, colour: str, extent: Extent) -> None:
    (xs, ys), first = graphs.flatten(0, 1).T.numpy(), graphs[0].T.numpy()
    axis.scatter(xs, ys, s=2.5, color=colour, alpha=0.3, linewidths=0, rasterized=True)
    if graphs.shape[1] <= MOST_WITH_EDGES:
        for i, j in itertools.combinations(range(graphs.shape[1]), 2):
            axis.plot(first[0, [i, j]], first[1, [i, j]], color=INK, linewidth=0.5, alpha=0.6)
    axis.scatter(first[0], first[1], s=18, color="white", edgecolors=INK, linewidths=1.1, zorder=3)
    for side in axis.spines.values():
        side.set_color("#d1d5db")
    axis.set_xlim(extent[:2])
    axis.set_ylim(extent[2:])
    axis.set_aspect("equal")
    axis.set_xticks([])
    axis.set_yticks([])
