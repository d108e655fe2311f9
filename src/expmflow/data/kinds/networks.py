"""Networks: graphs of the user's, each with its own edges and number of nodes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, final

import numpy as np
import torch
from torch import Tensor

from expmflow.data.dataset import Dataset, split
from expmflow.data.download import Progress
from expmflow.data.drawing.nodes import Drawn, graphs_figure
from expmflow.data.drawing.panels import save_figure
from expmflow.data.errors import DataError
from expmflow.data.gaussian import gaussian_nll
from expmflow.data.kinds.base import (
    NATS,
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
from expmflow.data.own_graphs import EDGES, NODES, holds_graphs, read_graphs


@final
class Networks(Kind):
    """Rows `(N, F + N + 1)`: the features of nodes, their adjacency, and which of them are real."""

    name: ClassVar[str] = "networks"
    models: ClassVar[tuple[str, ...]] = ("graph",)
    files: ClassVar[str] = f".npz files of graphs, folders with {NODES} and {EDGES}"
    formats: ClassVar[tuple[str, ...]] = (".npz", ".csv", ".png")
    report_rows: ClassVar[int] = 500
    measured_rows: ClassVar[int] = 2000

    def __init__(self) -> None:
        origin = f"a .npz file of graphs, or a folder with {NODES} and {EDGES}"
        self.sources: Mapping[str, Source] = {"graphs": Source(_load, ("path", "validation", "test"), origin)}

    def check_event_shape(self, event_shape: tuple[int, ...]) -> None:
        expect_axes(event_shape, 2, "networks of shape (nodes, features + nodes + 1)")

    def names_fit(self, names: Sequence[str], event_shape: Sequence[int]) -> bool:
        return len(names) == event_shape[1] - event_shape[0] - 1

    def unit(self, event_shape: tuple[int, ...]) -> Unit:
        return NATS

    def units(self, event_shape: tuple[int, ...]) -> tuple[Unit, ...]:
        return (NATS,)

    def baselines(self, train: Tensor, rows: Tensor) -> dict[str, float]:
        """Of nodes that know nothing of each other."""
        nodes, others = _real_nodes(train), _real_nodes(rows)
        return {"a Gaussian of full covariance for each node": gaussian_nll(nodes, others) * len(others) / len(rows)}

    def read(self, files: Sequence[Path], layout: Layout, *, fit: bool, progress: Progress | None) -> Rows:
        """Graphs may have more nodes than those of the run; all are padded to the largest."""
        nodes, width = layout.event_shape
        parts = [read_graphs(file, nodes).rows for file in files]
        for file, part in zip(files, parts, strict=True):
            expected, given = width - nodes - 1, part.shape[2] - part.shape[1] - 1
            if given != expected:
                raise DataError(f"Expected {expected} features of each node in {file}, as the run has; got {given}.")
        most = max(part.shape[1] for part in parts)
        parts = [
            part if part.shape[1] == most else read_graphs(file, most).rows
            for file, part in zip(files, parts, strict=True)
        ]
        return Rows.of_files(files, parts)

    def own_source(self, path: Path) -> str | None:
        return "graphs" if (path / NODES).is_file() or holds_graphs(path) else None

    def describe(self, title: str, source: str, path: Path | None, load: Callable[[], Dataset]) -> Description:
        data = load()
        rows = torch.cat([data.train, data.validation, data.test])
        sizes, features = rows[..., -1].sum(1), rows.shape[2] - rows.shape[1] - 1
        adjacency = rows[..., features:-1]
        loops = adjacency.diagonal(dim1=1, dim2=2).sum(1)
        edges = (adjacency.sum((1, 2)) + loops) / 2
        alone = int(((adjacency.sum(2) == 0) & (rows[..., -1] > 0.5)).sum())
        lines = [
            ("nodes of a graph", f"{int(sizes.min())} to {int(sizes.max())}, {float(sizes.mean()):.1f} on average"),
            ("edges of a graph", f"{int(edges.min())} to {int(edges.max())}, {float(edges.mean()):.1f} on average"),
            ("edges from a node to itself", str(int(loops.sum()))),
            ("nodes without edges", f"{alone} of {int(sizes.sum())}"),
            ("features of a node", ": ".join([str(features), *([", ".join(data.names)] if data.names else [])])),
        ]
        return Description(f"{title}: {len(rows)} graphs", lines)

    def text(self, rows: Tensor, layout: Layout) -> str:
        """A line for each node: the numbers of its graph and of the node, and its features."""
        features = rows.shape[2] - rows.shape[1] - 1
        header = ["graph", "node", *(layout.names or (f"x{k + 1}" for k in range(features)))]
        nodes = (
            [g, k, *node[:features]]
            for g, graph in enumerate(rows.tolist(), 1)
            for k, node in enumerate(graph, 1)
            if node[-1] > 0.5
        )
        return csv_text(header, nodes)

    def arrays(self, rows: Tensor) -> dict[str, np.ndarray[Any, Any]]:
        """In the form that `read_graphs` reads, with each edge in both directions."""
        features, mask = rows.shape[2] - rows.shape[1] - 1, rows[..., -1] > 0.5
        sizes = mask.sum(1)
        graph, node, other = rows[..., features:-1].nonzero().T
        start = (sizes.cumsum(0) - sizes)[graph]
        edges = torch.stack([start + node, start + other])
        return {"x": _real_nodes(rows).numpy(), "edge_index": edges.numpy(), "sizes": sizes.numpy()}

    def draw(
        self, samples: Tensor, layout: Layout, *, data: Tensor | None = None, columns: int | None = None
    ) -> Picture:
        """The first two features of all nodes, and a few graphs with their edges."""
        return Picture(lambda target: save_figure(graphs_figure(data, samples, _drawn), target))


def _load(
    *, path: Path | None, validation: float, test: float, generator: Generators, progress: Progress | None
) -> Dataset:
    if path is None:
        raise DataError("Expected data.path, where the graphs are; got none.")
    found = read_graphs(path)
    rows = found.rows[torch.randperm(len(found.rows), generator=generator("split"))]
    return replace(split(rows, validation, test), kind="networks", names=found.names, has_edges=True)


def _real_nodes(rows: Tensor) -> Tensor:
    """The features `(nodes, F)` of all real nodes, one graph after the other."""
    return rows[..., : rows.shape[2] - rows.shape[1] - 1][rows[..., -1] > 0.5]


def _drawn(row: Tensor) -> Drawn:
    """The features of the real nodes, and the edges between them."""
    features, mask = row.shape[1] - row.shape[0] - 1, row[:, -1] > 0.5
    return row[mask, :features], [(a, b) for a, b in row[:, features:-1].nonzero().tolist() if a < b]
