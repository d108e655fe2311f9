"""Randomness as a pure function of the seed and of its place in the training."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from expmflow.distributions.protocol import Draw, NoiseKind


@dataclass(frozen=True)
class Randomness:
    """Every random number of a run follows from its seed, a label and a few counters.

    So a run that is interrupted and resumed, or split over processes, uses the same numbers: there is no state to save.

    Example:
        >>> torch.equal(Randomness(1).order(epoch=3, size=5), Randomness(1).order(epoch=3, size=5))
        True
    """

    seed: int

    def generator(self, label: str, *counters: int) -> torch.Generator:
        """A separate generator for each label and each set of counters."""
        text = ":".join([str(self.seed), label, *map(str, counters)])
        digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
        return torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)

    def order(self, epoch: int, size: int) -> Tensor:
        """The order in which an epoch goes through `size` samples."""
        return _order(self, epoch, size).clone()

    def batch(self, step: int, size: int, batch_size: int) -> Tensor:
        """The samples of a step: epochs follow each other, each in its own order; an incomplete last batch is
        dropped."""
        per_epoch = max(1, size // batch_size)
        epoch, place = divmod(step, per_epoch)
        return _order(self, epoch, size)[place * batch_size : (place + 1) * batch_size].clone()

    def noise(self, kind: NoiseKind, shape: tuple[int, ...], label: str, *counters: int) -> Tensor:
        """Noise for a whole global batch, in float64: row k belongs to sample k, whichever process uses it."""
        draw = {"uniform": torch.rand, "normal": torch.randn}[kind]
        return draw(shape, generator=self.generator(label, *counters), dtype=torch.float64, device="cpu")

    def draws(self, draws: Sequence[Draw], rows: int, label: str, *counters: int) -> tuple[Tensor, ...]:
        """As `noise`, for all the draws that a density takes."""
        return tuple(
            self.noise(draw.kind, (rows, *draw.shape), _numbered(label, k), *counters) for k, draw in enumerate(draws)
        )

    def row_draws(self, draws: Sequence[Draw], rows: Tensor, label: str) -> tuple[Tensor, ...]:
        """As `draws`, but each row's noise is a function of the row's content, not of its place or its batch."""
        whole = rows.cpu().to(torch.float64 if rows.is_floating_point() else torch.int64).numpy()
        keys = [int.from_bytes(hashlib.sha256(row.tobytes()).digest()[:8]) for row in whole] if draws else []
        return tuple(
            torch.stack([self.noise(draw.kind, draw.shape, _numbered(label, k), key) for key in keys])
            if keys
            else torch.zeros(0, *draw.shape, dtype=torch.float64)
            for k, draw in enumerate(draws)
        )


def _numbered(label: str, k: int) -> str:
    """A label for draw k; the first keeps the label itself."""
    return f"{label} {k}" if k else label


@lru_cache(maxsize=2)  # an epoch has many steps
def _order(randomness: Randomness, epoch: int, size: int) -> Tensor:
    return torch.randperm(size, generator=randomness.generator("order", epoch), device="cpu")
