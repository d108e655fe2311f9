"""The handwritten digits that ship with scikit-learn: 1797 images of 8×8 in 17 grey levels."""

from __future__ import annotations

import numpy as np
import torch

from expmflow.data.dataset import Dataset

LEVELS = 17
CLASSES = 10
PERIOD = 7


def load_digits() -> Dataset:
    """1290 images for training, 255 for validation and 252 for the test, the same in every run.

    Of every seven images of a class, in the order of the file, the first five are for training, the sixth is for
    validation and the seventh for the test. So every split has about as many images of each class.
    """
    try:
        from sklearn import datasets
    except ImportError as error:
        raise ImportError("Expected scikit-learn for the digits; got none. Install the extra `train`.") from error
    found = datasets.load_digits()
    images = torch.from_numpy(found.images.astype(np.uint8)).unsqueeze(1)
    labels = torch.from_numpy(found.target.astype(np.int64))
    one_hot = torch.nn.functional.one_hot(labels, CLASSES)
    earlier = one_hot.cumsum(0)[torch.arange(len(labels)), labels] - 1  # earlier images of the same class
    turn = earlier % PERIOD
    parts = (turn < PERIOD - 2, turn == PERIOD - 2, turn == PERIOD - 1)
    train, validation, test = (images[part] for part in parts)
    return Dataset(
        train,
        validation,
        test,
        labels=(labels[parts[0]], labels[parts[1]], labels[parts[2]]),
        classes=CLASSES,
        levels=LEVELS,
        kind="images",
    )
