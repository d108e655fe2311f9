"""The rows that `expmflow score` is given, read as the run's own data was."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from expmflow.data import DataError, load_image_files, load_table
from expmflow.data.download import Progress
from expmflow.runs.evaluation import Trained


@dataclass(frozen=True)
class Scored:
    """Rows, where each comes from, and its number there, from 1."""

    rows: Tensor
    names: list[str]
    numbers: list[int]

    def __len__(self) -> int:
        return len(self.rows)


def read_scored(trained: Trained, files: Sequence[Path], fit: bool, progress: Progress | None = None) -> Scored:
    """The rows of all files, of the shape that the model takes."""
    if trained.kind == "image":
        rows, names = _images(trained, files, fit, progress)
        return Scored(rows, names, [1] * len(names))
    parts = [(_graphs if trained.kind == "graph" else _table)(trained, file) for file in files]
    names = [str(file) for file, part in zip(files, parts, strict=True) for _ in range(len(part))]
    return Scored(torch.cat(parts), names, [k for part in parts for k in range(1, len(part) + 1)])


def _images(trained: Trained, files: Sequence[Path], fit: bool, progress: Progress | None) -> tuple[Tensor, list[str]]:
    """With `fit`, values go from 0 to 255, whatever the levels of the model are."""
    data, shape, levels = trained.config.data, trained.event_shape, trained.levels or 256
    form: dict[str, Any] = {"size": data.size, "channels": data.channels, "levels": levels}
    if fit:
        form = {"size": shape[1], "channels": "grey" if shape[0] == 1 else "rgb"}
    rows, names = load_image_files(files, shape, crop=data.crop, progress=progress, **form)
    return (rows.int() * levels // 256).to(torch.uint8) if fit else rows, names


def _table(trained: Trained, file: Path) -> Tensor:
    rows = load_table(file).arranged(trained.names)
    if tuple(rows.shape[1:]) != trained.event_shape:
        width = ", ".join(map(str, trained.event_shape))
        raise DataError(f"Expected {width} columns in {file}, as the run has; got {rows.shape[1]}.")
    return rows


def _graphs(trained: Trained, file: Path) -> Tensor:
    nodes, features = trained.event_shape
    if file.suffix != ".npy":
        raise DataError(f"Expected a .npy file of graphs, of shape (graphs, {nodes}, {features}); got {file}.")
    if not file.is_file():
        raise DataError(f"Expected the file {file}; got none.")
    try:
        found = np.load(file, allow_pickle=False)
    except (ValueError, OSError, EOFError):
        raise DataError(f"Expected an array in {file}; got something else.") from None
    if found.ndim != 3 or found.shape[1:] != trained.event_shape or found.dtype.kind != "f":
        given = f"{found.dtype} of shape {found.shape}"
        raise DataError(f"Expected floats of shape (graphs, {nodes}, {features}) in {file}; got {given}.")
    return torch.from_numpy(found.astype(np.float64))
