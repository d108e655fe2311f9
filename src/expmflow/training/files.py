"""Writing so that nothing is ever half there."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save
from torch import Tensor


def write_text(path: Path, text: str) -> None:
    """Replace a file whole: under a temporary name, flushed to disk, renamed."""
    temporary = path.with_name(f".{path.name}.tmp")
    with open(temporary, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    flush_directory(path.parent)


def write_json(path: Path, value: Any) -> None:
    """Replace a JSON file whole."""
    write_text(path, json.dumps(value, indent=2, sort_keys=True) + "\n")


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str] | None = None) -> None:
    """A safetensors file, flushed to disk, that whoever may read the folder may read."""
    kept = {name: tensor.detach().contiguous().cpu() for name, tensor in tensors.items()}
    with open(path, "wb") as file:
        file.write(save(kept, metadata))
        file.flush()
        os.fsync(file.fileno())


def flush_file(path: Path) -> None:
    """Make sure that a file's contents are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def flush_directory(path: Path) -> None:
    """Make sure that a directory's names are on the disk."""
    flush_file(path)
