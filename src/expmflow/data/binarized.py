"""MNIST in black and white: each pixel is white with the probability of its grey level.

Static: drawn once. If the folder `binarized-mnist` has the published files of Larochelle, `binarized_mnist_train.amat`,
`…_valid` and `…_test`, they are read; otherwise MNIST itself is drawn from, always with the same seed. Dynamic:
training images are redrawn whenever they are used. Validation and test are drawn once from MNIST, as above, and never
read from those files, which do not say which images of MNIST they are.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from expmflow.data.dataset import Dataset
from expmflow.data.download import Progress, user_folder
from expmflow.data.errors import DataError
from expmflow.data.idx import load_mnist

KIND = "binary images"
SEED = 2020
PIXELS = 28 * 28
PUBLISHED = {"train": 50_000, "valid": 10_000, "test": 10_000}


def load_binarized(folder: Path | None = None, progress: Progress | None = None, *, dynamic: bool = False) -> Dataset:
    """Zeros and ones in uint8, `(rows, 1, 28, 28)`: 50,000 for training, 10,000 for validation, 10,000 for the test.

    Args:
        folder: as for `load_images`.
        progress: called during downloads.
        dynamic: whether training images are redrawn for each step.
    """
    static = None if dynamic else _published(folder)
    if static is not None:
        return static
    grey = load_mnist("mnist", folder, progress)
    generator = torch.Generator().manual_seed(SEED)
    train, validation, test = (binarize(part, generator) for part in (grey.train, grey.validation, grey.test))
    data = replace(grey, train=train, validation=validation, test=test, levels=2, kind=KIND)

    def draw(rows: int, generator: torch.Generator) -> Tensor:
        chosen = torch.randint(len(grey.train), (rows,), generator=generator)
        return binarize(grey.train[chosen], generator)

    return replace(data, draw=draw) if dynamic else data


def binarize(grey: Tensor, generator: torch.Generator) -> Tensor:
    """1 with the probability of the grey level over 255, else 0, in uint8."""
    return (torch.rand(grey.shape, generator=generator) * 255 < grey).to(torch.uint8)


def _published(folder: Path | None) -> Dataset | None:
    """The published files, or None if there are none."""
    own = user_folder(folder)
    if own is None:
        return None
    paths = {part: own / "binarized-mnist" / f"binarized_mnist_{part}.amat" for part in PUBLISHED}
    missing = [path for path in paths.values() if not path.is_file()]
    if len(missing) == len(paths):
        return None
    if missing:
        raise DataError(f"Expected all three files of the published binarized MNIST; got no {missing[0]}.")
    parts = {part: read_amat(path, PUBLISHED[part]) for part, path in paths.items()}
    return Dataset(parts["train"], parts["valid"], parts["test"], levels=2, kind=KIND)


def read_amat(path: Path, rows: int) -> Tensor:
    """Zeros and ones as text, one line per image."""
    content = np.frombuffer(path.read_bytes(), np.uint8)
    digits = content[content > ord(" ")] - ord("0")
    if len(digits) != rows * PIXELS or digits.max(initial=0) > 1:  # characters below "0" become numbers beyond 1, too
        what = "other characters" if digits.max(initial=0) > 1 else f"{len(digits)} digits"
        raise DataError(f"Expected {rows:,} lines of {PIXELS} zeros and ones in {path}; got {what}.")
    return torch.from_numpy(digits.reshape(rows, 1, 28, 28).copy())
