"""Images by name, and the user's own."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from expmflow._validation import expect
from expmflow.data.cifar import load_cifar10
from expmflow.data.dataset import Dataset, split
from expmflow.data.digits import load_digits
from expmflow.data.download import Progress
from expmflow.data.errors import DataError
from expmflow.data.form import Channels, Form
from expmflow.data.idx import load_mnist
from expmflow.data.own import read_own
from expmflow.data.paths import expand_home

IMAGE_SETS = ("digits", "mnist", "fashion-mnist", "cifar10", "images")


def load_images(
    name: str,
    *,
    generator: torch.Generator,
    path: Path | None = None,
    folder: Path | None = None,
    size: int | None = None,
    crop: bool = True,
    channels: Channels | None = None,
    levels: int | None = None,
    skip_broken: bool = False,
    validation: float = 0.1,
    test: float = 0.1,
    progress: Progress | None = None,
) -> Dataset:
    """Images in uint8 of shape `(rows, C, h, w)`, split into three.

    Args:
        name: `digits`, `mnist`, `fashion-mnist`, `cifar10`, or `images`, the user's own. The first four have their own
            splits, which `validation` and `test` do not change.
        generator: shuffles the rows of `images` before they are split.
        path: of `images`: a folder of image files, whose sub-folders are classes if every image is in one of at least
            two; or a `.npy` or `.npz` file, see `read_arrays`.
        folder: the folder of the official files; by default that of the environment variable EXPMFLOW_DATA, and without
            that they are downloaded to the user's cache.
        size: the height and width to bring the user's images to; without it they must all have one size.
        crop: whether `size` crops the centre, or squashes the image.
        channels: "rgb" or "grey"; without it, images stay grey only if all of them are.
        levels: the grey levels of the user's images, 256 if not given.
        skip_broken: skip files in a folder that are not images, with a warning.
        validation, test: the fractions of the user's rows that are kept for each.
        progress: called during downloads, and while images are read.

    Example:
        >>> data = load_images("digits", generator=torch.Generator())
        >>> data.train.shape, data.levels
        (torch.Size([1290, 1, 8, 8]), 17)
    """
    expect(name in IMAGE_SETS, f"one of {', '.join(IMAGE_SETS)}", repr(name))
    if name != "images":
        for option, given in (("path", path), ("size", size), ("channels", channels), ("levels", levels)):
            expect(given is None, f"data.{option} with data.name=images only", f"{given} with {name}")
        return load_digits() if name == "digits" else _published(name, folder, progress)
    if path is None:
        raise DataError("Expected data.path, a folder of images, a .npy or a .npz file; got none.")
    form = Form(None if size is None else (size, size), crop, channels, 256 if levels is None else levels)
    own = read_own(expand_home(path), form, progress, skip_broken=skip_broken)
    rows, labels = own.rows, own.labels
    order = torch.randperm(len(rows), generator=generator)
    data = replace(split(rows[order], validation, test), levels=form.levels, kind="images")
    if labels is None:
        return data
    parts = split(labels[order], validation, test)
    classes = len(own.class_names) or int(labels.max()) + 1
    known = (parts.train, parts.validation, parts.test)
    return replace(data, labels=known, classes=classes, class_names=own.class_names)


def _published(name: str, folder: Path | None, progress: Progress | None) -> Dataset:
    return load_cifar10(folder, progress) if name == "cifar10" else load_mnist(name, folder, progress)
