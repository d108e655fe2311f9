"""The data set that training needs."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from expmflow._validation import expect


@dataclass(frozen=True)
class Dataset:
    """Rows for training, validation and test, all of one event shape.

    Args:
        train, validation, test: floats, or integers from 0 to `levels` − 1.
        labels: the classes of the rows of the three, in int64; None if there are none.
        classes: the number of classes; 0 if there are none.
        levels: the grey levels of integer rows.
        names: the names of a row's entries, if they have any (the columns of a table).
        class_names: the names of the classes, if they have any.
        kind: the kind of the rows, a name in `expmflow.data.kinds`; their shape alone does not tell.
        integers: for a table, the columns of whole numbers; None for rows that a model takes unchanged.
        cells: for a table, other columns with repeated values, each with the width of its cells.
        has_edges: whether rows are graphs that hold their own edges beside the features of nodes.
        draw: draws new rows for each training step, from a number and a generator, instead of those of `train`.
    """

    train: Tensor
    validation: Tensor
    test: Tensor
    labels: tuple[Tensor, Tensor, Tensor] | None = None
    classes: int = 0
    levels: int | None = None
    names: tuple[str, ...] = ()
    draw: Callable[[int, torch.Generator], Tensor] | None = None
    class_names: tuple[str, ...] = ()
    kind: str = "vectors"
    integers: tuple[int, ...] | None = None
    has_edges: bool = False
    cells: tuple[tuple[int, float], ...] = ()

    @property
    def event_shape(self) -> tuple[int, ...]:
        """The shape of one row."""
        return tuple(self.train.shape[1:])

    def class_name(self, k: int) -> str:
        """The name of class k; its number, if it has no name."""
        return self.class_names[k] if self.class_names else str(k)

    def digest(self) -> str | None:
        """A checksum of these rows, in these splits; None if rows are drawn, because they follow from the seed."""
        if self.draw is not None:
            return None
        found = hashlib.sha256()
        for part in (self.train, self.validation, self.test, *(self.labels or ())):
            found.update(f"{part.dtype} {tuple(part.shape)}".encode())
            found.update(part.contiguous().numpy())
        return found.hexdigest()


def split(rows: Tensor, validation: float, test: float) -> Dataset:
    """The last rows are the test, those before them validation; at least one row is left for training."""
    tested, validated = int(len(rows) * test), int(len(rows) * validation)
    rest = len(rows) - tested - validated
    expect(
        rest >= 1, "at least one row for training", f"{len(rows)} rows, {validated} for validation, {tested} for test"
    )
    return Dataset(rows[:rest], rows[rest : rest + validated], rows[rest + validated :])
