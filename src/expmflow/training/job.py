"""What stays the same while a run is trained: its data, its place, its randomness, and who watches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from expmflow.data import Dataset
from expmflow.distributions import Density
from expmflow.training.build import DTYPES, class_context
from expmflow.training.config import Config
from expmflow.training.distributed import Processes
from expmflow.training.randomness import Randomness
from expmflow.training.run import RunFolder
from expmflow.transforms import keyed_draws

Report = Callable[[dict[str, Any]], None]
OnSamples = Callable[[int, Tensor], None]
OnStep = Callable[[int], None]


@dataclass
class Run:
    """The fixed surroundings of the loop."""

    config: Config
    data: Dataset
    folder: RunFolder
    among: Processes
    device: torch.device
    report: Report = lambda record: None
    on_samples: OnSamples = lambda step, samples: None
    on_step: OnStep = lambda step: None
    randomness: Randomness = field(init=False)

    def __post_init__(self) -> None:
        self.randomness = Randomness(self.config.train.seed)

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES[self.config.train.precision]

    @property
    def steps_per_epoch(self) -> int:
        return max(1, len(self.data.train) // self.config.train.batch_size)

    def record(self, record: dict[str, Any]) -> None:
        """Into the metrics, and to whoever watches; one process speaks for all."""
        if self.among.writes:
            self.folder.append_metrics(record)
            self.report(record)

    def rows(self, rows: Tensor) -> Tensor:
        return rows.to(self.device, self.dtype if rows.is_floating_point() else rows.dtype)

    def batch(self, step: int) -> tuple[Tensor, Tensor | None]:
        """This process's rows of a training step, and their context."""
        size, labels = self.config.train.batch_size, None
        if self.data.draw is not None:
            return self.rows(self.among.slice(self.data.draw(size, self.randomness.generator("data", step)))), None
        chosen = self.among.slice(self.randomness.batch(step, len(self.data.train), size))
        x = self.data.train[chosen]
        if self.config.data.flip:
            turned = self.among.slice(self.randomness.noise("uniform", (size,), "flip", step)) < 0.5
            x = torch.where(turned[:, None, None, None], x.flip(3), x)
        if self.config.data.shift:
            drawn = self.among.slice(self.randomness.noise("uniform", (size, 2), "shift", step))
            x = shifted(x, drawn, self.config.data.shift)
        if self.data.labels is not None:
            labels = self.data.labels[0][chosen]
        return self.rows(x), self.context(labels)

    def context(self, labels: Tensor | None) -> Tensor | None:
        """What the model is told of the rows with these labels."""
        told = class_context(labels, getattr(self.config.model, "classes", None), self.dtype)
        return None if told is None else told.to(self.device)

    def noise(self, model: Density, rows: int, label: str, counter: int) -> tuple[Tensor, ...]:
        """The random numbers that a global batch takes."""
        drawn = self.randomness.draws(model.draws, rows, label, counter)
        return tuple(part.to(self.device, self.dtype) for part in drawn)

    def layer_draws(
        self, model: Density, rows: Sequence[int], label: str, counter: int
    ) -> AbstractContextManager[None]:
        """Within, what layers draw for these rows of a global batch follows from the seed, as the noise does."""
        return keyed_draws(model, f"{self.randomness.seed}:{label}:{counter}", rows)


def shifted(images: Tensor, uniform: Tensor, most: int) -> Tensor:
    """Images moved by −`most` to `most` pixels along both axes, as `(batch, 2)` numbers in [0, 1) say.

    What comes in at the edges are copies of them.
    """
    _, _, height, width = images.shape
    moved = (uniform * (2 * most + 1)).long() - most
    rows = (torch.arange(height) - moved[:, :1]).clamp(0, height - 1)
    columns = (torch.arange(width) - moved[:, 1:]).clamp(0, width - 1)
    batch = torch.arange(len(images))[:, None, None]
    return images.movedim(1, -1)[batch, rows[:, :, None], columns[:, None, :]].movedim(-1, 1)
