"""Files that a command writes: whole, or not at all."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np
from torch import Tensor

from expmflow._validation import expect


def write_whole(path: Path, write: Callable[[Path], None]) -> None:
    """Let `write` fill a file beside `path`, then put it in its place."""
    expect(not path.is_dir(), f"a file to write to in {path}", "a folder")
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".tmp-{path.name}")
    try:
        write(temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def csv_text(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table with a line of names."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(header)
    writer.writerows(rows)
    return text.getvalue()


def table_text(rows: Tensor, names: Sequence[str] = ()) -> str:
    """Rows as CSV, the columns named x1, x2, … if they have no names; every digit is kept."""
    flat = rows.flatten(1)
    return csv_text(names or [f"x{k + 1}" for k in range(flat.shape[1])], flat.tolist())


def graphs_text(graphs: Tensor) -> str:
    """`(n, N, features)` as CSV, a line for each node: the numbers of its graph and of itself, and its features."""
    header = ["graph", "node", *(f"x{k + 1}" for k in range(graphs.shape[2]))]
    nodes = ([g, k, *node] for g, graph in enumerate(graphs.tolist(), 1) for k, node in enumerate(graph, 1))
    return csv_text(header, nodes)


def save_npy(path: Path, rows: Tensor) -> None:
    """In numpy's own format."""

    def write(temporary: Path) -> None:
        with open(temporary, "wb") as file:
            np.save(file, rows.numpy(), allow_pickle=False)

    write_whole(path, write)


def save_text(path: Path, text: str) -> None:
    """As UTF-8."""
    write_whole(path, lambda temporary: _write_text(temporary, text))


def _write_text(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")
