"""Tables of floats from the user's own files."""

from __future__ import annotations

import csv
import logging
import re
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from expmflow.data.errors import DataError, first_line, list_setting

log = logging.getLogger(__name__)
LARGEST_TABLE = 2**38  # bytes; no machine holds a larger table
MISSING = ("", "na", "n/a", "nan", "null", "none", "?", "-")  # how files mark missing numbers
WITH_COMMA = re.compile(r"[+-]?(?=.*,)(\d+|\d{1,3}(,\d{3})+|\d{1,3}(\.\d{3})+)([.,]\d+)?")  # 1,5 or 1.234,5 or 1,234.5
COMMA_OF_THOUSANDS = re.compile(r"[+-]?\d{1,3},\d{3}")  # or of decimals: nobody can know
MARKS = ";\t,"  # between entries; the comma last, because it also occurs in numbers and names
OTHER_MARKS = "| "  # used only if the user asks for them
MOST_LISTED = 8  # the most columns in a message


@dataclass(frozen=True)
class Table:
    """A file's rows, `(rows, columns)` in float64, and the names of its columns; an array has none."""

    path: Path
    rows: Tensor
    names: tuple[str, ...] = ()

    def arranged(self, names: Sequence[str]) -> Tensor:
        """The rows with the requested columns, in that order; by position if either side has no names."""
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


def load_table(
    path: Path,
    *,
    columns: Sequence[str] = (),
    drop: Sequence[str] = (),
    separator: str | None = None,
    droppable: bool = True,
) -> Table:
    """The rows of a `.npy` or `.csv` file.

    A CSV file may start with one line of names, one for each column; names that are numbers cause a warning. Every
    entry has to be a finite number; an error names the columns of those that are not.

    Args:
        path: the file.
        columns: the columns to take, in this order; all if not given. Without names, they are x1, x2, ….
        drop: columns to leave out.
        separator: the character between the entries of a line; if not given, a semicolon, a tab or a comma, whichever
            splits the first two lines into the same number of entries.
        droppable: whether messages may advise to leave columns out by `data.drop`.
    """
    table, faults = inspect_table(path, columns=columns, drop=drop, separator=separator, droppable=droppable)
    if faults:
        raise DataError(faults[0])
    return table


def inspect_table(
    path: Path,
    *,
    columns: Sequence[str] = (),
    drop: Sequence[str] = (),
    separator: str | None = None,
    droppable: bool = True,
) -> tuple[Table, list[str]]:
    """As `load_table`, with NaN for entries that are not finite numbers, and a message for each reason to refuse the
    table."""
    readers = {".npy": _read_npy, ".csv": lambda path: _read_csv(path, separator)}
    suffix = path.suffix.lower()
    if suffix not in readers:
        raise DataError(f"Expected a .npy or .csv file; got {path}.")
    if not path.is_file():
        raise DataError(f"Expected the file {path}; got none.")
    size = path.stat().st_size
    if size > LARGEST_TABLE:
        raise DataError(f"Expected a table of at most {LARGEST_TABLE:,} bytes; got {size:,} in {path}.")
    cells, names, lines = readers[suffix](path)
    if cells.ndim != 2 or 0 in cells.shape:
        raise DataError(f"Expected rows and columns in {path}; got shape {cells.shape}.")
    unnamed = bool(names) and not names[0]
    names = tuple(name or "x1" for name in names)
    places = _chosen(names, cells.shape[1], columns, drop, path)
    faults = []
    if unnamed and 0 in places and not columns:
        advice = (
            "leave it out: data.drop=[x1]. If not, give it a name, or name all columns to take by data.columns."
            if droppable
            else "write the file without it. If not, give it a name."
        )
        faults.append(f"Expected a name for the first column of {path}; got none. If it counts rows, {advice}")
    known = names or tuple(f"x{k + 1}" for k in range(cells.shape[1]))
    values, others = _numbers(cells[:, places], [known[k] for k in places], lines, path, droppable)
    chosen = tuple(known[k] for k in places) if names or len(places) < cells.shape[1] else ()
    return Table(path, torch.from_numpy(values), chosen), [*faults, *others]


def _chosen(names: Sequence[str], width: int, columns: Sequence[str], drop: Sequence[str], path: Path) -> list[int]:
    """The indices of the requested columns."""
    places = {name: k for k, name in enumerate(names or [f"x{k + 1}" for k in range(width)])}
    if not names and len(columns) == width:  # a file without names, with only these columns
        return list(range(width))
    missing = [name for name in (*columns, *drop) if name not in places]
    if missing:
        raise DataError(f"Expected the columns {', '.join(missing)} in {path}; got {_listed(list(places))}.")
    left = [name for name in (columns or places) if name not in drop]
    if not left:
        raise DataError(f"Expected at least one column of {path} to be left; got data.drop of all of them.")
    return [places[name] for name in left]


def _numbers(
    cells: np.ndarray, names: Sequence[str], lines: Sequence[int], path: Path, droppable: bool
) -> tuple[np.ndarray, list[str]]:
    """Cells as float64; an error names every column with something else, and shows it."""
    values = np.empty(cells.shape, dtype=np.float64)
    faults, columns = [], []
    for k, name in enumerate(names):
        column = [_number(cell) for cell in cells[:, k]] if cells.dtype.kind == "U" else cells[:, k].astype(np.float64)
        values[:, k] = column
        with np.errstate(over="ignore"):
            bad = ~np.isfinite(values[:, k].astype(np.float32))
        if bad.any():
            at = int(np.argmax(bad))
            texts = [str(cell).strip() for cell in cells[bad, k]]
            words = [text for text in texts if text.lower() not in MISSING and not _is_number(text)]
            place = f"line {lines[int(np.flatnonzero(bad)[texts.index(words[0])]) if words else at]}"
            what = f"{words[0]!r} in {place}" if words else f"{int(bad.sum())} rows without a number, first {place}"
            if not words and texts[0].lower() not in MISSING:
                what = f"{texts[0]} in {place}, which float32 does not hold"
            faults.append(f"{name} has {what}")
            columns.append(name)
            values[bad, k] = np.nan
    if not faults:
        return values, []
    return values, [
        f"Expected finite numbers in every column of {path}; got {len(faults)} with others: "
        f"{_listed(faults, '; ')}. {_remedy(cells, columns, droppable)}"
    ]


def _remedy(cells: np.ndarray, columns: Sequence[str], droppable: bool) -> str:
    marks = [cell for cell in cells.flat if cells.dtype.kind == "U" and WITH_COMMA.fullmatch(cell)]
    if marks:
        clear = next((cell for cell in marks if not COMMA_OF_THOUSANDS.fullmatch(cell)), None)
        written = _without_comma(clear) if clear else f"{marks[0].replace(',', '.')} or {marks[0].replace(',', '')}"
        return f"Write {clear or marks[0]} as {written}: numbers have points, and no commas."
    parts = {mark: str(cells[0, 0]).split(mark) for mark in OTHER_MARKS}
    between = next((mark for mark in OTHER_MARKS if len(parts[mark]) > 1 and any(map(_is_number, parts[mark]))), None)
    if between and droppable and cells.shape[1] == 1:
        return f"If {between!r} stands between entries, say so: 'data.separator=\"{between}\"'."
    if not droppable:
        return "Put numbers in their place, or leave such rows out."
    dropped = list_setting("data.drop", columns[:MOST_LISTED], more=len(columns) > MOST_LISTED)
    return f"Put numbers in their place, or leave such columns out: {dropped}."


def _without_comma(number: str) -> str:
    """1234.5 for 1.234,5 and for 1,234.5: the last mark is the decimal point, unless it stands more than once."""
    mark = max(".,", key=number.rfind)
    whole, _, fraction = number.rpartition(mark)
    parts = [re.sub("[.,]", "", part) for part in (whole, fraction)]
    return ("." if number.count(mark) == 1 else "").join(parts)


def _listed(words: Sequence[str], between: str = ", ") -> str:
    more = f"{between}…" if len(words) > MOST_LISTED else ""
    return between.join(words[:MOST_LISTED]) + more


def _read_npy(path: Path) -> tuple[np.ndarray, tuple[str, ...], list[int]]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # numpy repairs some headers
            values = np.load(path, allow_pickle=False)
    except Exception as error:  # numpy parses the header as Python, and raises whatever that parser raises
        raise DataError(f"Expected an array of numbers in {path}; got: {first_line(error)}.") from None
    if not isinstance(values, np.ndarray) or values.dtype.kind not in "fiu":
        raise DataError(f"Expected real numbers in {path}; got {getattr(values, 'dtype', type(values).__name__)}.")
    return values, (), list(range(1, 1 + (len(values) if values.ndim else 0)))


def _read_csv(path: Path, separator: str | None) -> tuple[np.ndarray, tuple[str, ...], list[int]]:
    """The cells as text, the names of the columns, and the line numbers of the rows."""
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:
            first = [file.readline(), file.readline()]
            file.seek(0)
            between = separator or _mark(first)
            rows = [
                (reader.line_num, row)
                for reader in [csv.reader(file, strict=True, delimiter=between)]
                for row in reader
                if any(map(str.strip, row))
            ]
    except UnicodeDecodeError:
        raise DataError(f"Expected text in UTF-8 in {path}; got another encoding. Save it as UTF-8.") from None
    except (OSError, csv.Error, TypeError) as error:
        raise DataError(f"Expected lines of text in {path}; got: {first_line(error)}.") from None
    header: list[str] = []
    if rows and _are_names(rows[0][1], [row for _, row in rows[1:]]):
        (line, header), *rows = rows
        if any(map(_is_number, header)):
            log.warning("Line %d of %s is taken for the names of its columns: %s.", line, path, _listed(header))
    if not rows:
        raise DataError(f"Expected rows of numbers in {path}; got none.")
    width = len(rows[0][1])
    for line, row in rows:
        if len(row) != width:
            raise DataError(f"Expected {width} columns in line {line} of {path}; got {len(row)}.")
    cells = np.array([[cell.strip() for cell in row] for _, row in rows], dtype=np.str_)
    return cells, _names(header, width, path), [line for line, _ in rows]


def _mark(first: Sequence[str]) -> str:
    """The separator of the first two lines.

    It splits both into the same number of entries, and does not split numbers with commas.
    """
    for mark in MARKS:
        rows = [row for row in csv.reader(first, delimiter=mark) if any(map(str.strip, row))]
        alike = len({len(row) for row in rows}) == 1 and len(rows[0]) > 1
        if alike and all("," not in cell or WITH_COMMA.fullmatch(cell.strip()) for cell in rows[-1]):
            return mark
    return next((mark for mark in reversed(MARKS) if mark in first[0]), ",")


def _are_names(first: Sequence[str], rest: Sequence[Sequence[str]]) -> bool:
    """Whether the first line is a header: words, with or without whole numbers among them, or certain whole numbers
    alone.

    These are years above fractions, or the 0, 1, 2, … that pandas writes for unnamed columns, with nothing above the
    numbers of rows. Other lines with some numbers in them are rows.
    """
    numbers = [k for k, cell in enumerate(first) if _is_number(cell)]
    cells = [cell.strip() for cell in first]
    if not numbers:
        return True
    fractions = [bool(rest) and all(len(row) > k and _is_fraction(row[k]) for row in rest) for k in numbers]
    counted = cells if cells[0] else cells[1:]
    if counted == [str(k) for k in range(len(counted))]:
        return len(counted) > 2 or all(fractions)
    words = any(cell.lower() not in MISSING and not _is_number(cell) for cell in cells)
    return words and all(fractions) and all(cells[k].isdecimal() for k in numbers)


def _is_fraction(cell: str) -> bool:
    """Whether the cell is a number that is not written as a whole one, or a missing number."""
    text = cell.strip()
    return text.lower() in MISSING or (_is_number(text) and not text.lstrip("+-").isdecimal())


def _names(header: Sequence[str], width: int, path: Path) -> tuple[str, ...]:
    """A name for each column; an unnamed one is called by its place, except for a first one among named ones."""
    if header and len(header) != width:
        raise DataError(f"Expected {width} names in {path}, as there are columns; got {len(header)}.")
    names = tuple(" ".join(name.split()) or f"x{k + 1}" for k, name in enumerate(header))
    often = [name for name, count in Counter(names).items() if count > 1]
    if often:
        raise DataError(f"Expected columns with names of their own in {path}; got {often[0]!r} twice.")
    return ("", *names[1:]) if header and not header[0].strip() and all(map(str.strip, header[1:])) else names


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return "_" not in cell  # underscores are Python's own notation for large numbers


def _number(cell: str) -> float:
    return float(cell) if _is_number(cell) else np.nan
