"""One image file as an array of bytes, whatever its format."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from expmflow.data.errors import DataError, first_line
from expmflow.data.form import Form, pillow

if TYPE_CHECKING:
    from PIL.Image import Image

SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff")
FORMATS = ("PNG", "JPEG", "BMP", "GIF", "WEBP", "TIFF")  # other formats may start programs
ORIENTATION = 0x0112


def read_picture(path: Path, form: Form) -> np.ndarray:
    """`(h, w)` or `(h, w, 3)` bytes of an image file.

    The image is rotated by its EXIF data, and transparent parts become white. Palettes and other colour spaces become
    RGB. 16-bit grey levels are scaled to 8 bits, by the whole range of 16 bits; floats and 32-bit integers are refused.
    Of an animation or of several pages, the first is taken.
    """
    image_module = pillow()
    if not path.is_file():  # opening a pipe would wait for a writer
        raise DataError(f"Expected an image in {path}; got no regular file.")
    try:
        with image_module.open(path, formats=FORMATS) as image:
            if form.size is not None:  # lets the decoder of a large JPEG skip what would be averaged away
                image.draft(None, (2 * max(form.size), 2 * max(form.size)))
            plain = _plain(_turned(image), path)
        _expect_levels(plain, form.levels, path)
        return form.apply(plain)
    except DataError:
        raise
    except image_module.UnidentifiedImageError:
        raise DataError(f"Expected an image in {path}; got no format that is known ({', '.join(FORMATS)}).") from None
    except (image_module.DecompressionBombError, image_module.DecompressionBombWarning):
        most = image_module.MAX_IMAGE_PIXELS
        raise DataError(f"Expected an image of at most {most} pixels in {path}; got a larger one.") from None
    except Exception as error:  # decoders raise errors of every kind for damaged files
        raise DataError(f"Expected a whole image in {path}; got: {first_line(error)}.") from None


@contextmanager
def strict_pillow() -> Iterator[None]:
    """A context in which images with too many pixels are errors, and other warnings are silenced.

    Warning filters are global to the process, so this is entered once, around all threads.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.simplefilter("error", pillow().DecompressionBombWarning)
        yield


def _turned(image: Image) -> Image:
    transpose = pillow().Transpose
    turns = {
        2: transpose.FLIP_LEFT_RIGHT,
        3: transpose.ROTATE_180,
        4: transpose.FLIP_TOP_BOTTOM,
        5: transpose.TRANSPOSE,
        6: transpose.ROTATE_270,
        7: transpose.TRANSVERSE,
        8: transpose.ROTATE_90,
    }
    turn = turns.get(image.getexif().get(ORIENTATION, 1))
    return image if turn is None else image.transpose(turn)


def _plain(image: Image, path: Path) -> Image:
    """The image in mode L or RGB."""
    image.load()
    if image.mode.startswith("I;16") or (image.mode == "I" and image.format == "PNG"):  # as older Pillows open them
        nearest = ((np.arange(65536) + 128) // 257).astype(np.uint8)
        return pillow().fromarray(nearest.take(np.asarray(image), mode="clip"))
    if image.mode in ("I", "F"):
        kind = "floats" if image.mode == "F" else "32-bit integers"
        raise DataError(f"Expected an image of 8 or 16 bits in {path}; got {kind}.")
    grey = image.mode in ("1", "L", "LA", "La")
    if image.has_transparency_data:
        solid = image.convert("LA" if image.mode == "La" else image.mode).convert("RGBA")
        image = pillow().alpha_composite(pillow().new("RGBA", solid.size, "white"), solid)
    return image.convert("L" if grey else "RGB")


def _expect_levels(image: Image, levels: int, path: Path) -> None:
    if levels < 256:
        largest = int(np.asarray(image).max())
        if largest >= levels:
            raise DataError(f"Expected grey levels from 0 to {levels - 1} in {path}; got {largest}.")
