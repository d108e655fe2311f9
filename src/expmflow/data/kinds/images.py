"""Images: integer grey levels, `(channels, height, width)`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from expmflow.data.dataset import Dataset
from expmflow.data.download import Progress
from expmflow.data.drawing.grids import image_grid, save_grid
from expmflow.data.images import load_images
from expmflow.data.kinds.base import (
    Augmentation,
    Description,
    Generators,
    Kind,
    Layout,
    Picture,
    Rows,
    Source,
    Unit,
    bits_per_dimension,
    expect_axes,
)
from expmflow.data.kinds.vectors import array_axes
from expmflow.data.own import load_image_files

MOST_CLASSES = 50  # in a description
OWN = ("path", "size", "crop", "channels", "skip_broken", "validation", "test")
CHANGES = ("flip", "shift")  # of training rows


class Images(Kind):
    """Bytes of shape (channels, height, width), below a number of grey levels."""

    name: ClassVar[str] = "images"
    models: ClassVar[tuple[str, ...]] = ("image", "vae")
    files: ClassVar[str] = "images, folders of them, .npy or .npz files"
    formats: ClassVar[tuple[str, ...]] = (".png", ".npy")
    default_file: ClassVar[Path | None] = Path("samples.png")
    takes_fit: ClassVar[bool] = True
    shown_samples: ClassVar[int] = 64
    report_rows: ClassVar[int] = 36
    measured_rows: ClassVar[int] = 500
    report_checked: ClassVar[int] = 64
    extremes: ClassVar[int] = 18

    def __init__(self) -> None:
        self.sources: Mapping[str, Source] = {
            "digits": Source(partial(_load, "digits"), (), "scikit-learn"),
            "mnist": Source(partial(_load, "mnist"), ("dir",), "the user's cache or the network"),
            "fashion-mnist": Source(partial(_load, "fashion-mnist"), ("dir",), "the user's cache or the network"),
            "cifar10": Source(partial(_load, "cifar10"), ("dir",), "the user's cache or the network"),
            "images": Source(partial(_load, "images"), OWN, "a folder, .npy or .npz of images"),
        }
        self.augmentations: Mapping[str, Augmentation] = {
            "flip": Augmentation((), flipped),
            "shift": Augmentation((2,), shifted),
        }

    def check_event_shape(self, event_shape: tuple[int, ...]) -> None:
        expect_axes(event_shape, 3, "images of shape (channels, height, width)")

    def unit(self, event_shape: tuple[int, ...]) -> Unit:
        return bits_per_dimension(event_shape)

    def read(self, files: Sequence[Path], layout: Layout, *, fit: bool, progress: Progress | None) -> Rows:
        """With `fit`, values go from 0 to 255, whatever the levels of the model are."""
        settings, shape, levels = layout.settings, layout.event_shape, layout.levels or 256
        form: dict[str, Any] = {"size": settings.get("size"), "channels": settings.get("channels"), "levels": levels}
        if fit:
            form = {"size": shape[1], "channels": "grey" if shape[0] == 1 else "rgb"}
        form |= {"crop": settings.get("crop", True), "skip_broken": settings.get("skip_broken", False)}
        rows, names = load_image_files(files, shape, progress=progress, **form)
        rows = (rows.int() * levels // 256).to(torch.uint8) if fit else rows
        return Rows(rows, names, [1] * len(names))

    def own_source(self, path: Path) -> str | None:
        suffix = path.suffix.lower()
        arrays = suffix == ".npz" or (suffix == ".npy" and array_axes(path) >= 3)
        return "images" if path.is_dir() or arrays else None

    def describe(self, title: str, source: str, path: Path | None, load: Callable[[], Dataset]) -> Description:
        data = load()
        parts = {"training": data.train, "validation": data.validation, "test": data.test}
        channels, height, width = data.event_shape
        least, largest = int(data.train.min()), int(data.train.max())
        colour = "grey" if channels == 1 else f"{channels} channels"
        lines = [
            ("shape (channels, height, width)", f"{data.event_shape}, {colour}"),
            ("grey levels", f"{data.levels}; in the training images from {least} to {largest}"),
            ("rows", ", ".join(f"{len(rows)} {name}" for name, rows in parts.items())),
            _classes(data),
        ]
        notes = [
            f"Models of images halve the {name} at each level; {length} is odd: data.size brings them to another."
            for length, name in ((height, "height"), (width, "width"))
            if length % 2
        ]
        return Description(f"{title}: {sum(map(len, parts.values()))} images", lines, notes=tuple(notes))

    def array(self, rows: Tensor) -> Tensor:
        return rows.to(torch.uint8)

    def scored(self, rows: Rows, log_prob: Tensor, layout: Layout) -> dict[str, list[Any]]:
        bits = -log_prob * bits_per_dimension(layout.event_shape).per_nat
        return {"name": rows.names, "bpd": bits.tolist()}

    def draw(
        self, samples: Tensor, layout: Layout, *, data: Tensor | None = None, columns: int | None = None
    ) -> Picture:
        """A grid, pixel for pixel, without the data."""
        levels = layout.levels or 256
        return Picture(lambda target: save_grid(image_grid(samples, levels, columns=columns), target))

    def compare(
        self,
        samples: Tensor,
        data: Tensor,
        layout: Layout,
        *,
        columns: int | None = None,
        density: Tensor | None = None,
    ) -> list[Picture]:
        parts = {"data": data, "samples of the model": samples}
        return [
            Picture(self.draw(images, layout, columns=columns).write, f"{what} ({len(images)} images)")
            for what, images in parts.items()
        ]

    def reconstructions(
        self, rows: Tensor, expected: Tensor, path: Tensor, layout: Layout, *, part: str = "test"
    ) -> list[Picture]:
        columns = min(len(rows), 12)
        whole = range(0, len(rows) - columns + 1, columns)
        lines = torch.cat([_bytes(part[k : k + columns], layout) for k in whole for part in (rows, expected)])
        finer = replace(layout, levels=256)
        return [
            Picture(
                self.draw(lines, finer, columns=columns).write, f"{part} images, and below them their reconstructions"
            ),
            Picture(
                self.draw(_bytes(path, layout), finer, columns=len(path)).write,
                f"on the way between the first two {part} images",
            ),
        ]


def _bytes(images: Tensor, layout: Layout) -> Tensor:
    """Images of any scale, mapped to 0 … 255; values between grey levels are allowed."""
    return (images.double() * (255 / ((layout.levels or 256) - 1))).round().clamp(0, 255).to(torch.uint8)


def _load(
    name: str, *, generator: Generators, progress: Progress | None, dir: Path | None = None, **own: Any
) -> Dataset:
    return load_images(name, folder=dir, generator=generator("split"), progress=progress, **own)


def _classes(data: Dataset) -> tuple[str, str]:
    if data.labels is None:
        return "classes", "none"
    counts = sum((part.bincount(minlength=data.classes) for part in data.labels), start=data.labels[0].new_zeros(1))
    listed = [f"{data.class_name(k)}: {int(count)}" for k, count in enumerate(counts[:MOST_CLASSES])]
    return f"classes: {data.classes}", ", ".join(listed) + (", …" if data.classes > MOST_CLASSES else "")


def flipped(images: Tensor, uniform: Tensor, asked: bool, train: Tensor) -> Tensor:
    """Mirror half of the images left to right: those whose number in [0, 1) is below ½."""
    return torch.where((uniform < 0.5)[:, None, None, None], images.flip(3), images)


def shifted(images: Tensor, uniform: Tensor, most: int, train: Tensor) -> Tensor:
    """Shift images by −`most` to `most` pixels along both axes, following `(batch, 2)` numbers in [0, 1).

    New pixels at the edges are copies of the edge.
    """
    _, _, height, width = images.shape
    moved = (uniform * (2 * most + 1)).long() - most
    rows = (torch.arange(height) - moved[:, :1]).clamp(0, height - 1)
    columns = (torch.arange(width) - moved[:, 1:]).clamp(0, width - 1)
    batch = torch.arange(len(images))[:, None, None]
    return images.movedim(1, -1)[batch, rows[:, :, None], columns[:, None, :]].movedim(-1, 1)
