"""Images side by side, pixel for pixel."""

from __future__ import annotations

import math
from pathlib import Path
from typing import IO, TYPE_CHECKING

import numpy as np
from torch import Tensor

from expmflow._validation import expect
from expmflow.data.form import pillow

if TYPE_CHECKING:
    from PIL.Image import Image

TILE = 64  # small images are enlarged to about this many pixels
GAP = 2
BACKGROUND = 255
MOST_CLASSES = 20  # the most classes with a column of their own


def image_grid(images: Tensor, levels: int, *, columns: int | None = None) -> Image:
    """`(n, C, h, w)` integers below `levels` as one picture: black is 0, white is `levels` − 1, small ones enlarged.

    Args:
        images: with one channel or three.
        levels: the number of grey levels.
        columns: images in a line; if None, the grid is about square.
    """
    count, channels, height, width = images.shape
    expect(channels in (1, 3), "images of 1 or 3 channels for a picture", f"{channels} channels")
    expect(count > 0, "at least one image for a picture", "none")
    columns = min(columns or math.ceil(math.sqrt(count)), count)
    lines, factor = math.ceil(count / columns), max(1, math.ceil(TILE / max(height, width)))
    grey = (images.numpy().astype(np.int64) * 255 + (levels - 1) // 2) // (levels - 1)
    tiles = grey.astype(np.uint8).repeat(factor, 2).repeat(factor, 3).transpose(0, 2, 3, 1)
    height, width = factor * height, factor * width
    size = (lines * (height + GAP) + GAP, columns * (width + GAP) + GAP, channels)
    page = np.full(size, BACKGROUND, dtype=np.uint8)
    for k, tile in enumerate(tiles):
        top, left = GAP + k // columns * (height + GAP), GAP + k % columns * (width + GAP)
        page[top : top + height, left : left + width] = tile
    return pillow().fromarray(page.squeeze(2) if channels == 1 else page)


def class_columns(classes: int | None, count: int) -> int | None:
    """A column for each class, for images whose classes alternate, if that makes a grid."""
    return classes if classes is not None and 1 < classes <= min(MOST_CLASSES, count) else None


def save_grid(grid: Image, target: Path | IO[bytes]) -> None:
    """Save as PNG, whatever the file's suffix."""
    grid.save(target, format="PNG")
