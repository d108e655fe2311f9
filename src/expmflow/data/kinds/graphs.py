"""Graphs: features of nodes, `(nodes, features)`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import ClassVar, final

import numpy as np
import torch
from torch import Tensor

from expmflow.data.dataset import Dataset
from expmflow.data.download import Progress
from expmflow.data.drawing.nodes import graphs_figure
from expmflow.data.drawing.panels import save_figure
from expmflow.data.errors import DataError
from expmflow.data.graphs import MIXTURES
from expmflow.data.kinds.base import (
    Description,
    Generators,
    Kind,
    Layout,
    Picture,
    Rows,
    Source,
    Unit,
    csv_text,
    expect_axes,
)

DRAWN_GRAPHS = 10_000  # for validation, and to calibrate scores; training draws new ones at every step


@final
class Graphs(Kind):
    """Floats of shape (nodes, features)."""

    name: ClassVar[str] = "graphs"
    models: ClassVar[tuple[str, ...]] = ("graph",)
    files: ClassVar[str] = ".npy files of graphs"
    formats: ClassVar[tuple[str, ...]] = (".npy", ".csv", ".png")

    def __init__(self) -> None:
        self.sources: Mapping[str, Source] = {
            name: Source(partial(_mixture, name), ("samples",), "drawn") for name in MIXTURES
        }

    def check_event_shape(self, event_shape: tuple[int, ...]) -> None:
        expect_axes(event_shape, 2, "graphs of shape (nodes, features)")

    def unit(self, event_shape: tuple[int, ...]) -> Unit:
        return Unit("nats per node", "nats_per_node", 1 / event_shape[0])

    def units(self, event_shape: tuple[int, ...]) -> tuple[Unit, ...]:
        return *super().units(event_shape), self.unit(event_shape)

    def entropy(self, source: str) -> float | None:
        return MIXTURES[source].entropy() if source in MIXTURES else None

    def read(self, files: Sequence[Path], layout: Layout, *, fit: bool, progress: Progress | None) -> Rows:
        return Rows.of_files(files, [_like(file, layout) for file in files])

    def describe(self, title: str, source: str, path: Path | None, load: Callable[[], Dataset]) -> Description:
        mixture = MIXTURES[source]
        turned = ", each graph turned by a random angle" if mixture.turned else ""
        lines = [
            ("nodes", f"{mixture.nodes}, around {mixture.nodes} centres in random order{turned}"),
            ("features of a node", "2"),
            ("entropy, nats per node", f"{mixture.entropy():.4f}"),
        ]
        return Description(f"{title}: drawn anew at every training step", list(lines))

    def text(self, rows: Tensor, layout: Layout) -> str:
        """A line for each node: the numbers of its graph and of the node, and its features."""
        header = ["graph", "node", *(layout.names or (f"x{k + 1}" for k in range(rows.shape[2])))]
        nodes = ([g, k, *node] for g, graph in enumerate(rows.tolist(), 1) for k, node in enumerate(graph, 1))
        return csv_text(header, nodes)

    def draw(
        self, samples: Tensor, layout: Layout, *, data: Tensor | None = None, columns: int | None = None
    ) -> Picture:
        return Picture(lambda target: save_figure(graphs_figure(data, samples), target))


def _mixture(name: str, *, samples: int, generator: Generators, progress: Progress | None) -> Dataset:
    mixture = MIXTURES[name]
    counts = {"train": DRAWN_GRAPHS, "validation": DRAWN_GRAPHS, "test": samples}
    train, validation, test = (mixture.sample(n, generator(f"graphs {part}")) for part, n in counts.items())
    return Dataset(train, validation, test, draw=mixture.sample, kind="graphs")


def _like(file: Path, layout: Layout) -> Tensor:
    nodes, features = layout.event_shape
    if file.suffix != ".npy":
        raise DataError(f"Expected a .npy file of graphs, of shape (graphs, {nodes}, {features}); got {file}.")
    if not file.is_file():
        raise DataError(f"Expected the file {file}; got none.")
    try:
        rows = np.load(file, allow_pickle=False)
    except (ValueError, OSError, EOFError):
        raise DataError(f"Expected an array in {file}; got something else.") from None
    if rows.ndim != 3 or rows.shape[1:] != layout.event_shape or rows.dtype.kind != "f":
        given = f"{rows.dtype} of shape {rows.shape}"
        raise DataError(f"Expected floats of shape (graphs, {nodes}, {features}) in {file}; got {given}.")
    return torch.from_numpy(rows.astype(np.float64))
