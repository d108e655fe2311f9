"""What settings are where nobody says: of tables, they follow the number of training rows."""

from __future__ import annotations

import math

FEW_ROWS = 1_000
FEW_FEATURES = 8


def default_hidden(rows: int) -> int:
    """The width of the networks of a table's model."""
    return 32 if rows < FEW_ROWS else 64


def default_components(rows: int, features: int) -> int:
    """Pieces of splines, and components of mixtures: more where there are many rows, and few columns to share them."""
    return 8 if rows < FEW_ROWS else 14 if features <= FEW_FEATURES else 10


def default_jitter(rows: int) -> float:
    """The noise of training rows: half of their spread for a hundred, none for many."""
    share = round(min(0.5, 60 / rows), 3)
    return share if share >= 0.01 else 0.0


def default_weight_decay(rows: int) -> float:
    """Of the optimizer: with a learning rate of 1e-3, a thousandth a step for a few hundred rows."""
    return round(min(1.0, 400 / rows), 4)


def default_training(rows: int) -> dict[str, int]:
    """Of a table: a batch that few rows fill ten times, validations every few epochs, and patience for them."""
    batch = min(rows, 256, max(16, 2 ** round(math.log2(max(rows, 1) / 10))))
    return {"batch_size": batch, "validate_every": min(100, max(20, 5 * (rows // batch))), "patience": 10}
