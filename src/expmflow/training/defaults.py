"""Defaults of settings that depend on the number of training rows of a table."""

from __future__ import annotations

import math

FEW_ROWS = 1_000
FEW_FEATURES = 8


def default_hidden(rows: int) -> int:
    """The width of the networks of a table's model."""
    return 32 if rows < FEW_ROWS else 64


def default_components(rows: int, features: int) -> int:
    """Pieces of splines, and components of mixtures: more if there are many rows, and few columns to share them."""
    return 8 if rows < FEW_ROWS else 14 if features <= FEW_FEATURES else 10


def default_jitter(rows: int) -> float:
    """The noise added to training rows: half of their spread for a hundred rows, none for many."""
    share = round(min(0.5, 60 / rows), 3)
    return share if share >= 0.01 else 0.0


def default_weight_decay(rows: int) -> float:
    """Weight decay of the optimizer: at a learning rate of 1e-3, a thousandth per step for a few hundred rows."""
    return round(min(1.0, 400 / rows), 4)


def default_training(rows: int) -> dict[str, int]:
    """For a table: a batch that even few rows fill ten times, validations every few epochs, and a fixed patience."""
    batch = min(rows, 256, max(16, 2 ** round(math.log2(max(rows, 1) / 10))))
    return {"batch_size": batch, "validate_every": min(100, max(20, 5 * (rows // batch))), "patience": 10}
