"""Which columns of a table have a density that can be learned, and which have not."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from expmflow.data.errors import DataError, list_setting

log = logging.getLogger(__name__)
SAME = 1 - 1e-10  # a correlation so high that one column is a copy
DETERMINED = 1e-10  # a variance, of standardised columns, so small that the others determine the column
FEWEST_ROWS = 2
ROUNDING = 4e-15  # relative to the largest value: a spread that comes from rounding in float64
REPEATED = 0.05  # the share of rows with one value above which this is no accident
OFTEN = 0.95  # the share above which the other values are too few to learn
FINE, COARSE = 0.01, 0.1  # of the standard deviation: the least width of cells, and one that most values are wider than


def integer_columns(rows: Tensor) -> tuple[int, ...]:
    """The indices of the columns that hold only whole numbers."""
    whole = (rows == rows.round()).all(0) & (rows.abs() < 2**52).all(0)
    return tuple(int(k) for k in whole.nonzero().flatten())


def repeated_values(rows: Tensor) -> tuple[tuple[int, float], ...]:
    """Indices of other columns in which one value repeats, each with the width of the cells of its values.

    The width is the smallest difference of two values, as of ratings in halves, or a hundredth of the standard
    deviation if values come closer than that, such as amounts of rain among many days without.
    """
    whole, found = integer_columns(rows), []
    for k in set(range(rows.shape[1])) - set(whole):
        values, counts = rows[:, k].unique(return_counts=True)
        if len(values) > 1 and int(counts.max()) > max(2, REPEATED * len(rows)):
            spread = float(rows[:, k].std(correction=0))
            found.append((k, max(float(values.diff().min()), FINE * spread)))
    return tuple(sorted(found))


def leave_out(names: Sequence[str]) -> str:
    """Advice about columns of a file."""
    return f"Leave them out: {list_setting('data.drop', names)}."


def check_columns(
    rows: Tensor, names: Sequence[str], source: str, advice: Callable[[Sequence[str]], str] = leave_out
) -> None:
    """Raise `DataError` for columns of training rows that have no density, by name and with advice.

    These are constant columns, columns with one value in nearly all rows and others in the rest, and copies of other
    columns up to scale and offset. A warning names columns that determine each other.
    """
    if len(rows) < FEWEST_ROWS:
        raise DataError(f"Expected at least {FEWEST_ROWS} rows for training in {source}; got {len(rows)}.")
    names = names or [f"x{k + 1}" for k in range(rows.shape[1])]
    spread = rows.std(0, correction=0)
    constant = [
        name
        for name, value, x in zip(names, spread, rows.T, strict=True)
        if value <= ROUNDING * x.abs().max() or (x == x[0]).all()
    ]
    if constant:
        raise DataError(
            f"Expected columns that vary in the training rows of {source}; got {', '.join(constant)}, of one value. "
            f"{advice(constant)}"
        )
    _refuse_atoms(rows, names, source, advice)
    if len(rows) == FEWEST_ROWS:
        return  # any two columns of two rows are copies
    standard = (rows - rows.mean(0)) / spread
    correlation = standard.T @ standard / len(rows)
    copies = (correlation.abs() > SAME).triu(1).nonzero().tolist()
    if copies:
        pairs = ", ".join(f"{names[b]} of {names[a]}" for a, b in copies)
        extra = list(dict.fromkeys(names[b] for _, b in copies))
        raise DataError(
            f"Expected columns that each say something new in {source}; got copies, up to scale and offset: {pairs}. "
            f"{advice(extra)}"
        )
    _warn_of_dependence(correlation, len(rows), names, source)


def _refuse_atoms(rows: Tensor, names: Sequence[str], source: str, advice: Callable[[Sequence[str]], str]) -> None:
    atoms = {}
    for k, width in repeated_values(rows):
        x = rows[:, k]
        value = x.mode().values
        times = int((x == value).sum())
        if times > OFTEN * len(x) and width < COARSE * float(x.std(correction=0)):
            atoms[names[k]] = f"{names[k]}, which is {float(value):g} in {times} of {len(x)}"
    if atoms:
        raise DataError(
            f"Expected columns that vary in the training rows of {source}; got {', '.join(atoms.values())}: too few "
            f"others to learn a density of. {advice(list(atoms))} Or put 0 and 1 in place of its values."
        )


def _warn_of_dependence(correlation: Tensor, count: int, names: Sequence[str], source: str) -> None:
    if count <= correlation.shape[0] + 1:
        return  # so few rows determine each other anyway
    values, vectors = torch.linalg.eigh(correlation)
    if float(values[0]) < DETERMINED:
        involved = [name for name, weight in zip(names, vectors[:, 0].abs(), strict=True) if float(weight) > 0.05]
        log.warning(
            "Columns %s of %s determine each other: a density has no bound there, and its nll says little. Leave one "
            "of them out by data.drop.",
            *(", ".join(involved), source),
        )
