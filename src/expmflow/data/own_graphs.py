"""The user's own graphs: features of nodes, and edges, in a `.npz` file or a folder of two tables."""

from __future__ import annotations

import logging
import zipfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from expmflow.data.errors import DataError, first_line
from expmflow.data.table import Table, load_table

log = logging.getLogger(__name__)
ARRAYS = ("x", "edge_index", "sizes")
NODES, EDGES = "nodes.csv", "edges.csv"
MOST_ENTRIES = 2**28  # of all adjacencies, which are dense: 2 GiB


@dataclass(frozen=True)
class OwnGraphs:
    """Graphs as rows `(graphs, N, F + N + 1)`, padded to the largest: features, adjacency, and which nodes are real."""

    rows: Tensor
    names: tuple[str, ...] = ()


def read_graphs(path: Path, nodes: int = 1) -> OwnGraphs:
    """The undirected graphs in a `.npz` file, or in a folder with `nodes.csv` and `edges.csv`.

    Nodes may have no edges, and self-loops are allowed; an edge that is listed twice is one edge.

    The file has `x`, the features of all nodes `(nodes, F)`, one graph after the other; `edge_index`, pairs of rows of
    `x`, `(2, edges)`; and `sizes`, the number of nodes of each graph. The tables have columns `graph`, `node` and the
    features, with a line for each node, and `graph`, `node`, `other`, with a line for each edge, which counts in both
    directions.

    Args:
        path: the file or the folder.
        nodes: the smallest N; larger if the largest graph is.
    """
    if path.is_dir():
        x, edges, sizes, names = _tables(path)
    elif path.suffix.lower() == ".npz":
        x, edges, sizes = _arrays(path)
        names = ()
    else:
        raise DataError(f"Expected a .npz file of graphs, or a folder with {NODES} and {EDGES}; got {path}.")
    if x.shape[1] < 2:
        raise DataError(f"Expected at least two features of each node in {path}; got {x.shape[1]}.")
    largest = int(sizes.max())
    most = max(nodes, largest)
    if len(sizes) * most**2 > MOST_ENTRIES:
        raise DataError(f"Expected graphs in {path} that fit in memory; got {len(sizes)} of up to {largest} nodes.")
    return OwnGraphs(_padded(x, edges, sizes, most), names)


def holds_graphs(path: Path) -> bool:
    """Whether a `.npz` file has edges; `read_graphs` names other arrays that are missing."""
    if path.suffix.lower() != ".npz" or not zipfile.is_zipfile(path):
        return False
    with zipfile.ZipFile(path) as archive:
        return "edge_index.npy" in archive.namelist()


def _padded(x: np.ndarray, edges: np.ndarray, sizes: np.ndarray, most: int) -> Tensor:
    graph = np.repeat(np.arange(len(sizes)), sizes)
    place = np.arange(len(x)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    features = x.shape[1]
    rows = np.zeros((len(sizes), most, features + most + 1), dtype=np.float64)
    rows[graph, place, :features] = x
    rows[graph, place, -1] = 1
    for a, b in (edges, edges[::-1]):
        rows[graph[a], place[a], features + place[b]] = 1
    return torch.from_numpy(rows)


def _arrays(path: Path) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    if not path.is_file():
        raise DataError(f"Expected the file {path}; got none.")
    try:
        with open(path, "rb") as file, np.load(file, allow_pickle=False) as loaded:
            missing = [name for name in ARRAYS if name not in loaded.files]
            if missing:
                raise DataError(f"Expected arrays {', '.join(ARRAYS)} in {path}; got no {', '.join(missing)}.")
            x, edges, sizes = (np.asarray(loaded[name]) for name in ARRAYS)
            others = [name for name in loaded.files if name not in ARRAYS]
    except DataError:
        raise
    except Exception as error:  # numpy parses headers as Python, and raises whatever that parser raises
        raise DataError(f"Expected graphs in {path}; got: {_reason(error)}.") from None
    if others:
        log.warning("Of the arrays in %s, left out %s: read are %s.", path, ", ".join(others), ", ".join(ARRAYS))
    if x.ndim != 2 or x.dtype.kind not in "fiu" or 0 in x.shape:
        raise DataError(f"Expected finite features (nodes, F) in x of {path}; got {x.dtype} of shape {x.shape}.")
    strange = np.flatnonzero(~np.isfinite(x).all(axis=1))
    if len(strange):
        nodes = f"NaN or infinity in {len(strange)} of {len(x)} nodes, first in x[{strange[0]}]"
        raise DataError(f"Expected finite features (nodes, F) in x of {path}; got {nodes}.")
    if not sizes.size or sizes.ndim != 1 or sizes.dtype.kind not in "iu" or int(sizes.sum()) != len(x):
        raise DataError(f"Expected sizes of graphs in {path} that add up to the {len(x)} nodes of x; got others.")
    if (sizes < 1).any():
        least = int(np.argmax(sizes < 1))
        raise DataError(f"Expected at least one node in each graph of {path}; got sizes[{least}] = {sizes[least]}.")
    if edges.ndim != 2 or edges.shape[0] != 2 or (edges.size and edges.dtype.kind not in "iu"):
        raise DataError(f"Expected edge_index of shape (2, edges) in {path}; got {edges.dtype} of shape {edges.shape}.")
    edges = edges.astype(np.int64)  # an empty array is float by default
    _check_edges(edges, sizes, path)
    return x.astype(np.float64), edges, sizes.astype(np.int64)


def _check_edges(edges: np.ndarray, sizes: np.ndarray, path: Path) -> None:
    count = int(sizes.sum())
    if edges.size and not (edges.min() >= 0 and edges.max() < count):
        raise DataError(f"Expected edges between nodes 0 to {count - 1} in {path}; got others.")
    graph = np.repeat(np.arange(len(sizes)), sizes)
    if (graph[edges[0]] != graph[edges[1]]).any():
        raise DataError(f"Expected edges within one graph in {path}; got edges between two.")


def _reason(error: Exception) -> str:
    return "Python objects, which are never loaded" if "pickle" in str(error) else first_line(error)


def _edges(path: Path) -> Table:
    """The edges of a table; a header line alone means that there are none, but a missing file may be a slip."""
    if not path.is_file() or any(line.strip() for line in path.read_text("utf-8", "replace").splitlines()[1:]):
        return load_table(path, droppable=False)
    return Table(path, torch.zeros(0, 3, dtype=torch.float64), ("graph", "node", "other"))


def _tables(folder: Path) -> tuple[np.ndarray, np.ndarray, np.ndarray, tuple[str, ...]]:
    nodes, edges = load_table(folder / NODES, droppable=False), _edges(folder / EDGES)
    for table, columns in ((nodes, ("graph", "node")), (edges, ("graph", "node", "other"))):
        if table.names[: len(columns)] != columns:
            raise DataError(f"Expected the first columns {', '.join(columns)} in {table.path}; got {table.names}.")
    if len(nodes.names) < 3:
        raise DataError(f"Expected features of nodes in {nodes.path}; got none beside graph and node.")
    if len(edges.names) != 3:
        others = ", ".join(edges.names[3:])
        raise DataError(f"Expected only the columns graph, node, other in {edges.path}; got {others} besides.")
    for table, count in ((nodes, 2), (edges, 3)):
        if bool((table.rows[:, :count] % 1 != 0).any()):
            raise DataError(f"Expected whole numbers of graphs and nodes in {table.path}; got fractions.")
    cells = nodes.rows.numpy()
    order = np.argsort(cells[:, 0], kind="stable")
    cells = cells[order]
    numbers = {(g, k): place for place, (g, k) in enumerate(cells[:, :2].tolist())}
    if len(numbers) < len(cells):
        raise DataError(f"Expected each node of a graph once in {nodes.path}; got one of them again.")
    sizes = np.unique(cells[:, 0], return_counts=True)[1]
    pairs = []
    for g, a, b in edges.rows.tolist():
        if (g, a) not in numbers or (g, b) not in numbers:
            raise DataError(f"Expected edges between nodes of {nodes.path}; got {a:g} to {b:g} in graph {g:g}.")
        pairs.append((numbers[g, a], numbers[g, b]))
    found = np.array(pairs, dtype=np.int64).reshape(-1, 2).T
    return cells[:, 2:], found, sizes, nodes.names[2:]
