"""Columns of a table that a density can be learned of, and those that it cannot."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from expmflow.data.errors import DataError

log = logging.getLogger(__name__)
SAME = 1 - 1e-10  # a correlation that leaves nothing of its own
DETERMINED = 1e-10  # a variance, of standardised columns, that leaves nothing of its own
OFTEN = 0.95  # the share of rows with one value beyond which a column is more of an atom than of a density


def integer_columns(rows: Tensor) -> tuple[int, ...]:
    """The places of the columns that hold whole numbers only."""
    whole = (rows == rows.round()).all(0) & (rows.abs() < 2**52).all(0)
    return tuple(int(k) for k in whole.nonzero().flatten())


def check_columns(rows: Tensor, names: Sequence[str], path: Path) -> None:
    """Raise `DataError` for columns of training rows that have no density, by name and with what to do about them.

    Constant ones, and copies of others up to scale and offset. A warning names columns that determine each other, and
    those that have one and the same value in nearly all rows.
    """
    names = names or [f"x{k + 1}" for k in range(rows.shape[1])]
    spread = rows.std(0, correction=0)
    constant = [name for name, value, x in zip(names, spread, rows.T, strict=True) if value == 0 or (x == x[0]).all()]
    if constant:
        raise DataError(
            f"Expected columns that vary in the training rows of {path}; got {', '.join(constant)}, of one value. "
            f"Leave them out: data.drop=[{','.join(constant)}]."
        )
    if len(rows) <= 2:
        return
    standard = (rows - rows.mean(0)) / spread
    correlation = standard.T @ standard / len(rows)
    copies = (correlation.abs() > SAME).triu(1).nonzero().tolist()
    if copies:
        pairs = ", ".join(f"{names[b]} of {names[a]}" for a, b in copies)
        extra = ",".join(dict.fromkeys(names[b] for _, b in copies))
        raise DataError(
            f"Expected columns that each say something new in {path}; got copies, up to scale and offset: {pairs}. "
            f"Leave them out: data.drop=[{extra}]."
        )
    _warn_of_dependence(correlation, len(rows), names, path)
    whole = integer_columns(rows)
    for k, name in enumerate(names):
        value = rows[:, k].mode().values
        times = int((rows[:, k] == value).sum())
        if k not in whole and times > OFTEN * len(rows):
            log.warning(
                "Column %s of %s is %g in %d of %d rows: a density has no bound there, and its nll says little. Leave "
                "it out by data.drop, or round it to whole numbers.",
                *(name, path, float(value), times, len(rows)),
            )


def _warn_of_dependence(correlation: Tensor, count: int, names: Sequence[str], path: Path) -> None:
    if count <= correlation.shape[0] + 1:
        return  # so few rows determine each other anyhow
    values, vectors = torch.linalg.eigh(correlation)
    if float(values[0]) < DETERMINED:
        involved = [name for name, weight in zip(names, vectors[:, 0].abs(), strict=True) if float(weight) > 0.05]
        log.warning(
            "Columns %s of %s determine each other: a density has no bound there, and its nll says little. Leave one "
            "of them out by data.drop.",
            *(", ".join(involved), path),
        )
