"""Vectors: rows of a table, points in the plane."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import ClassVar, final

import numpy as np
import torch
from torch import Tensor

from expmflow.data.columns import check_columns, integer_columns, repeated_values
from expmflow.data.dataset import Dataset, split
from expmflow.data.download import Progress
from expmflow.data.drawing.columns import columns_figure
from expmflow.data.drawing.panels import save_figure
from expmflow.data.errors import DataError, list_setting
from expmflow.data.gaussian import gaussian_nll
from expmflow.data.kinds.base import (
    NATS,
    Augmentation,
    Description,
    Generators,
    Kind,
    Landscape,
    Layout,
    Picture,
    Rows,
    Source,
    Unit,
    csv_text,
    expect_axes,
)
from expmflow.data.points import two_moons
from expmflow.data.table import inspect_table, load_table

MOST_COLUMNS = 50  # in a description
TABLE_SETTINGS = ("path", "columns", "drop", "separator", "validation", "test")
GRID = 240  # points along each side of a landscape


@final
class Vectors(Kind):
    """Rows of floats, `(columns,)`."""

    name: ClassVar[str] = "vectors"
    models: ClassVar[tuple[str, ...]] = ("table", "dense", "vector-vae")
    files: ClassVar[str] = ".npy or .csv tables"
    formats: ClassVar[tuple[str, ...]] = (".npy", ".csv", ".png")
    shown_samples: ClassVar[int] = 2000
    report_rows: ClassVar[int] = 3000

    def __init__(self) -> None:
        self.sources: Mapping[str, Source] = {
            "moons": Source(_moons, ("samples", "validation", "test"), "drawn"),
            "table": Source(_table, TABLE_SETTINGS, "a .npy or .csv table"),
        }
        self.augmentations: Mapping[str, Augmentation] = {"jitter": Augmentation((2,), jittered)}

    def check_event_shape(self, event_shape: tuple[int, ...]) -> None:
        expect_axes(event_shape, 1, "vectors of shape (columns,)")

    def unit(self, event_shape: tuple[int, ...]) -> Unit:
        return NATS

    def baselines(self, train: Tensor, rows: Tensor) -> dict[str, float]:
        return {"a Gaussian of full covariance": gaussian_nll(train, rows)}

    def read(self, files: Sequence[Path], layout: Layout, *, fit: bool, progress: Progress | None) -> Rows:
        return Rows.of_files(files, [_like(file, layout) for file in files])

    def own_source(self, path: Path) -> str | None:
        suffix = path.suffix.lower()
        return "table" if suffix == ".csv" or (suffix == ".npy" and array_axes(path) < 3) else None

    def describe(self, title: str, source: str, path: Path | None, load: Callable[[], Dataset]) -> Description:
        faults: list[str] = []
        if path is None:
            data = load()
            rows, names = torch.cat([data.train, data.validation, data.test]).double(), data.names
            title = f"{title} (drawn; data.samples=N draws N rows)"
        else:
            table, faults = inspect_table(path)
            rows, names = table.rows, table.names
        columns = names or tuple(f"x{k + 1}" for k in range(rows.shape[1]))
        numbers = [_moments(column[~column.isnan()]) for column in rows.T]
        lines: list[tuple[str, ...]] = [
            (name, *(f"{value:.4g}" for value in found)) if found else (name, "–", "–", "–", "–")
            for name, found in zip(columns, numbers, strict=True)
        ]
        if len(lines) > MOST_COLUMNS:
            lines = [*lines[:MOST_COLUMNS], ("…", "", "", "", "")]
        constant = [name for name, found in zip(columns, numbers, strict=True) if found and found[0] == found[3]]
        left_out = list_setting("data.drop", constant)
        notes = [*faults, *([f"Columns of one value have no density; leave them out: {left_out}."] if constant else [])]
        sound = [k for k, name in enumerate(columns) if name not in constant and not rows[:, k].isnan().any()]
        if path is not None and sound:
            notes += _refusals(rows[:, sound], [columns[k] for k in sound], str(path))
        return Description(
            f"{title}: {len(rows)} rows, {rows.shape[1]} columns",
            lines,
            header=("column", "least", "mean", "std", "largest"),
            notes=tuple(notes),
        )

    def text(self, rows: Tensor, layout: Layout) -> str:
        return csv_text(layout.names or [f"x{k + 1}" for k in range(rows.shape[1])], rows.tolist())

    def draw(
        self, samples: Tensor, layout: Layout, *, data: Tensor | None = None, columns: int | None = None
    ) -> Picture:
        return Picture(lambda target: save_figure(columns_figure(data, samples, layout.names), target))

    def compare(
        self,
        samples: Tensor,
        data: Tensor,
        layout: Layout,
        *,
        columns: int | None = None,
        density: Tensor | None = None,
    ) -> list[Picture]:
        seen, place = None, self.landscape(data)
        if density is not None and place is not None:
            seen = (density.reshape(place.side, place.side), place.extent)
        return [Picture(lambda target: save_figure(columns_figure(data, samples, layout.names, seen), target))]

    def landscape(self, rows: Tensor) -> Landscape | None:
        if rows.shape[1] != 2:
            return None
        least, largest = rows.double().amin(0), rows.double().amax(0)
        margin = 0.12 * (largest - least).clamp_min(1e-6)
        (x0, y0), (x1, y1) = (least - margin).tolist(), (largest + margin).tolist()
        xs, ys = (torch.linspace(*ends, GRID, dtype=torch.float64) for ends in ((x0, x1), (y0, y1)))
        points = torch.stack(torch.meshgrid(xs, ys, indexing="xy"), dim=-1).reshape(-1, 2)
        return Landscape(points, (x0, x1, y0, y1))


def _moons(
    *, samples: int, validation: float, test: float, generator: Generators, progress: Progress | None
) -> Dataset:
    return split(two_moons(samples, generator("moons")), validation, test)


def _table(
    *,
    path: Path | None,
    columns: Sequence[str] | None,
    drop: Sequence[str] | None,
    separator: str | None,
    validation: float,
    test: float,
    generator: Generators,
    progress: Progress | None,
) -> Dataset:
    """The rows of a table, shuffled, so that the split does not follow the file's order."""
    if path is None:
        raise DataError("Expected data.path, where the table data is; got none.")
    table = load_table(path, columns=columns or (), drop=drop or (), separator=separator)
    rows = table.rows[torch.randperm(len(table.rows), generator=generator("split"))]
    parts = split(rows, validation, test)
    check_columns(parts.train, table.names, str(path))
    return replace(parts, names=table.names, integers=integer_columns(rows), cells=repeated_values(rows))


def jittered(rows: Tensor, uniform: Tensor, share: float, train: Tensor) -> Tensor:
    """Rows plus `share` times the difference of two training rows, over √2: noise with the covariance of the data.

    It keeps a density of few rows from concentrating on each of them.
    """
    first, second = (uniform * len(train)).long().clamp_max(len(train) - 1).unbind(1)
    return rows + share / 2**0.5 * (train[first] - train[second])


def _refusals(rows: Tensor, names: Sequence[str], source: str) -> list[str]:
    """What `check_columns` says about these columns."""
    try:
        check_columns(rows, names, source)
    except DataError as error:
        return [str(error)]
    return []


def _moments(values: Tensor) -> tuple[float, ...]:
    """Minimum, mean, standard deviation and maximum; empty for no values."""
    if not len(values):
        return ()
    spread = values.std() if len(values) > 1 else values.new_zeros(())
    return tuple(map(float, (values.amin(), values.mean(), spread, values.amax())))


def _like(file: Path, layout: Layout) -> Tensor:
    """Rows of a file with the columns of a run; the file may also have columns that the run left out."""
    settings, chosen = layout.settings, bool(layout.settings.get("columns") or layout.settings.get("drop"))
    separator = settings.get("separator")
    if chosen:
        rows = load_table(file, columns=layout.names, separator=separator, droppable=False).rows
    else:
        rows = load_table(file, separator=separator, droppable=False).arranged(layout.names)
    if tuple(rows.shape[1:]) != layout.event_shape:
        width = ", ".join(map(str, layout.event_shape))
        raise DataError(f"Expected {width} columns in {file}, as the run has; got {rows.shape[1]}.")
    return rows


def array_axes(path: Path) -> int:
    """The number of axes of the array in a `.npy` file; 0 if there is none."""
    try:
        return np.load(path, mmap_mode="r", allow_pickle=False).ndim if path.is_file() else 0  # not a pipe
    except (OSError, ValueError, EOFError):
        return 0
