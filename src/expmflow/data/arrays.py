"""Images in a `.npy` or `.npz` file."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch
from torch import Tensor

from expmflow.data.errors import DataError, first_line

IMAGES = ("images", "x_train")
LABELS = ("labels", "y_train")
MOST_CLASSES = 65_536


def read_arrays(path: Path, *, levels: int = 256) -> tuple[Tensor, Tensor | None]:
    """`(N, C, h, w)` images in uint8 with 1 or 3 channels, and their labels if there are any.

    The array is `(N, h, w)`, `(N, h, w, C)` or `(N, C, h, w)`, of integers below `levels`. If the last axis has length
    1 or 3 it is the channels, even if the second could be, too. With two levels, booleans are allowed.

    A `.npz` file has its images under `images` or `x_train`, or has one array besides the labels; its labels are under
    `labels` or `y_train`. Other arrays are not read.
    """
    if not path.is_file():
        raise DataError(f"Expected the file {path}; got none.")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # numpy repairs some headers
            with open(path, "rb") as file:  # numpy leaves a damaged archive open
                images, labels = _load(file, path)
    except DataError:
        raise
    except Exception as error:  # numpy parses the header as Python, and raises whatever that parser raises
        reason = "Python objects, which are never loaded" if "pickle" in str(error) else first_line(error)
        raise DataError(f"Expected an array of images in {path}; got: {reason}.") from None
    rows = torch.from_numpy(_bytes(_channels_first(images, path), levels, path))
    return rows, None if labels is None else _classes(labels, len(rows), path)


def _load(file: BinaryIO, path: Path) -> tuple[np.ndarray, np.ndarray | None]:
    loaded = np.load(file, allow_pickle=False)
    if isinstance(loaded, np.ndarray):
        return loaded, None
    with loaded:
        names = loaded.files
        label = next((name for name in LABELS if name in names), None)
        image = next((name for name in IMAGES if name in names), None)
        others = [name for name in names if name != label]
        if image is None and len(others) != 1:
            raise DataError(f"Expected an array called images in {path}; got {', '.join(names) or 'none'}.")
        return np.asarray(loaded[image or others[0]]), None if label is None else np.asarray(loaded[label])


def _channels_first(images: np.ndarray, path: Path) -> np.ndarray:
    if 0 not in images.shape:
        if images.ndim == 3:
            return images[:, None]
        if images.ndim == 4 and images.shape[3] in (1, 3):
            return images.transpose(0, 3, 1, 2)
        if images.ndim == 4 and images.shape[1] in (1, 3):
            return images
    raise DataError(
        f"Expected images of shape (N, h, w), (N, h, w, C) or (N, C, h, w) with C = 1 or 3 in {path}; "
        f"got {images.shape}."
    )


def _bytes(images: np.ndarray, levels: int, path: Path) -> np.ndarray:
    if images.dtype.kind == "b" and levels == 2:
        images = images.astype(np.uint8)
    if images.dtype.kind not in "iu":
        scale = "" if levels == 2 else f"times {levels - 1} and "
        hint = f": save them as uint8, {scale}rounded if they are from 0 to 1" if images.dtype.kind == "f" else ""
        raise DataError(f"Expected integers from 0 to {levels - 1} in {path}{hint}; got {images.dtype}.")
    least, largest = int(images.min()), int(images.max())
    if least < 0 or largest >= levels:
        raise DataError(f"Expected integers from 0 to {levels - 1} in {path}; got {least} to {largest}.")
    return np.array(images, dtype=np.uint8, order="C")


def _classes(labels: np.ndarray, rows: int, path: Path) -> Tensor:
    if labels.dtype.kind not in "iu" or labels.shape not in ((rows,), (rows, 1)):
        raise DataError(f"Expected {rows} integer labels in {path}; got {labels.dtype} of shape {labels.shape}.")
    least, largest = int(labels.min()), int(labels.max())
    if least < 0 or largest >= MOST_CLASSES:
        raise DataError(f"Expected labels from 0 to {MOST_CLASSES - 1} in {path}; got {least} to {largest}.")
    return torch.from_numpy(labels.reshape(rows).astype(np.int64))
