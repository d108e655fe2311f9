"""The folder of a run.

`config.json` (resolved), `checkpoints/`, `model.safetensors` (the best weights, averaged if the config says so) and
`metrics.jsonl`.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from expmflow.data import Dataset
from expmflow.data.kinds import KINDS, Kind, kind_of_source
from expmflow.data.paths import expand_home
from expmflow.training.checkpoint import CheckpointError, check_format
from expmflow.training.config import Config, ConfigError, parse_config
from expmflow.training.files import parse_json, read_json, write_json, write_text
from expmflow.training.weights import save_weights

RUN_FORMAT_VERSION = 1
MODEL_CHECKSUM = "model_sha256"
DATA_CHECKSUM = "data_sha256"
LONGEST_LINE = 2**16  # characters of a line of metrics
LARGEST_NUMBER = 2**63  # in such a line
LONGEST_SIDE = 10**6  # of an event; no machine holds the matrix of a larger one
NAMES, CLASS_NAMES, KIND = "names", "class_names", "kind"

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RunFolder:
    """The files in a run's folder."""

    path: Path

    @property
    def config(self) -> Path:
        return self.path / "config.json"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def weights(self) -> Path:
        return self.path / "model.safetensors"

    @property
    def reference(self) -> Path:
        return self.path / "reference.safetensors"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    def start(self, config: Config, data: Dataset) -> None:
        """Write the run's config; an existing run has been checked to be the same."""
        names, digest = data.names, data.digest()
        if self.config.exists():
            names = names or self.read_names()
            digest = self.check_data(digest) or digest
        known = {NAMES: names, CLASS_NAMES: data.class_names, KIND: data.kind, DATA_CHECKSUM: digest}
        save_config(self.config, config, data.event_shape, known)

    def check(self, config: Config, data: Dataset) -> None:
        """Raise `ConfigError` if the folder holds a run with another config."""
        if not self.config.exists():
            return
        known, shape = self.read_config()
        differences = _differences(_trajectory(known), _trajectory(config))
        if self.read_digest() is not None and self.read_digest() == data.digest():  # the same rows at another place
            differences.pop("data.path", None)
        if shape != data.event_shape:
            differences["the shape of a row"] = (shape, data.event_shape)
        if differences:
            others = "; ".join(f"{key} is {given}, and was {began}" for key, (began, given) in differences.items())
            raise ConfigError(
                f"Expected the config that the run in {self.path} began with; got another: {others}. Choose a new "
                f"folder, or go on with its own: expmflow train --resume {shlex.quote(str(self.path))}."
            )
        began = self.read_names()
        if began and data.names and data.names != began:
            raise ConfigError(
                f"Expected the columns {', '.join(began)} that the run in {self.path} began with; got "
                f"{', '.join(data.names)}."
            )

    def read_config(self) -> tuple[Config, tuple[int, ...]]:
        """The config of the run, and the shape of its events."""
        return read_config(self.config)

    def read_names(self) -> tuple[str, ...]:
        """The names of a row's entries; empty if they have none."""
        return read_names(self.config)

    def read_class_names(self) -> tuple[str, ...]:
        """The names of the classes; empty if they have none."""
        names = _read_values(self.config).get(CLASS_NAMES, [])
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise CheckpointError(f"Expected names of classes in {self.config}; got {names!r}.")
        return tuple(names)

    def read_kind(self) -> Kind:
        """The kind of the run's data; older runs imply it by the data's name."""
        name = _read_values(self.config).get(KIND)
        if name is None:
            return kind_of_source(self.read_config()[0].data.name)
        if name not in KINDS:
            raise CheckpointError(f"Expected one of the kinds {', '.join(KINDS)} in {self.config}; got {name!r}.")
        return KINDS[name]

    def read_digest(self) -> str | None:
        """The checksum of the data that the run began with; older runs have none."""
        digest = _read_values(self.config).get(DATA_CHECKSUM)
        return digest if isinstance(digest, str) else None

    def read_known(self) -> dict[str, Any]:
        """What the run stores about its data, in the form that `save_config` takes."""
        values = _read_values(self.config)
        return {key: values[key] for key in (NAMES, CLASS_NAMES, KIND, DATA_CHECKSUM) if key in values}

    def check_data(self, digest: str | None) -> str | None:
        """Warn if the data differs from what the run began with; returns the checksum of that."""
        began = self.read_digest()
        if began is not None and digest is not None and began != digest:
            log.warning(
                "The data is not what it was when the run in %s began: its rows may be in other parts now, and what "
                "is tested on may have been trained on.",
                self.path,
            )
        return began

    def set_weights_aside(self) -> None:
        """Set weights and their metrics aside before a run without checkpoints begins anew."""
        if not self.weights.exists():
            return
        for path in (self.weights, self.metrics):
            before = path.with_name(f"{path.stem}.before{path.suffix}")
            if path.exists() and not before.exists():
                os.replace(path, before)
                log.warning("No checkpoint in %s: training begins anew, and %s becomes %s.", self.path, path, before)

    def append_metrics(self, record: dict[str, Any]) -> None:
        """Append one line; an incomplete line is trimmed on resume."""
        with open(self.metrics, "a", encoding="utf-8") as file:
            file.write(_as_line(record))

    def trim_metrics(self, step: int) -> None:
        """Remove records after `step`, and incomplete lines."""
        if self.metrics.exists():
            records = [record for record in self.read_metrics() if record["step"] <= step]
            write_text(self.metrics, "".join(map(_as_line, records)))

    def read_metrics(self) -> list[dict[str, Any]]:
        """All complete lines: objects of numbers, with a step."""
        records = []
        if self.metrics.is_file():
            with open(self.metrics, encoding="utf-8", errors="replace") as file:
                for line in iter(lambda: file.readline(LONGEST_LINE), ""):
                    try:
                        record = parse_json(line)
                    except ValueError:
                        continue
                    if isinstance(record, dict) and isinstance(record.get("step"), int) and _numbers(record):
                        records.append({name: math.nan if value is None else value for name, value in record.items()})
        return records

    def save_weights(self, tensors: dict[str, Tensor]) -> None:
        save_weights(self.weights, tensors)


def _numbers(record: dict[str, Any]) -> bool:
    """Whether all its values are numbers that fit a float; null stands for one that is not finite."""
    return all(
        value is None or isinstance(value, float) or (isinstance(value, int) and abs(value) < LARGEST_NUMBER)
        for value in record.values()
    )


def _as_line(record: dict[str, Any]) -> str:
    """A record as JSON, with null for numbers that are not finite."""
    finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in record.items()}
    return json.dumps(finite, allow_nan=False) + "\n"


def save_config(
    path: Path, config: Config, event_shape: tuple[int, ...], known: Mapping[str, Any] | None = None
) -> None:
    """Write the resolved config, the format version, the event shape, facts about the data, and a model checksum."""
    values: dict[str, Any] = {"format_version": RUN_FORMAT_VERSION, "event_shape": list(event_shape)}
    values |= {key: value for key, value in (known or {}).items() if value}
    dumped = config.model_dump(mode="json")
    write_json(path, {**values, MODEL_CHECKSUM: _model_checksum(dumped, event_shape), "config": dumped})


def read_config(path: Path) -> tuple[Config, tuple[int, ...]]:
    """What `save_config` wrote."""
    values = _read_values(path)
    shape = values.get("event_shape")
    if not isinstance(shape, list) or not shape or not all(isinstance(n, int) and 0 < n <= LONGEST_SIDE for n in shape):
        raise CheckpointError(f"Expected the shape of an event in {path}; got {shape!r}.")
    config = parse_config(values.get("config"))
    expected = values.get(MODEL_CHECKSUM)
    if expected is not None and expected != _model_checksum(values["config"], shape):
        raise CheckpointError(
            f"Expected the model in {path} to have the checksum beside it; got another: it was altered."
        )
    return config, tuple(shape)


def read_names(path: Path) -> tuple[str, ...]:
    """The names that `save_config` stored; older runs have none."""
    values = _read_values(path)
    names, shape = values.get("names", []), values.get("event_shape")
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise CheckpointError(f"Expected names of columns in {path}; got {names!r}.")
    kind = KINDS.get(values.get(KIND, ""), KINDS["vectors"])  # older runs do not say, and only tables had names
    fit = isinstance(shape, list) and kind.names_fit(names, shape)
    if names and (not fit or len(set(names)) < len(names)):
        raise CheckpointError(f"Expected a name for each column of the run in {path}; got {', '.join(names)}.")
    return tuple(names)


def _read_values(path: Path) -> dict[str, Any]:
    if not path.exists():
        raise CheckpointError(f"Expected a run in {path.parent}; got no {path.name} in it.")
    return read_object(path, "a run's config")


def read_object(path: Path, what: str) -> dict[str, Any]:
    """A JSON object in this version's format; `CheckpointError` for anything else, which says `what` was expected."""
    try:
        values = read_json(path)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"Expected {what} in {path}; got: {error}.") from None
    if not isinstance(values, dict):
        raise CheckpointError(f"Expected {what} in {path}; got {type(values).__name__}.")
    check_format(values, path)
    return values


def _model_checksum(config: dict[str, Any], event_shape: Sequence[int]) -> str:
    """A checksum of the settings that the weights depend on; others may be edited, for example when data moves.

    It is computed from the file's own values, because a later version may have more settings and read the same file.
    """
    meaning = [config.get("model"), config.get("train", {}).get("precision"), list(event_shape)]
    return hashlib.sha256(json.dumps(meaning, sort_keys=True).encode()).hexdigest()


def _trajectory(config: Config) -> dict[str, Any]:
    """The settings that determine the weights: with more steps, or other reports, a run remains the same run."""
    values = config.model_dump(mode="json")
    for free in ("steps", "log_every", "checkpoint_every", "sample_every", "on_nonfinite", "threads", "timeout"):
        values["train"].pop(free)
    values["data"].pop("dir")  # the official files are the same everywhere
    if config.data.path is not None:  # a place has many names
        values["data"]["path"] = str(expand_home(config.data.path).resolve())
    return values


def _differences(began: dict[str, Any], given: dict[str, Any], prefix: str = "") -> dict[str, tuple[Any, Any]]:
    """The keys whose values differ, with both values."""
    differences: dict[str, tuple[Any, Any]] = {}
    for key in dict.fromkeys([*began, *given]):
        old, new = began.get(key), given.get(key)
        if isinstance(old, dict) and isinstance(new, dict):
            differences |= _differences(old, new, f"{prefix}{key}.")
        elif old != new:
            differences[f"{prefix}{key}"] = (old, new)
    return differences
