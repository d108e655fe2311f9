"""The user's own images: image files, folders of them, `.npy` and `.npz` files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import numpy as np
from torch import Tensor

from expmflow._validation import expect
from expmflow.data.arrays import read_arrays
from expmflow.data.download import Progress
from expmflow.data.errors import DataError
from expmflow.data.folder import class_folders, find_pictures, folder_labels, read_pictures, stack, whole_pictures
from expmflow.data.form import Channels, Form, pillow
from expmflow.data.pictures import SUFFIXES

ARRAYS = (".npy", ".npz")


@dataclass(frozen=True)
class OwnImages:
    """`(rows, C, h, w)` images; their labels and the names of the classes, if there are any."""

    rows: Tensor
    labels: Tensor | None = None
    class_names: tuple[str, ...] = ()


def read_own(path: Path, form: Form, progress: Progress | None = None, *, skip_broken: bool = False) -> OwnImages:
    """The images in a folder, a `.npy` or a `.npz` file; with `skip_broken`, without files that are not images."""
    if path.is_dir():
        paths = find_pictures(path)
        if skip_broken:
            paths, arrays = whole_pictures(paths, form, progress)
        else:
            advice = ", or data.skip_broken=true to leave those out that are none"
            arrays = read_pictures(paths, form, progress, advice=advice)
        _expect_one_size(paths, arrays)
        labels = folder_labels(path, paths)
        return OwnImages(stack(arrays), labels, () if labels is None else class_folders(path, paths))
    if path.suffix.lower() in ARRAYS:
        rows, labels = read_arrays(path, levels=form.levels)
        return OwnImages(stack(_formed(rows, form)), labels)
    raise DataError(f"Expected a folder of images, a .npy or a .npz file; got {_described(path)}.")


def load_image_files(
    paths: Sequence[Path],
    event_shape: tuple[int, ...],
    *,
    size: int | None = None,
    crop: bool = True,
    channels: Channels | None = None,
    levels: int | None = None,
    skip_broken: bool = False,
    progress: Progress | None = None,
) -> tuple[Tensor, list[str]]:
    """Rows of a given shape `(C, h, w)` in uint8, and a name for each: its file, or `file[index]` in an array.

    Args:
        paths: image files, folders of them, `.npy` or `.npz` files.
        event_shape: the shape that each row must have; images of another shape are refused, unless the options change
            it. Grey images become RGB where RGB is expected.
        size, crop, channels, levels: as for the training data. With any `size`, images are brought to `(h, w)`.
        skip_broken: skip files that are not images, with a warning.
        progress: called while images are read.
    """
    expect(len(event_shape) == 3 and event_shape[0] in (1, 3), "an event shape (1 or 3, h, w)", tuple(event_shape))
    expect(len(paths) > 0, "at least one file or folder of images", "none")
    colours, height, width = event_shape
    form = Form(None if size is None else (height, width), crop, channels, 256 if levels is None else levels)
    files = [file for path in paths for file in _expanded(path)]
    names: list[str] = []
    arrays: list[np.ndarray] = []
    for are_arrays, group in groupby(files, lambda file: file.suffix.lower() in ARRAYS):
        if are_arrays:
            for file in group:
                part = _formed(read_arrays(file, levels=form.levels)[0], form)
                names += [f"{file}[{k}]" for k in range(len(part))]
                arrays += part
        else:
            pictures = list(group)
            if skip_broken:
                pictures, part = whole_pictures(pictures, form, progress)
            else:
                part = read_pictures(pictures, form, progress)
            names += map(str, pictures)
            arrays += part
    for name, array in zip(names, arrays, strict=True):
        if array.shape[:2] != (height, width):
            raise DataError(f"Expected an image of {width}×{height} pixels in {name}; got {_size(array)}.")
        if array.ndim == 3 and colours == 1:
            raise DataError(f"Expected a grey image in {name}, as the model has one channel; got a coloured one.")
    if colours == 3:
        arrays = [np.broadcast_to(array.reshape(height, width, -1), (height, width, 3)) for array in arrays]
    return stack(arrays), names


def _expanded(path: Path) -> list[Path]:
    if path.is_dir():
        return find_pictures(path)
    if path.is_file() and path.suffix.lower() in (*ARRAYS, *SUFFIXES):
        return [path]
    kinds = ", ".join(suffix[1:] for suffix in (*SUFFIXES, *ARRAYS))
    raise DataError(f"Expected a folder or a file ({kinds}); got {_described(path)}.")


def _formed(rows: Tensor, form: Form) -> list[np.ndarray]:
    """Each row after `Form.apply`."""
    values = rows.squeeze(1).numpy() if rows.shape[1] == 1 else rows.permute(0, 2, 3, 1).contiguous().numpy()
    if form.size in (None, tuple(rows.shape[2:])) and form.channels is None:
        return list(values)
    return [form.apply(pillow().fromarray(value)) for value in values]


def _expect_one_size(paths: Sequence[Path], arrays: Sequence[np.ndarray]) -> None:
    for path, array in zip(paths, arrays, strict=True):
        if array.shape[:2] != arrays[0].shape[:2]:
            raise DataError(
                "Expected images of one size, or an option such as data.size=32 that brings them to one; "
                f"got {_size(arrays[0])} in {paths[0]} and {_size(array)} in {path}."
            )


def _size(array: np.ndarray) -> str:
    return f"{array.shape[1]}×{array.shape[0]}"


def _described(path: Path) -> str:
    return str(path) if path.exists() else f"{path}, which does not exist"
