"""Atomic writing of files, and safe reading."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save
from torch import Tensor

from expmflow._validation import expect

LARGEST_JSON = 2**26  # bytes


def read_text(path: Path, most: int) -> str:
    """The text of a file.

    Raises:
        OSError: if there is no such file, or it is not a regular file: reading a pipe would wait for a writer.
        ValueError: if it has more than `most` bytes, or is not UTF-8.
    """
    if path.exists() and not path.is_file():
        raise OSError("no regular file")
    with open(path, "rb") as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise ValueError(f"more than {most} bytes")
    return content.decode()


def parse_json(text: str) -> Any:
    """The value of a JSON text; `ValueError` if it is not JSON, or is nested too deeply for the parser."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("lists or objects that are nested too deeply") from None


def read_json(path: Path) -> Any:
    """The value in a JSON file; raises `OSError` or `ValueError` like `read_text` and `parse_json`."""
    return parse_json(read_text(path, LARGEST_JSON))


def write_whole(path: Path, write: Callable[[Path], None]) -> None:
    """Let `write` fill a file beside `path`, then move it into place; creates the folder if necessary."""
    expect(not path.is_dir(), f"a file to write to in {path}", "a folder")
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".tmp-{path.name}")
    try:
        write(temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Replace a file atomically: under a temporary name, flushed to disk, renamed."""
    temporary = path.with_name(f".{path.name}.tmp")
    with open(temporary, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    flush_directory(path.parent)


def write_json(path: Path, value: Any) -> None:
    """Replace a JSON file atomically."""
    write_text(path, json.dumps(value, indent=2, sort_keys=True) + "\n")


def on_cpu(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors as safetensors stores them: contiguous, on the CPU, without gradients."""
    return {name: tensor.detach().contiguous().cpu() for name, tensor in tensors.items()}


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str] | None = None) -> None:
    """A safetensors file, flushed to disk, and readable by everyone who may read the folder."""
    with open(path, "wb") as file:
        file.write(save(on_cpu(tensors), metadata))
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
    """Make sure that a directory's entries are on the disk."""
    flush_file(path)
