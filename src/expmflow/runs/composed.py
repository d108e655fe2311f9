"""Saving and loading of composed flows, without a config: `flow.json` and `model.safetensors`."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from expmflow._validation import expect, expect_type
from expmflow.distributions import Density
from expmflow.runs.recipes import Description, describe, rebuild
from expmflow.training.checkpoint import CheckpointError
from expmflow.training.files import write_json
from expmflow.training.run import RunFolder, read_object
from expmflow.training.weights import CHECKSUM, read_metadata, read_tensors, save_weights

FORMAT_VERSION = 1
FLOW = "flow.json"
Plain = bool | int | float | str | None
STATE, BUFFER, ARGUMENT = "state.", "buffer.", "argument."


def save(flow: Density, folder: str | Path) -> None:
    """Write a flow, or another density, made of layers of this package, of torch.nn, or of registered ones.

    The folder holds a description of the layers (class names and constructor arguments: JSON) and the tensors
    (safetensors). The description is tested before anything is written, and each file is written under a temporary name
    and renamed. `ef.load` reads the flow back, and gives the same numbers bit for bit.

    Args:
        flow: the flow to save; register the classes of your own layers with `ef.register_layer`.
        folder: created if necessary; what was saved there before is replaced.

    Raises:
        TypeError: if a layer inside is of a class that is not registered.

    Example:
        >>> import tempfile
        >>> flow = ef.Flow(T.Chain([T.ActNorm(2), T.LinearExp(2)]), ef.distributions.StandardNormal((2,))).eval()
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     ef.save(flow, folder)
        ...     again = ef.load(folder)
        >>> x = torch.randn(3, 2)
        >>> torch.equal(flow.log_prob(x), again.log_prob(x))
        True
    """
    expect_type(isinstance(flow, Density), "a flow, or another density", type(flow).__name__)
    place = RunFolder(Path(folder))
    expect(not place.config.exists(), "a folder without a run", f"{place.config} in it")
    expect(place.path.is_dir() or not place.path.exists(), "a folder", f"the file {place.path}")
    values, tensors = pack(flow)
    place.path.mkdir(parents=True, exist_ok=True)
    save_weights(place.weights, tensors)
    weights = read_metadata(place.weights)[CHECKSUM]
    write_json(place.path / FLOW, {**values, "weights": weights, CHECKSUM: _checksum(values)})


def pack(flow: Density) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The description of a flow, as JSON values, and copies of its tensors; `unpack` rebuilds it."""
    description, arguments = describe(flow)
    dtype = _dtype(flow)
    state = flow.state_dict()
    try:
        twin = _restored(description, {k: v.detach().cpu() for k, v in arguments.items()}, dtype, state, {})
    except CheckpointError as error:
        raise TypeError(
            f"Expected a flow that its layers' arguments and state describe; got one whose copy fails: {error}"
        ) from None
    kinds = {name: value.dtype for name, value in twin.state_dict().items()}
    others = [f"{name} of {value.dtype}" for name, value in state.items() if kinds[name] != value.dtype]
    expect(not others, "a flow in one dtype", f"{', '.join(others[:3])} beside {dtype}")
    buffers = _irreproducible_buffers(flow, twin, state)
    parts = ((STATE, state), (BUFFER, buffers), (ARGUMENT, arguments))
    tensors = {prefix + name: value.detach().clone() for prefix, part in parts for name, value in part.items()}
    values = {
        "format_version": FORMAT_VERSION,
        "dtype": _dtype_name(dtype),
        "modules": description,
        "settings": _settings(flow, twin),
        "frozen": [name for name, parameter in flow.named_parameters() if not parameter.requires_grad],
    }
    return values, tensors


def is_composed(folder: Path) -> bool:
    """Whether `save` wrote this folder."""
    return (folder / FLOW).is_file()


def load_composed(folder: Path) -> Density:
    """The flow that `save` wrote, in evaluation mode.

    Raises:
        CheckpointError: if the files were altered, or name a class that is not registered.
    """
    path, place = folder / FLOW, RunFolder(folder)
    values = read_object(path, "the description of a flow")
    weights, checksum = values.pop("weights", None), values.pop(CHECKSUM, None)
    if checksum != _checksum(values):
        raise CheckpointError(
            f"Expected the flow in {path} to have the checksum beside it; got another: it was altered."
        )
    if read_metadata(place.weights).get(CHECKSUM) != weights:
        raise CheckpointError(f"Expected the weights of {path} in {place.weights}; got those of another flow.")
    tensors = read_tensors(place.weights)
    return unpack(values, tensors, path)


def unpack(values: Mapping[str, Any], tensors: Mapping[str, Tensor], path: Path | None = None) -> Density:
    """The flow that `pack` described, in evaluation mode; `path` is the source, for messages."""
    parts = [
        {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
        for prefix in (ARGUMENT, STATE, BUFFER)
    ]
    dtype = getattr(torch, str(values.get("dtype")), None)
    model = _restored(values.get("modules"), parts[0], dtype if isinstance(dtype, torch.dtype) else None, *parts[1:])
    if not isinstance(model, Density):
        raise CheckpointError(f"Expected a flow in {path}; got {type(model).__name__}.")
    _apply_settings(model, values.get("settings", {}), values.get("frozen", []), path)
    return model.eval()


def _restored(
    description: Description | Any,
    arguments: dict[str, Tensor],
    dtype: torch.dtype | None,
    state: dict[str, Tensor],
    buffers: dict[str, Tensor],
) -> nn.Module:
    """The module with its state; random numbers drawn by constructors do not affect the caller's generator."""
    with torch.random.fork_rng(devices=[]):
        model = rebuild(description, arguments)
    if dtype is not None:
        model = model.to(dtype)
    try:
        model.load_state_dict(state)
        for name, value in buffers.items():
            parent, _, leaf = name.rpartition(".")
            owner = model.get_submodule(parent)
            owner.register_buffer(leaf, value, persistent=False)
    except (RuntimeError, AttributeError, KeyError) as error:
        reason = " ".join(str(error).split())
        raise CheckpointError(f"Expected a state that fits the layers; got: {reason:.300}") from None
    return model


def _irreproducible_buffers(model: nn.Module, twin: nn.Module, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Buffers outside the state that a constructor does not reproduce, for example from another precision."""
    rebuilt = {name: value.cpu() for name, value in twin.named_buffers()}
    others = {name: value.detach().cpu() for name, value in model.named_buffers() if name not in state}
    return {name: value for name, value in others.items() if name not in rebuilt or not _equal(value, rebuilt[name])}


def _plain(module: nn.Module) -> dict[str, Plain]:
    """Public attributes that are numbers or strings, without the mode and the state."""
    plain = {name: value for name, value in vars(module).items() if type(value) in (bool, int, float, str, type(None))}
    return {name: value for name, value in plain.items() if not name.startswith("_") and name != "training"}


def _settings(model: nn.Module, twin: nn.Module) -> dict[str, dict[str, Plain]]:
    """Attributes that were changed after construction, such as `max_iterations`."""
    parts = dict(twin.named_modules())
    changed: dict[str, dict[str, Plain]] = {}
    for name, module in model.named_modules():
        before, now = _plain(parts[name]), _plain(module)
        differing = {key: value for key, value in now.items() if key in before and before[key] != value}
        changed |= {name: differing} if differing else {}
    return changed


def _apply_settings(model: nn.Module, settings: Any, frozen: Any, path: Path | None) -> None:
    """Set numbers and strings that modules already have; a file can set nothing else."""
    parts, parameters = dict(model.named_modules()), dict(model.named_parameters())
    try:
        for name, values in settings.items():
            known = _plain(parts[name])
            for key, value in values.items():
                if key not in known or type(value) not in (bool, int, float, str, type(None)):
                    raise KeyError(key)
                setattr(parts[name], key, value)
        for name in frozen:
            parameters[name].requires_grad_(False)
    except (KeyError, AttributeError, TypeError) as error:
        raise CheckpointError(f"Expected settings that the layers in {path} have; got {error}.") from None


def _equal(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a, b)


def _dtype(model: nn.Module) -> torch.dtype | None:
    """The dtype of the parameters, or else of the buffers; whether the copy reproduces that of all others will show."""
    floats = [value.dtype for value in [*model.parameters(), *model.buffers()] if value.is_floating_point()]
    return floats[0] if floats else None


def _dtype_name(dtype: torch.dtype | None) -> str | None:
    return None if dtype is None else str(dtype).removeprefix("torch.")


def _checksum(values: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()
