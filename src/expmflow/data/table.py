"""Tables of floats from the user's own files."""

from __future__ import annotations

import csv
import logging
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from expmflow.data.errors import DataError, first_line

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Table:
    """A file's rows, `(rows, columns)` in float64, and the names of its columns; an array has none."""

    path: Path
    rows: Tensor
    names: tuple[str, ...] = ()

    def arranged(self, names: Sequence[str]) -> Tensor:
        """The rows with the columns that are asked for, in that order; by position if either side has no names."""
        if not self.names or not names:
            return self.rows
        places = {name: k for k, name in enumerate(self.names)}
        missing = [name for name in names if name not in places]
        unknown = sorted(places.keys() - set(names), key=places.__getitem__)
        if missing or unknown:
            faults = [f"no {', '.join(missing)}"] if missing else []
            faults += [f"{', '.join(unknown)} besides"] if unknown else []
            raise DataError(f"Expected the columns {', '.join(names)} in {self.path}; got {' and '.join(faults)}.")
        return self.rows[:, [places[name] for name in names]]


def load_table(path: Path) -> Table:
    """The rows of a `.npy` or `.csv` file.

    A CSV file may start with one line of names, one for each column. Everything else has to be a finite number.
    """
    readers = {".npy": _read_npy, ".csv": _read_csv}
    suffix = path.suffix.lower()
    if suffix not in readers:
        raise DataError(f"Expected a .npy or .csv file; got {path}.")
    if not path.is_file():
        raise DataError(f"Expected the file {path}; got none.")
    values, names = readers[suffix](path)
    if values.ndim != 2 or 0 in values.shape:
        raise DataError(f"Expected rows and columns in {path}; got shape {values.shape}.")
    with np.errstate(over="ignore"):
        rounded = values.astype(np.float32)
    finite = np.isfinite(rounded).all(axis=1)
    if not finite.all():
        raise DataError(
            f"Expected finite float32 numbers in {path}; got {int((~finite).sum())} rows with NaN, infinity or "
            f"numbers too large, first row {int(np.argmin(finite)) + 1}."
        )
    _warn_of_merged(values, rounded, names, path)
    return Table(path, torch.from_numpy(values.astype(np.float64)), names)


def _warn_of_merged(values: np.ndarray, rounded: np.ndarray, names: Sequence[str], path: Path) -> None:
    """Of a column of large numbers that lie close together, such as times in seconds, float32 leaves but a few."""
    for k, (exact, coarse) in enumerate(zip(values.T, rounded.T, strict=True)):
        before, after = len(np.unique(exact)), len(np.unique(coarse))
        if 2 * after < before:
            column = names[k] if names else k + 1
            log.warning(
                "Column %s of %s has %d different numbers, and float32 tells %d of them apart: subtract what they have "
                "in common, or train with train.precision=float64.",
                *(column, path, before, after),
            )


def _read_npy(path: Path) -> tuple[np.ndarray, tuple[str, ...]]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # numpy repairs some headers
            values = np.load(path, allow_pickle=False)
    except Exception as error:  # numpy parses the header as Python, and raises whatever that parser does
        raise DataError(f"Expected an array of numbers in {path}; got: {first_line(error)}.") from None
    if not isinstance(values, np.ndarray) or values.dtype.kind not in "fiu":
        raise DataError(f"Expected real numbers in {path}; got {getattr(values, 'dtype', type(values).__name__)}.")
    return values, ()


def _read_csv(path: Path) -> tuple[np.ndarray, tuple[str, ...]]:
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:
            rows = [
                (reader.line_num, row)
                for reader in [csv.reader(file, strict=True)]
                for row in reader
                if any(map(str.strip, row))
            ]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"Expected lines of text in {path}; got: {first_line(error)}.") from None
    header: list[str] = []
    if rows and not any(_is_number(cell) for cell in rows[0][1]):
        (_, header), *rows = rows  # the names of the columns; a line with some numbers in it is a mistake
    if not rows:
        raise DataError(f"Expected rows of numbers in {path}; got none.")
    width = len(rows[0][1])
    for line, row in rows:
        if len(row) != width:
            raise DataError(f"Expected {width} columns in line {line} of {path}; got {len(row)}.")
        for cell in row:
            if not _is_number(cell):
                raise DataError(f"Expected numbers in line {line} of {path}; got {cell!r}.")
    return np.array([[float(cell) for cell in row] for _, row in rows], dtype=np.float64), _names(header, width, path)


def _names(header: Sequence[str], width: int, path: Path) -> tuple[str, ...]:
    """One for each column; a column that has none is called by its place."""
    if header and len(header) != width:
        raise DataError(f"Expected {width} names in {path}, as there are columns; got {len(header)}.")
    if header and not header[0].strip() and all(map(str.strip, header[1:])):
        raise DataError(f"Expected a name for the first column of {path}; got none: if it counts rows, leave it out.")
    names = tuple(" ".join(name.split()) or f"x{k + 1}" for k, name in enumerate(header))
    often = [name for name, count in Counter(names).items() if count > 1]
    if often:
        raise DataError(f"Expected columns with names of their own in {path}; got {often[0]!r} twice.")
    return names


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return "_" not in cell  # Python's own way of writing large numbers
