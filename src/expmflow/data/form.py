"""The form that images are brought to: one size, one number of channels, one range of grey levels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from expmflow._validation import expect, expect_count

if TYPE_CHECKING:
    from PIL.Image import Image

Channels = Literal["rgb", "grey"]


@dataclass(frozen=True)
class Form:
    """How an image becomes a row.

    Args:
        size: the height and the width; unchanged if None.
        crop: whether to reach `size` by cutting the largest part of that shape out of the centre and scaling it;
            otherwise the whole image is squashed. Scaling is bicubic, over all pixels that a new one covers.
        channels: "rgb" or "grey"; unchanged if None.
        levels: all values are below this.
    """

    size: tuple[int, int] | None = None
    crop: bool = True
    channels: Channels | None = None
    levels: int = 256

    def __post_init__(self) -> None:
        for length in self.size or ():
            expect_count(length, "data.size")
        expect(self.channels in (None, "rgb", "grey"), "data.channels to be rgb or grey", repr(self.channels))
        expect_count(self.levels, "data.levels", at_least=2)
        expect(self.levels <= 256, "data.levels of at most 256", self.levels)

    def apply(self, image: Image) -> np.ndarray:
        """`(h, w)` or `(h, w, 3)` bytes of an image in mode L or RGB with values below `levels`."""
        if self.channels is not None:
            image = image.convert("RGB" if self.channels == "rgb" else "L")
        if self.size is None or image.size == self.size[::-1]:
            return np.array(image)
        scaled = image.resize(self.size[::-1], pillow().Resampling.BICUBIC, box=self._box(image))
        return np.minimum(np.array(scaled), np.uint8(self.levels - 1))  # cubics overshoot

    def _box(self, image: Image) -> tuple[float, float, float, float]:
        if self.size is None or not self.crop:
            return 0, 0, image.width, image.height
        scale = min(image.height / self.size[0], image.width / self.size[1])
        height, width = min(scale * self.size[0], image.height), min(scale * self.size[1], image.width)
        left, top = (image.width - width) / 2, (image.height - height) / 2
        return left, top, min(left + width, image.width), min(top + height, image.height)


def pillow() -> Any:
    """`PIL.Image`; raises with advice if it is not installed."""
    try:
        from PIL import Image
    except ImportError as error:
        raise ImportError("Expected Pillow to read images; got none. Install the extra `train`.") from error
    return Image
