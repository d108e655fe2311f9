"""A folder of images."""

from __future__ import annotations

import logging
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

log = logging.getLogger(__name__)
MOST_THREADS = 8
MOST_LISTED = 20  # the most broken files in a message
# image formats that cannot be read here
PHONES = (".heic", ".heif", ".avif", ".jxl", ".jp2")
CAMERAS = (".dng", ".cr2", ".cr3", ".nef", ".arw", ".raf", ".orf", ".rw2")
UNREAD = (*PHONES, *CAMERAS, ".psd", ".svg", ".tga", ".ppm", ".pgm")


def find_pictures(folder: Path) -> list[Path]:
    """The image files in a folder and its sub-folders, sorted, without hidden ones.

    A warning counts images in formats that cannot be read.
    """
    visible = sorted(_visible_files(folder))
    files = [path for path in visible if path.suffix.lower() in SUFFIXES]
    others = [path for path in visible if path.suffix.lower() in UNREAD]
    kinds, found = ", ".join(suffix[1:] for suffix in SUFFIXES), ""
    if others:
        formats = ", ".join(sorted({path.suffix[1:].lower() for path in others}))
        found = f"{len(others)} of formats that are not read ({formats}), such as {others[0].name}"
    if not files:
        raise DataError(f"Expected images ({kinds}) in {folder}; got {found or 'none'}.")
    if others:
        log.warning("Of the images in %s, left out %s. Read are %s.", folder, found, kinds)
    return files


def folder_labels(folder: Path, paths: Sequence[Path]) -> Tensor | None:
    """The class of each image: the index of its folder among those directly below `folder`.

    None unless there are at least two such folders, and every image is in one.
    """
    places = [path.relative_to(folder).parts[:-1] for path in paths]
    classes = sorted({place[0] for place in places if place})
    if not all(places) or len(classes) < 2:
        return None
    number = {name: k for k, name in enumerate(classes)}
    return torch.tensor([number[place[0]] for place in places])


def class_folders(folder: Path, paths: Sequence[Path]) -> tuple[str, ...]:
    """The names of the classes that `folder_labels` numbers."""
    return tuple(sorted({path.relative_to(folder).parts[0] for path in paths}))


def read_pictures(
    paths: Sequence[Path], form: Form, progress: Progress | None = None, *, advice: str = ""
) -> list[np.ndarray]:
    """Read every file with `read_picture`, in order; `DataError` names all broken ones, with some `advice`."""
    arrays, broken = read_whole(paths, form, progress)
    if broken and len(paths) == 1:
        raise broken[0]
    if broken:
        raise DataError(f"Expected {len(paths)} images{advice}; got {listed(broken)}")
    return list(arrays.values())


def whole_pictures(
    paths: Sequence[Path], form: Form, progress: Progress | None = None
) -> tuple[list[Path], list[np.ndarray]]:
    """As `read_pictures`, without broken files, which a warning names; `DataError` if all are broken."""
    whole, broken = read_whole(paths, form, progress)
    if not whole:
        raise broken[0]
    if broken:
        log.warning("Of %d files, left out %s", len(paths), listed(broken))
    return list(whole), list(whole.values())


def listed(broken: Sequence[DataError]) -> str:
    """How many files are broken, and a line for each, up to a limit."""
    lines = "".join(f"\n  {error}" for error in broken[:MOST_LISTED])
    more = f"\n  … and {len(broken) - MOST_LISTED} more" if len(broken) > MOST_LISTED else ""
    return f"{len(broken)} file{'s that are' if len(broken) > 1 else ' that is'} broken:{lines}{more}"


def read_whole(
    paths: Sequence[Path], form: Form, progress: Progress | None = None
) -> tuple[dict[Path, np.ndarray], list[DataError]]:
    """The images by their paths, in order, and the errors of the others.

    Several are read at a time, because decoders release Python's lock.
    """

    def read(path: Path) -> np.ndarray | DataError:
        try:
            return read_picture(path, form)
        except DataError as error:
            return error

    arrays: dict[Path, np.ndarray] = {}
    broken: list[DataError] = []
    threads = min(MOST_THREADS, os.cpu_count() or 1)
    with strict_pillow(), ThreadPoolExecutor(threads) as pool:
        for done, (path, found) in enumerate(zip(paths, pool.map(read, paths), strict=True), start=1):
            if isinstance(found, DataError):
                broken.append(found)
            else:
                arrays[path] = found
            if progress is not None:
                progress("images", done, len(paths))
    return arrays, broken


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
        if real in seen:  # a link to a folder that was visited
            folders.clear()
            continue
        seen.add(real)
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        found += [Path(place, name) for name in files if not name.startswith(".")]
    return found


def _refuse(error: OSError) -> NoReturn:
    raise DataError(f"Expected to read the folder {error.filename}; got: {error.strerror or first_line(error)}.")
