"""Data sets, the user's own among them."""

from expmflow.data.dataset import Dataset, split
from expmflow.data.points import two_moons
from expmflow.data.table import DataError, load_table

__all__ = ["DataError", "Dataset", "load_table", "split", "two_moons"]
