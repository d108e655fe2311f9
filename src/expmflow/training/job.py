"""What stays constant during a training: its data, folder, randomness, and observers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from expmflow.data import Dataset
from expmflow.data.kinds import KINDS
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
    """The constant part of a training run."""

    config: Config
    data: Dataset
    folder: RunFolder
    among: Processes
    device: torch.device
    report: Report = lambda record: None
    on_samples: OnSamples = lambda step, samples: None
    on_step: OnStep = lambda step: None
    randomness: Randomness = field(init=False)
    row_dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        self.randomness = Randomness(self.config.train.seed)

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES[self.config.train.precision]

    @property
    def steps_per_epoch(self) -> int:
        return max(1, len(self.data.train) // self.config.train.batch_size)

    def record(self, record: dict[str, Any]) -> None:
        """Write a record to the metrics, and pass it to the observer; only one process does."""
        if self.among.writes:
            self.folder.append_metrics(record)
            self.report(record)

    def rows(self, rows: Tensor) -> Tensor:
        return rows.to(self.device, (self.row_dtype or self.dtype) if rows.is_floating_point() else rows.dtype)

    def batch(self, step: int) -> tuple[Tensor, Tensor | None]:
        """This process's rows of a training step, and their context."""
        size, labels = self.config.train.batch_size, None
        if self.data.draw is not None:
            return self.rows(self.among.slice(self.data.draw(size, self.randomness.generator("data", step)))), None
        chosen = self.among.slice(self.randomness.batch(step, len(self.data.train), size))
        x = self.data.train[chosen]
        for setting, change in KINDS[self.data.kind].augmentations.items():
            if value := getattr(self.config.data, setting):
                drawn = self.randomness.noise("uniform", (size, *change.shape), setting, step)
                x = change.apply(x, self.among.slice(drawn), value, self.data.train)
        if self.data.labels is not None:
            labels = self.data.labels[0][chosen]
        return self.rows(x), self.context(labels)

    def context(self, labels: Tensor | None) -> Tensor | None:
        """The model's context for rows with these labels."""
        context = class_context(labels, getattr(self.config.model, "classes", None), self.dtype)
        return None if context is None else context.to(self.device)

    def noise(self, model: Density, rows: int, label: str, counter: int) -> tuple[Tensor, ...]:
        """The random numbers that a global batch takes."""
        drawn = self.randomness.draws(model.draws, rows, label, counter)
        return tuple(part.to(self.device, self.dtype) for part in drawn)

    def layer_draws(
        self, model: Density, rows: Sequence[int], label: str, counter: int
    ) -> AbstractContextManager[None]:
        """A context in which the layers' random numbers for these rows of a global batch follow from the seed."""
        return keyed_draws(model, f"{self.randomness.seed}:{label}:{counter}", rows)
