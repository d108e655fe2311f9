"""Layers that are initialised from the first batch in training, and the moments of that batch."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from expmflow.transforms.base import Transform


class DataStart(Transform):
    """A layer whose parameters are set by the first batch in training; whether that has happened is part of its
    state."""

    initialised: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("initialised", torch.zeros((), dtype=torch.bool))
        self._ready: bool | None = None  # a copy of the buffer, which would be slow to read at every step

    def _waits_for_data(self) -> bool:
        """Whether this batch should initialise the layer."""
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
    """`(n, d)` rows in float64 minus their mean, that mean, and their number; mean and number over all processes.

    Compute moments from these: far from zero, the difference of raw moments loses every digit of the spread. If any row
    has NaN or infinity, the number is 0: a layer initialised from such rows could never recover.
    """
    rows = rows.double()
    count = float(sum_over_processes(rows.new_tensor(float(len(rows)))))
    mean = rows.new_zeros(rows.shape[1])
    for _ in range(2 if count else 0):  # the second pass removes the rounding error of the first
        mean = mean + sum_over_processes((rows - mean).sum(0)) / count
    if not bool(mean.isfinite().all()):
        count = 0.0
    return rows - mean, mean, count


def sum_over_processes(part: Tensor) -> Tensor:
    """The sum of `part` over all processes; changes `part`."""
    if dist.is_available() and dist.is_initialized():
        dist.all_reduce(part)
    return part
