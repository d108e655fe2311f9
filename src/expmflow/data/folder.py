"""A folder of images."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NoReturn

import numpy as np
import torch
from torch import Tensor

from expmflow.data.download import Progress
from expmflow.data.errors import DataError, first_line
from expmflow.data.form import Form
from expmflow.data.pictures import SUFFIXES, read_picture, strict_pillow

MOST_THREADS = 8


def find_pictures(folder: Path) -> list[Path]:
    """The image files in a folder and in those below it, sorted; hidden ones are left out."""
    files = [path for path in _visible_files(folder) if path.suffix.lower() in SUFFIXES]
    if not files:
        kinds = ", ".join(suffix[1:] for suffix in SUFFIXES)
        raise DataError(f"Expected images ({kinds}) in {folder}; got none.")
    return sorted(files)


def folder_labels(folder: Path, paths: Sequence[Path]) -> Tensor | None:
    """The class of each image: the place of its folder among those right below `folder`, in order.

    None unless there are two of them at least, and every image is in one.
    """
    places = [path.relative_to(folder).parts[:-1] for path in paths]
    classes = sorted({place[0] for place in places if place})
    if not all(places) or len(classes) < 2:
        return None
    number = {name: k for k, name in enumerate(classes)}
    return torch.tensor([number[place[0]] for place in places])


def read_pictures(paths: Sequence[Path], form: Form, progress: Progress | None = None) -> list[np.ndarray]:
    """Every file as `read_picture` has it, in order; several at a time, as decoders leave Python's lock alone."""
    arrays: list[np.ndarray] = []
    threads = min(MOST_THREADS, os.cpu_count() or 1)
    with strict_pillow(), ThreadPoolExecutor(threads) as pool:
        for array in pool.map(lambda path: read_picture(path, form), paths):
            arrays.append(array)
            if progress is not None:
                progress("images", len(arrays), len(paths))
    return arrays


def stack(arrays: Sequence[np.ndarray]) -> Tensor:
    """`(images, C, h, w)` from images of one size: 1 channel if all are grey, else 3."""
    if all(array.ndim == 2 for array in arrays):
        return torch.from_numpy(np.stack(arrays)).unsqueeze(1)
    colour = [array if array.ndim == 3 else array[..., None].repeat(3, axis=2) for array in arrays]
    return torch.from_numpy(np.stack(colour)).permute(0, 3, 1, 2).contiguous()


def _visible_files(folder: Path) -> list[Path]:
    found: list[Path] = []
    seen: set[str] = set()
    for place, folders, files in os.walk(folder, followlinks=True, onerror=_refuse):
        real = os.path.realpath(place)
        if real in seen:  # a link to where we have been
            folders.clear()
            continue
        seen.add(real)
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        found += [Path(place, name) for name in files if not name.startswith(".")]
    return found


def _refuse(error: OSError) -> NoReturn:
    raise DataError(f"Expected to read the folder {error.filename}; got: {error.strerror or first_line(error)}.")
