"""Atomic checkpoints: directories that are either complete or absent, and verify themselves.

A checkpoint is `checkpoints/step-00001000/` with tensors in safetensors, everything else in JSON, and a manifest of the
sizes and checksums of its files. It is written under a temporary name and renamed. Nothing is ever unpickled.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from expmflow.training.files import flush_directory, read_json, write_json, write_tensors

FORMAT_VERSION = 1
MANIFEST = "manifest.json"
STATE = "state.json"
NAME = re.compile(r"step-\d+")

log = logging.getLogger(__name__)


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be used; the message names it and says why."""


class NewerFormatError(CheckpointError):
    """A checkpoint or run from a newer version: it is not damaged, so no older one is used instead."""


@dataclass(frozen=True)
class Checkpoint:
    """The content of a checkpoint: named groups of tensors, and a state of plain values."""

    step: int
    tensors: dict[str, dict[str, Tensor]]
    state: dict[str, Any]


def save_checkpoint(folder: Path, checkpoint: Checkpoint) -> Path:
    """Write `folder/step-…` atomically; an earlier checkpoint of that name is replaced."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"step-{checkpoint.step:08d}"
    temporary = folder / f".tmp-{path.name}"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    for group, tensors in checkpoint.tensors.items():
        write_tensors(temporary / f"{group}.safetensors", tensors)
    write_json(temporary / STATE, {"step": checkpoint.step, **checkpoint.state})
    write_json(temporary / MANIFEST, {"format_version": FORMAT_VERSION, "files": _describe(temporary)})
    flush_directory(temporary)
    before = folder / f".tmp-before-{path.name}"
    if path.exists():  # a resumed run reaches a step again
        shutil.rmtree(before, ignore_errors=True)
        os.rename(path, before)
    os.rename(temporary, path)
    flush_directory(folder)
    shutil.rmtree(before, ignore_errors=True)
    return path


def load_checkpoint(path: Path) -> Checkpoint:
    """Read a checkpoint after checking every file against the manifest."""
    manifest = _read_json(path, MANIFEST)
    check_format(manifest, path)
    files = manifest.get("files")
    if not isinstance(files, dict) or STATE not in files:
        raise CheckpointError(f"Expected a list of files in the manifest of {path}; got none.")
    for name, expected in files.items():
        if Path(name).name != name:
            raise CheckpointError(f"Expected names of files in the manifest of {path}; got {name!r}.")
        _verify(path / name, expected)
    tensors = {}
    for name in sorted(files):
        if name.endswith(".safetensors"):
            try:
                tensors[name.removesuffix(".safetensors")] = load_file(path / name)
            except (SafetensorError, OSError) as error:
                raise CheckpointError(f"Expected tensors in {path / name}; got: {error}.") from None
    state = _read_json(path, STATE)
    step = state.pop("step", None)
    if not isinstance(step, int) or step < 0:
        raise CheckpointError(f"Expected a step in {path / STATE}; got {step!r}.")
    return Checkpoint(step, tensors, state)


def newest_step(folder: Path) -> int:
    """The step of the newest checkpoint in a folder, 0 if there is none."""
    known = list_checkpoints(folder)
    return _step(known[0]) if known else 0


def list_checkpoints(folder: Path) -> list[Path]:
    """The checkpoints of a folder, newest first, without temporary ones and copies under other names."""
    checkpoints = [path for path in folder.glob("step-*") if NAME.fullmatch(path.name) and path.is_dir()]
    return sorted(checkpoints, key=_step, reverse=True)


def _step(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def newest_checkpoint(folder: Path) -> Checkpoint | None:
    """The newest intact checkpoint, with a warning for each damaged one; None if there never was one.

    Raises:
        CheckpointError: if there are checkpoints, but none is intact: a new start would overwrite what was trained.
    """
    paths = list_checkpoints(folder)
    for path in paths:
        try:
            return load_checkpoint(path)
        except NewerFormatError:
            raise
        except CheckpointError as error:
            if path == paths[-1]:
                raise CheckpointError(f"{error} There is no other; choose a new folder, or remove {folder}.") from None
            log.warning("%s Using the checkpoint before it.", error)
    return None


def remove_old(folder: Path, keep: set[int], newest: int = 2) -> None:
    """Delete checkpoints except the `newest` and those of the steps in `keep`, and incomplete ones."""
    for path in list_checkpoints(folder)[newest:]:
        if _step(path) not in keep:
            shutil.rmtree(path)
    for path in folder.glob(".tmp-*"):
        shutil.rmtree(path, ignore_errors=True)


def check_format(manifest: Mapping[str, Any], path: Path) -> None:
    """Refuse the format of a newer version."""
    version = manifest.get("format_version")
    if not isinstance(version, int) or version < 1:
        raise CheckpointError(f"Expected a version number in the manifest of {path}; got {version!r}.")
    if version > FORMAT_VERSION:
        raise NewerFormatError(
            f"Expected format version {FORMAT_VERSION} or older in {path}; got {version}: a newer expmflow wrote it."
        )


def _describe(folder: Path) -> dict[str, dict[str, Any]]:
    return {p.name: {"bytes": p.stat().st_size, "sha256": _sha256(p)} for p in sorted(folder.iterdir())}


def _verify(path: Path, expected: Any) -> None:
    if not path.is_file():
        raise CheckpointError(f"Expected the file {path}; got none.")
    if not isinstance(expected, dict) or "bytes" not in expected or "sha256" not in expected:
        raise CheckpointError(f"Expected a size and a checksum of {path} in its manifest; got {expected!r}.")
    size = path.stat().st_size
    if size != expected["bytes"]:
        raise CheckpointError(f"Expected {expected['bytes']} bytes in {path}; got {size}.")
    if _sha256(path) != expected["sha256"]:
        raise CheckpointError(f"Expected {path} to have the checksum of its manifest; got another: it was altered.")


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _read_json(folder: Path, name: str) -> dict[str, Any]:
    try:
        value = read_json(folder / name)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"Expected JSON in {folder / name}; got: {error}.") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"Expected a JSON object in {folder / name}; got {type(value).__name__}.")
    return value
