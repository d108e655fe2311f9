"""Data sets, published ones and the user's own."""

from expmflow.data.dataset import Dataset, split
from expmflow.data.errors import DataError
from expmflow.data.images import IMAGE_SETS, load_images
from expmflow.data.own import load_image_files
from expmflow.data.points import two_moons
from expmflow.data.table import load_table

__all__ = [
    "IMAGE_SETS",
    "DataError",
    "Dataset",
    "load_image_files",
    "load_images",
    "load_table",
    "split",
    "two_moons",
]
