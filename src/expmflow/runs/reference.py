"""What a run stores about its data, so that it can be used where the data is not.

`reference.safetensors` holds likelihoods of rows of each split, which scores and evaluations compare with, and a few
rows to draw. It belongs to the weights that it was measured with, and is ignored for others.
"""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from expmflow.data import Dataset
from expmflow.data.drawing.grids import class_columns
from expmflow.runs.evaluation import Advance, Trained
from expmflow.training.checkpoint import CheckpointError
from expmflow.training.files import parse_json
from expmflow.training.weights import CHECKSUM, read_metadata, read_tensors, save_weights

PARTS = ("train", "validation", "test")
FORMAT = "1"


@dataclass(frozen=True)
class Reference:
    """Reference values for comparisons.

    Args:
        counts: the number of rows in each split.
        nll: of the first rows of each split, in nats; infinite if it over- or underflows.
        scored: the nll that scores are calibrated on: of held-out rows, without their classes.
        rows: some of the training rows, to show.
        columns: how many of them form a line, if each is of another class.
        labels: the labels of these rows, if the model is given their classes.
        extremes: the most likely and the least likely of the measured test rows, if a report shows them.
        examples: the first of the measured test rows, for figures of latents; None in files of earlier versions.
        baselines: the mean nll of the same rows under simple densities, by name.
    """

    counts: dict[str, int]
    nll: dict[str, Tensor]
    scored: Tensor
    rows: Tensor
    columns: int | None = None
    labels: Tensor | None = None
    extremes: tuple[Tensor, Tensor] | None = None
    examples: Tensor | None = None
    baselines: dict[str, float] = field(default_factory=dict)

    @property
    def tested(self) -> str:
        """The split that says how good the model is: the last one that has rows."""
        return _tested(self.counts)

    @property
    def held_out(self) -> str:
        """The split that scores are calibrated on: validation, if it has rows."""
        return _held_out(self.counts)


def measure(trained: Trained, data: Dataset, advance: Advance = lambda done: None) -> Reference:
    """Measure the reference values of a run's data."""
    most = trained.kind.measured_rows
    parts = dict(zip(PARTS, (data.train, data.validation, data.test), strict=True))
    conditional = data.labels is not None and trained.classes is not None
    labels = dict(zip(PARTS, data.labels, strict=True)) if conditional and data.labels is not None else {}
    nll = {
        part: -trained.log_likelihoods(rows[:most], advance, labels[part][:most] if labels else None)
        for part, rows in parts.items()
    }
    counts = {part: len(rows) for part, rows in parts.items()}
    held_out, tested = _held_out(counts), _tested(counts)
    scored = -trained.log_likelihoods(parts[held_out][:most]) if labels else nll[held_out]
    places, columns = _places(trained, data)
    shown = data.train if len(data.train) else data.test
    return Reference(
        counts,
        nll,
        scored,
        shown[places],
        columns,
        labels["train"][places] if labels and len(data.train) else None,
        _extremes(trained, parts[tested][:most], nll[tested]),
        parts[tested][: trained.kind.report_checked],
        trained.kind.baselines(data.train, parts[tested][:most]) if len(data.train) else {},
    )


def measured_count(trained: Trained, data: Dataset) -> int:
    """The number of likelihoods that `measure` computes."""
    return sum(min(len(rows), trained.kind.measured_rows) for rows in (data.train, data.validation, data.test))


def keep(trained: Trained, reference: Reference) -> None:
    """Write the values into the run's folder, beside the weights that they belong to."""
    tensors = {f"nll.{part}": values for part, values in reference.nll.items()}
    tensors |= {"scored": reference.scored.clone(), "rows": reference.rows}
    if reference.labels is not None:
        tensors["labels"] = reference.labels
    if reference.extremes is not None:
        tensors["likely"], tensors["unlikely"] = reference.extremes
    if reference.examples is not None:
        tensors["examples"] = reference.examples.clone()
    known = {"counts": reference.counts, "columns": reference.columns, "baselines": reference.baselines}
    metadata = {"format": FORMAT, "weights": _weights(trained), "known": json.dumps(known)}
    save_weights(trained.folder.reference, tensors, metadata)


def load_reference(trained: Trained) -> Reference | None:
    """The stored values of the run; None if there are none, or they belong to other weights."""
    path = trained.folder.reference
    if not path.is_file():
        return None
    metadata, tensors = read_metadata(path), read_tensors(path)
    if metadata.get("format") != FORMAT or metadata.get("weights") != _weights(trained):
        return None
    try:
        known: dict[str, Any] = parse_json(metadata["known"])
        extremes = (tensors["likely"], tensors["unlikely"]) if "likely" in tensors else None
        return Reference(
            {part: int(known["counts"][part]) for part in PARTS},
            {part: tensors[f"nll.{part}"] for part in PARTS},
            tensors["scored"],
            tensors["rows"],
            known["columns"],
            tensors.get("labels"),
            extremes,
            tensors.get("examples"),
            {str(name): float(value) for name, value in known["baselines"].items()},
        )
    except (KeyError, OverflowError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"Expected what a run keeps of its data in {path}; got: no {error}.") from None


def reference_of(trained: Trained, advance: Advance = lambda done: None) -> Reference:
    """The stored values, or values measured now if there are none, or if other data is given."""
    kept = None if trained.place is not None else load_reference(trained)
    return measure(trained, trained.data(), advance) if kept is None else kept


def _tested(counts: dict[str, int]) -> str:
    return next((part for part in reversed(PARTS) if counts[part]), "train")


def _held_out(counts: dict[str, int]) -> str:
    return next((part for part in ("validation", "test") if counts[part] > 1), "train")


def _weights(trained: Trained) -> str:
    """A checksum of the weights."""
    path = trained.folder.weights
    return read_metadata(path).get(CHECKSUM) or hashlib.sha256(path.read_bytes()).hexdigest()


def _places(trained: Trained, data: Dataset) -> tuple[Tensor, int | None]:
    """Training rows to show; for a conditional model, the classes alternate, with a column for each."""
    shown = data.train if len(data.train) else data.test
    count = min(trained.kind.report_rows, len(shown))
    columns = class_columns(trained.classes, count)
    first = torch.arange(count)
    if columns is None or data.labels is None or not len(data.train):
        return first, None
    each = [(data.labels[0] == k).nonzero().flatten() for k in range(columns)]
    lines = min(count // columns, *map(len, each))
    return (torch.stack([places[:lines] for places in each], dim=1).flatten(), columns) if lines else (first, None)


def _extremes(trained: Trained, rows: Tensor, nll: Tensor) -> tuple[Tensor, Tensor] | None:
    count = min(trained.kind.extremes, len(rows) // 2)
    if count == 0:
        return None
    order = nll.nan_to_num(math.inf).argsort()
    return rows[order[:count]], rows[order[-count:].flip(0)]
