"""Atomic output files of commands."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from expmflow.training.files import write_whole


def save_npy(path: Path, rows: Tensor) -> None:
    """In numpy's own format."""

    def write(temporary: Path) -> None:
        with open(temporary, "wb") as file:
            np.save(file, rows.numpy(), allow_pickle=False)

    write_whole(path, write)


def save_npz(path: Path, arrays: Mapping[str, np.ndarray[Any, Any]]) -> None:
    """Several arrays in numpy's own format."""

    def write(temporary: Path) -> None:
        with open(temporary, "wb") as file:
            np.savez(file, allow_pickle=False, **arrays)

    write_whole(path, write)


def save_text(path: Path, text: str) -> None:
    """As UTF-8."""
    write_whole(path, lambda temporary: _write_text(temporary, text))


def _write_text(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")
