"""CIFAR-10, in its own binary file format.

A file is 10,000 records of 3073 bytes: the label, then a 32×32 image as red, green and blue planes.
"""

from __future__ import annotations

import tarfile
import tempfile
import zlib
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from expmflow.data.dataset import Dataset
from expmflow.data.download import Progress, cache_folder, compare, download, user_folder
from expmflow.data.errors import DataError, first_line

HOME = "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"
PACKED = "c32a1d4ab5d03f1284b67883e8d87530"
FOLDER = "cifar-10-batches-bin"
FILES = {
    "data_batch_1.bin": "5dd7e06a14cb22eb9f671a540d1b7c25",
    "data_batch_2.bin": "5ea93a67294ea407fff1d09f752e9692",
    "data_batch_3.bin": "942cd6a4bcdd0dd3c604fbe906cb4421",
    "data_batch_4.bin": "ae636b3ba5c66a11e91e8cb52e771fcb",
    "data_batch_5.bin": "53f37980c15c3d472c316c40844f3f0d",
    "test_batch.bin": "803d5f7f4d78ea53de84dbe85f74fb6d",
}
ROWS = 10_000
SHAPE = (3, 32, 32)
RECORD = 1 + 3 * 32 * 32
CLASSES = 10


def load_cifar10(folder: Path | None = None, progress: Progress | None = None) -> Dataset:
    """The paper's split: the first 40,000 images for training, the next 10,000 for validation, and the test."""
    own = user_folder(folder)
    place = _downloaded(progress) if own is None else own / FOLDER
    batches = [read_batch(place / name, md5=md5) for name, md5 in FILES.items()]
    images, labels = zip(*batches, strict=True)
    return Dataset(
        torch.cat(images[:4]),
        images[4],
        images[5],
        labels=(torch.cat(labels[:4]), labels[4], labels[5]),
        classes=CLASSES,
        levels=256,
        kind="images",
    )


def read_batch(path: Path, *, rows: int = ROWS, md5: str | None = None) -> tuple[Tensor, Tensor]:
    """The `(rows, 3, 32, 32)` images and the labels of one file."""
    if not path.is_file():
        raise DataError(f"Expected the file {path}, of the binary version of CIFAR-10; got none.")
    size = path.stat().st_size
    if size != rows * RECORD:
        raise DataError(f"Expected {rows} records of {RECORD} bytes in {path}; got {size} bytes.")
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DataError(f"Expected to read {path}; got: {error.strerror}.") from None
    records = np.frombuffer(content, np.uint8).reshape(rows, RECORD)
    labels = records[:, 0]
    if labels.max() >= CLASSES:
        row = int(np.argmax(labels >= CLASSES))
        raise DataError(f"Expected labels from 0 to {CLASSES - 1} in {path}; got {labels[row]} in record {row + 1}.")
    if md5 is not None:
        compare(path, content, md5)
    images = torch.from_numpy(records[:, 1:].copy()).reshape(rows, *SHAPE)
    return images, torch.from_numpy(labels.astype(np.int64))


def _downloaded(progress: Progress | None) -> Path:
    """The folder of the files in the cache, downloaded and unpacked if necessary."""
    cache = cache_folder()
    place = cache / FOLDER
    if all((place / name).is_file() and (place / name).stat().st_size == ROWS * RECORD for name in FILES):
        return place
    archive = download(HOME, PACKED, cache / "cifar-10-binary.tar.gz", progress)
    try:
        unpack(archive, place)
    except (OSError, EOFError, KeyError, tarfile.TarError, zlib.error) as error:
        raise DataError(f"Expected to unpack {archive} to {place}; got: {first_line(error)}.") from None
    return place


def unpack(archive: Path, place: Path) -> None:
    """Write the six files to `place`; each gets its name when it is complete."""
    place.mkdir(parents=True, exist_ok=True)
    with tarfile.open(archive) as tar, tempfile.TemporaryDirectory(dir=place) as unfinished:
        for name in FILES:
            member = tar.extractfile(f"{FOLDER}/{name}")
            if member is None:
                raise KeyError(f"{FOLDER}/{name} is no file")
            path = Path(unfinished, name)
            path.write_bytes(member.read())
            path.replace(place / name)
