"""Images of zeros and ones, whose likelihoods the literature gives in nats."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, final

from torch import Tensor

from expmflow.data.binarized import load_binarized
from expmflow.data.dataset import Dataset
from expmflow.data.download import Progress
from expmflow.data.kinds.base import NATS, Augmentation, Generators, Layout, Rows, Source, Unit
from expmflow.data.kinds.images import Images


@final
class BinaryImages(Images):
    """Bytes of shape (channels, height, width) that are 0 or 1."""

    name: ClassVar[str] = "binary images"

    def __init__(self) -> None:
        origin = "MNIST from the user's cache or the network, drawn from"
        self.sources: Mapping[str, Source] = {
            "binarized-mnist": Source(_load, ("dir",), f"{origin} once"),
            "dynamic-mnist": Source(partial(_load, dynamic=True), ("dir",), f"{origin} at every step"),
        }
        self.augmentations: Mapping[str, Augmentation] = {}

    def unit(self, event_shape: tuple[int, ...]) -> Unit:
        return NATS

    def units(self, event_shape: tuple[int, ...]) -> tuple[Unit, ...]:
        return (NATS,)

    def scored(self, rows: Rows, log_prob: Tensor, layout: Layout) -> dict[str, list[Any]]:
        return {"name": rows.names, "nll": (-log_prob).tolist()}

    def own_source(self, path: Path) -> str | None:
        return None


def _load(*, generator: Generators, progress: Progress | None, dir: Path | None, dynamic: bool = False) -> Dataset:
    return load_binarized(dir, progress, dynamic=dynamic)
