"""Weights in safetensors files, each with a checksum of its tensors."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from expmflow.training.checkpoint import CheckpointError
from expmflow.training.files import flush_directory, on_cpu, write_tensors

CHECKSUM = "sha256"


def save_weights(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> None:
    """Replace a safetensors file atomically; it carries a checksum of its tensors."""
    temporary = path.with_name(f".{path.name}.tmp")
    stored = on_cpu(tensors)
    write_tensors(temporary, stored, metadata={**(metadata or {}), CHECKSUM: _checksum(stored)})
    os.replace(temporary, path)
    flush_directory(path.parent)


def read_metadata(path: Path) -> dict[str, str]:
    """The metadata of a safetensors file."""
    if path.exists() and not path.is_file():
        raise CheckpointError(f"Expected weights in {path}; got no regular file.")
    try:
        with safe_open(path, framework="pt") as file:
            return file.metadata() or {}
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"Expected weights in {path}; got: {error}.") from None


def read_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors that `save_weights` wrote, verified by checksum; other safetensors files have none."""
    expected = read_metadata(path).get(CHECKSUM)
    try:
        tensors = load_file(path)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"Expected weights in {path}; got: {error}.") from None
    if expected is not None and expected != _checksum(tensors):
        raise CheckpointError(f"Expected the weights in {path} to have the checksum beside them; got another.")
    return tensors


def load_weights(model: nn.Module, path: Path) -> None:
    """Load into a model what `save_weights` wrote."""
    tensors = read_tensors(path)
    try:
        model.load_state_dict(tensors)
    except RuntimeError as error:
        reason = " ".join(str(error).split())
        raise CheckpointError(f"Expected the weights in {path} to fit the model; got: {reason:.300}") from None


def _checksum(tensors: Mapping[str, Tensor]) -> str:
    """A checksum of names, dtypes, shapes and contents."""
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
