"""Tables of floats from the user's own files."""

from __future__ import annotations

import csv
import warnings
from pathlib import Path

import numpy as np
import torch
from torch import Tensor


class DataError(ValueError):
    """A file that cannot be used as data; the message names it and says why."""


def load_table(path: Path) -> Tensor:
    """`(rows, columns)` in float32 from a `.npy` or `.csv` file.

    A CSV file may start with one line of names. Everything else has to be a finite number.
    """
    readers = {".npy": _read_npy, ".csv": _read_csv}
    if path.suffix not in readers:
        raise DataError(f"Expected a .npy or .csv file; got {path}.")
    if not path.is_file():
        raise DataError(f"Expected the file {path}; got none.")
    values = readers[path.suffix](path)
    if values.ndim != 2 or 0 in values.shape:
        raise DataError(f"Expected rows and columns in {path}; got shape {values.shape}.")
    with np.errstate(over="ignore"):
        values = values.astype(np.float32)
    finite = np.isfinite(values).all(axis=1)
    if not finite.all():
        raise DataError(
            f"Expected finite float32 numbers in {path}; got {int((~finite).sum())} rows with NaN, infinity or "
            f"numbers too large, first row {int(np.argmin(finite)) + 1}."
        )
    return torch.from_numpy(values)


def _read_npy(path: Path) -> np.ndarray:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # numpy repairs some headers
            values = np.load(path, allow_pickle=False)
    except Exception as error:  # numpy parses the header as Python, and raises whatever that parser does
        raise DataError(f"Expected an array of numbers in {path}; got: {_first_line(error)}.") from None
    if not isinstance(values, np.ndarray) or values.dtype.kind not in "fiu":
        raise DataError(f"Expected real numbers in {path}; got {getattr(values, 'dtype', type(values).__name__)}.")
    return values


def _read_csv(path: Path) -> np.ndarray:
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:
            rows = [
                (reader.line_num, row)
                for reader in [csv.reader(file, strict=True)]
                for row in reader
                if any(map(str.strip, row))
            ]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"Expected lines of text in {path}; got: {_first_line(error)}.") from None
    if rows and not any(_is_number(cell) for cell in rows[0][1]):
        rows = rows[1:]  # the names of the columns; a line with some numbers in it is a mistake
    if not rows:
        raise DataError(f"Expected rows of numbers in {path}; got none.")
    width = len(rows[0][1])
    for line, row in rows:
        if len(row) != width:
            raise DataError(f"Expected {width} columns in line {line} of {path}; got {len(row)}.")
        for cell in row:
            if not _is_number(cell):
                raise DataError(f"Expected numbers in line {line} of {path}; got {cell!r}.")
    return np.array([[float(cell) for cell in row] for _, row in rows], dtype=np.float64)


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return "_" not in cell  # Python's own way of writing large numbers


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
