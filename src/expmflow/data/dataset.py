"""What training needs of a data set."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from expmflow._validation import expect


@dataclass(frozen=True)
class Dataset:
    """Rows for training, validation and test, all of one event shape."""

    train: Tensor
    validation: Tensor
    test: Tensor

    @property
    def event_shape(self) -> tuple[int, ...]:
        """The shape of one row."""
        return tuple(self.train.shape[1:])


def split(rows: Tensor, validation: float, test: float) -> Dataset:
    """The last rows are the test, those before them validation; at least one row stays for training."""
    tested, validated = int(len(rows) * test), int(len(rows) * validation)
    rest = len(rows) - tested - validated
    expect(
        rest >= 1, "at least one row for training", f"{len(rows)} rows, {validated} for validation, {tested} for test"
    )
    return Dataset(rows[:rest], rows[rest : rest + validated], rows[rest + validated :])
