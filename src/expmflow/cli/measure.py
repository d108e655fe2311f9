"""Estimates of time and memory, measured on a small part of the work."""

from __future__ import annotations

import math
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from torch import Tensor, UntypedStorage
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

FEW_ROWS = 16
SHORT = 0.1  # seconds: shorter work is measured on more rows
REPEATS = 3


@dataclass(frozen=True)
class Estimate:
    """Seconds for all the rows, and bytes for the largest batch of them."""

    seconds: float
    bytes: float


def estimate(work: Callable[[int], object], rows: int, batch: int) -> Estimate:
    """The cost of `work(rows)` in batches: a fixed part and a part for each row, from one row and from a few."""
    most = min(rows, batch)
    few = min(FEW_ROWS, most)
    while (taken := seconds_of(work, few)) < SHORT and few < most:
        few = min(4 * few, most)
    seconds, seconds_per_row = _line(few, seconds_of(work, 1), taken)
    memory, memory_per_row = _line(few, peak_bytes(work, 1), peak_bytes(work, few))
    return Estimate(seconds * math.ceil(rows / batch) + seconds_per_row * rows, memory + memory_per_row * most)


def _line(few: int, of_one: float, of_few: float) -> tuple[float, float]:
    slope = max(0.0, of_few - of_one) / max(1, few - 1)
    return max(0.0, of_one - slope), slope


def seconds_of(work: Callable[..., object], *arguments: int) -> float:
    """The shortest of a few times; the first call, which may set things up, does not count."""
    work(*arguments)
    times = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        work(*arguments)
        times.append(time.perf_counter() - started)
    return min(times)


def peak_bytes(work: Callable[..., object], *arguments: int) -> int:
    """The largest memory that tensors created by `work` hold at a time."""
    with _Peak() as memory:
        work(*arguments)
    return memory.peak


class _Peak(TorchDispatchMode):
    """Records every tensor that an operation returns, and when its memory is released."""

    def __init__(self) -> None:
        super().__init__()
        self.held = self.peak = 0
        self.known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        returned = func(*args, **(kwargs or {}))
        for value in tree_leaves(returned):
            if isinstance(value, Tensor):
                self._note(value.untyped_storage())
        return returned

    def _note(self, storage: UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key not in self.known:
            self.known.add(key)
            self.held += size
            self.peak = max(self.peak, self.held)
            weakref.finalize(storage, self._forget, key, size)

    def _forget(self, key: int, size: int) -> None:
        self.known.discard(key)
        self.held -= size


def size_text(count: float) -> str:
    """Bytes for a person to read."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


def time_text(seconds: float) -> str:
    """Seconds for a person to read."""
    return f"{seconds:.2g} s" if seconds < 10 else str(timedelta(seconds=round(seconds)))
