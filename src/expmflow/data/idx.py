"""MNIST and Fashion-MNIST, in their own file format.

An IDX file of bytes starts with 0, 0, 8 and the number of its dimensions, then the dimensions as big-endian integers of
four bytes, then the values.
"""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from expmflow.data.dataset import Dataset
from expmflow.data.download import Progress, cache_folder, compare, download, user_folder
from expmflow.data.errors import DataError, first_line

CLASSES = 10
VALIDATION = 10_000


HOMES = {
    "mnist": "https://ossci-datasets.s3.amazonaws.com/mnist/",
    "fashion-mnist": "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
}
SHAPES = {
    "train-images-idx3-ubyte": (60_000, 28, 28),
    "train-labels-idx1-ubyte": (60_000,),
    "t10k-images-idx3-ubyte": (10_000, 28, 28),
    "t10k-labels-idx1-ubyte": (10_000,),
}
# The md5 of each .gz file, and of its content.
CHECKSUMS = {
    "mnist": {
        "train-images-idx3-ubyte": ("f68b3c2dcbeaaa9fbdd348bbdeb94873", "6bbc9ace898e44ae57da46a324031adb"),
        "train-labels-idx1-ubyte": ("d53e105ee54ea40749a09fcbcd1e9432", "a25bea736e30d166cdddb491f175f624"),
        "t10k-images-idx3-ubyte": ("9fb629c4189551a2d022fa330f9573f3", "2646ac647ad5339dbf082846283269ea"),
        "t10k-labels-idx1-ubyte": ("ec29112dd5afa0611ce80d1b7f02629c", "27ae3e4e09519cfbb04c329615203637"),
    },
    "fashion-mnist": {
        "train-images-idx3-ubyte": ("8d4fb7e6c68d591d4c3dfef9ec88bf0d", "f4a8712d7a061bf5bd6d2ca38dc4d50a"),
        "train-labels-idx1-ubyte": ("25c81989df183df01b3e8a0aad5dffbe", "9018921c3c673c538a1fc5bad174d6f9"),
        "t10k-images-idx3-ubyte": ("bef4ecab320f06d8554ea6380940ec79", "8181f5470baa50b63fa0f6fddb340f0a"),
        "t10k-labels-idx1-ubyte": ("bb300cfdad3c16e7a12a480ee83cd310", "15d484375f8d13e6eb1aabb0c3f46965"),
    },
}


def load_mnist(name: str, folder: Path | None = None, progress: Progress | None = None) -> Dataset:
    """`mnist` or `fashion-mnist`: the first 50,000 images for training, the next 10,000 for validation, and the
    test."""
    images, labels, test_images, test_labels = (_load(name, file, folder, progress) for file in SHAPES)
    return Dataset(
        images[:-VALIDATION].unsqueeze(1),
        images[-VALIDATION:].unsqueeze(1),
        test_images.unsqueeze(1),
        labels=(labels[:-VALIDATION].long(), labels[-VALIDATION:].long(), test_labels.long()),
        classes=CLASSES,
        levels=256,
        kind="images",
    )


def read_idx(path: Path, shape: tuple[int, ...], *, md5: str | None = None) -> Tensor:
    """Bytes of a shape that is known in advance, from a file that may be compressed by gzip (`.gz`)."""
    header = struct.pack(f">4B{len(shape)}I", 0, 0, 8, len(shape), *shape)
    size = len(header) + math.prod(shape)
    try:
        with gzip.open(path) if path.suffix == ".gz" else open(path, "rb") as file:
            content = file.read(size + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"Expected a whole file in {path}; got: {first_line(error)}.") from None
    sizes = "×".join(map(str, shape))
    if not content.startswith(header):
        raise DataError(f"Expected an IDX file of {sizes} bytes in {path}; got another header.")
    if len(content) != size:
        more = "fewer" if len(content) < size else "more"
        raise DataError(f"Expected {sizes} bytes after the header of {path}; got {more}.")
    if md5 is not None:
        compare(path, content, md5)
    values = np.frombuffer(content, np.uint8, offset=len(header)).reshape(shape)
    return torch.from_numpy(values.copy())  # a copy, because tensors must be writable


def _load(name: str, file: str, folder: Path | None, progress: Progress | None) -> Tensor:
    packed, content = CHECKSUMS[name][file]
    own = user_folder(folder)
    if own is None:
        path = download(f"{HOMES[name]}{file}.gz", packed, cache_folder() / name / f"{file}.gz", progress)
    else:
        path = _packed_or_not(own / name / file)
    values = read_idx(path, SHAPES[file], md5=content)
    if values.ndim == 1 and int(values.max()) >= CLASSES:
        raise DataError(f"Expected labels from 0 to {CLASSES - 1} in {path}; got {int(values.max())}.")
    return values


def _packed_or_not(path: Path) -> Path:
    packed = path.with_name(f"{path.name}.gz")
    for found in (packed, path):
        if found.is_file():
            return found
    raise DataError(f"Expected the file {packed}, or the same without .gz; got none.")
