"""Layers that start from the first batch they see in training, and the moments of that batch."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from expmflow.transforms.base import Transform


class DataStart(Transform):
    """A layer whose parameters the first batch in training sets; whether one has is part of its state."""

    initialised: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("initialised", torch.zeros((), dtype=torch.bool))
        self._ready: bool | None = None  # what the buffer says, without reading it at every step

    def _waits_for_data(self) -> bool:
        """Whether the batch at hand is the one to start from."""
        if self.training and self._ready is None:
            self._ready = bool(self.initialised)
        return self.training and not self._ready

    def _has_started(self) -> None:
        self.initialised.fill_(True)
        self._ready = True

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self._ready = None


def centred(rows: Tensor) -> tuple[Tensor, Tensor, float]:
    """`(n, d)` rows in float64 less their mean, that mean, and their number; mean and number over all processes.

    Moments are to be taken of what is centred: far from zero, a difference of moments has no digit left of the spread.
    Rows with NaN or infinity among them count as none: a layer that started from them could never recover.
    """
    rows = rows.double()
    count = float(sum_over_processes(rows.new_tensor(float(len(rows)))))
    mean = rows.new_zeros(rows.shape[1])
    for _ in range(2 if count else 0):  # the second finds what rounding left of the first
        mean = mean + sum_over_processes((rows - mean).sum(0)) / count
    if not bool(mean.isfinite().all()):
        count = 0.0
    return rows - mean, mean, count


def sum_over_processes(part: Tensor) -> Tensor:
    """The sum of what each process has; changes `part`."""
    if dist.is_available() and dist.is_initialized():
        dist.all_reduce(part)
    return part
