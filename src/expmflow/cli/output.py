"""Files that a command writes: whole, or not at all."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from expmflow._validation import expect


def write_whole(path: Path, write: Callable[[Path], None]) -> None:
    """Let `write` fill a file beside `path`, then put it in its place."""
    expect(not path.is_dir(), f"a file to write to in {path}", "a folder")
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".tmp-{path.name}")
    try:
        write(temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


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
