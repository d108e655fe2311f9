"""What training needs of a data set."""

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
        classes: how many classes there are; 0 if there are none.
        levels: the grey levels of integer rows.
        names: what the entries of a row are called, if they have names (the columns of a table).
        class_names: what the classes are called, if they have names.
        kind: what the rows are, a name in `expmflow.data.kinds`; their shape alone does not tell.
        integers: of a table, the columns of whole numbers; None for rows that a model takes as they are.
        cells: of a table, other columns whose values repeat, each with the width of what they are known up to.
        has_edges: whether rows are graphs that hold their own edges beside the features of nodes.
        draw: new rows for each training step, out of a number and a generator, in place of those of `train`.
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
        """What to call class k: its number, if it has no name."""
        return self.class_names[k] if self.class_names else str(k)

    def digest(self) -> str | None:
        """Tells these rows, in these parts, from all others; None where rows are drawn, which follow from the seed."""
        if self.draw is not None:
            return None
        found = hashlib.sha256()
        for part in (self.train, self.validation, self.test, *(self.labels or ())):
            found.update(f"{part.dtype} {tuple(part.shape)}".encode())
            found.update(part.contiguous().numpy())
        return found.hexdigest()


def split(rows: Tensor, validation: float, test: float) -> Dataset:
    """The last rows are the test, those before them validation; at least one row stays for training."""
    tested, validated = int(len(rows) * test), int(len(rows) * validation)
    rest = len(rows) - tested - validated
    expect(
        rest >= 1, "at least one row for training", f"{len(rows)} rows, {validated} for validation, {tested} for test"
    )
    return Dataset(rows[:rest], rows[rest : rest + validated], rows[rest + validated :])
