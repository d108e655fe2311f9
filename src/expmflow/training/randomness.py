"""Randomness as a pure function: of the seed, and of where in the training it is used."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import torch
from torch import Tensor

Noise = Literal["uniform", "normal"]


@dataclass(frozen=True)
class Randomness:
    """Every random number of a run follows from its seed, a label and a few counters.

    A run that is cut and resumed, or split over processes, therefore sees the same numbers: there is no state to save.

    Example:
        >>> torch.equal(Randomness(1).order(epoch=3, size=5), Randomness(1).order(epoch=3, size=5))
        True
    """

    seed: int

    def generator(self, label: str, *counters: int) -> torch.Generator:
        """A generator of its own for each label and each set of counters."""
        text = ":".join([str(self.seed), label, *map(str, counters)])
        digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
        return torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)

    def order(self, epoch: int, size: int) -> Tensor:
        """The order in which an epoch goes through `size` samples."""
        return _order(self, epoch, size).clone()

    def batch(self, step: int, size: int, batch_size: int) -> Tensor:
        """The samples of a step: epochs follow each other, each in its own order; an epoch's remainder is left out."""
        per_epoch = max(1, size // batch_size)
        epoch, place = divmod(step, per_epoch)
        return _order(self, epoch, size)[place * batch_size : (place + 1) * batch_size].clone()

    def noise(self, kind: Noise, shape: tuple[int, ...], label: str, *counters: int) -> Tensor:
        """Noise for a whole global batch, in float64: row k belongs to sample k, on whichever process it is used."""
        generator = self.generator(label, *counters)
        return _draw(kind, shape, generator)

    def row_noise(self, kind: Noise, rows: Tensor, label: str) -> Tensor:
        """Noise for integer rows, in float64, each row's a function of what is in it: not of its place or its batch."""
        keys = [hashlib.sha256(row.tobytes()).digest()[:8] for row in rows.cpu().to(torch.int64).numpy()]
        noise = [
            _draw(kind, row.shape, self.generator(label, int.from_bytes(k))) for row, k in zip(rows, keys, strict=True)
        ]
        return torch.stack(noise) if noise else _draw(kind, rows.shape, self.generator(label))


def _draw(kind: Noise, shape: Sequence[int], generator: torch.Generator) -> Tensor:
    draw = torch.rand if kind == "uniform" else torch.randn
    return draw(shape, generator=generator, dtype=torch.float64)


@lru_cache(maxsize=2)  # an epoch has many steps
def _order(randomness: Randomness, epoch: int, size: int) -> Tensor:
    return torch.randperm(size, generator=randomness.generator("order", epoch))
