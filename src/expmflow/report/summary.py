"""What a report says of a run: numbers and arrays, before anything is drawn."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from expmflow.data import Dataset
from expmflow.data.graphs import MIXTURES
from expmflow.distributions import NonFiniteError
from expmflow.numerics import ConvergenceError
from expmflow.report.certificates import Certificate, certificates
from expmflow.report.grids import class_columns
from expmflow.runs.evaluation import Trained
from expmflow.runs.importance import kept_results
from expmflow.training.units import Unit, usual_unit

SHOWN_ROWS = {"dense": 3000, "graph": 1000, "image": 36}
CHECKED_ROWS = {"dense": 512, "graph": 512, "image": 64}
TESTED_ROWS = {"dense": None, "graph": 20_000, "image": 500}  # so that a report takes less than a minute
GRID = 240


@dataclass(frozen=True)
class Weighted:
    """The importance-weighted bound that `expmflow evaluate` has found: nats, over some of the test rows."""

    samples: int
    rows: int
    nll: float
    error: float


@dataclass(frozen=True)
class Density:
    """p(x) on a grid over the plane, `(GRID, GRID)`, the rows going up."""

    values: Tensor
    extent: tuple[float, float, float, float]


@dataclass(frozen=True)
class Summary:
    """All that is shown of one run."""

    name: str
    kind: str
    event_shape: tuple[int, ...]
    config: dict[str, Any]
    parameters: int
    rows: dict[str, int]
    records: list[dict[str, Any]]
    tested: int
    test_nll: float
    test_error: float
    certificates: list[Certificate]
    round_trip: float
    sample_seconds: float
    likelihood_seconds: float
    data: Tensor
    samples: Tensor
    density: Density | None = field(default=None)
    levels: int | None = None
    columns: int | None = None
    weighted: tuple[Weighted, ...] = ()
    entropy: float | None = None

    @property
    def unit(self) -> Unit:
        """What the literature compares such likelihoods in."""
        return usual_unit(self.event_shape)

    @property
    def best(self) -> dict[str, Any]:
        """The validation with the least nll; one that was not finite is on record as NaN."""
        found = [r for r in self.records if math.isfinite(r.get("validation_nll", math.nan))]
        return min(found, key=lambda r: r["validation_nll"], default={"step": 0, "validation_nll": math.nan})

    @property
    def seconds_per_step(self) -> float:
        """The mean over the run's records."""
        found = [r["seconds_per_step"] for r in self.records if "seconds_per_step" in r]
        return sum(found) / len(found) if found else math.nan

    @property
    def last_step(self) -> int:
        """The last step on record."""
        return max((r["step"] for r in self.records), default=0)


def summarise(trained: Trained) -> Summary:
    """Measure a run: likelihoods, samples, certificates, round trips, timings; of images and graphs, on a part."""
    data = trained.data()
    tested, labels = tested_rows(trained, data)
    started = time.perf_counter()
    log_prob = trained.log_likelihoods(tested, labels=labels)
    likelihood_seconds = (time.perf_counter() - started) / len(tested)
    shown, columns = _shown(trained, data)
    started = time.perf_counter()
    samples = trained.sample(len(shown))
    sample_seconds = (time.perf_counter() - started) / len(samples)
    checked = CHECKED_ROWS[trained.kind]
    rows, context = trained.rows(tested[:checked]), trained.context(None if labels is None else labels[:checked])
    mixture = MIXTURES.get(trained.config.data.name)
    return Summary(
        name=trained.name,
        kind=trained.kind,
        event_shape=trained.event_shape,
        config=trained.config.model_dump(mode="json"),
        parameters=sum(p.numel() for p in trained.model.parameters()),
        rows={"training": len(data.train), "validation": len(data.validation), "test": len(data.test)},
        records=trained.folder.read_metrics(),
        tested=len(tested),
        test_nll=-float(log_prob.mean()),
        test_error=_standard_error(log_prob),
        certificates=certificates(trained.model, rows, context),
        round_trip=round_trip(trained, rows, context),
        sample_seconds=sample_seconds,
        likelihood_seconds=likelihood_seconds,
        data=shown,
        samples=samples,
        density=density(trained, shown) if trained.event_shape == (2,) else None,
        levels=trained.levels,
        columns=columns,
        weighted=tuple(
            Weighted(k, len(found.log_prob), -float(found.log_prob.mean()), _standard_error(found.log_prob))
            for k, found in kept_results(trained, "test").items()
        ),
        entropy=None if mixture is None else mixture.entropy(),
    )


def tested_rows(trained: Trained, data: Dataset) -> tuple[Tensor, Tensor | None]:
    """The rows that a report measures, and their labels where the model wants them."""
    part = 2 if len(data.test) else 0
    most = TESTED_ROWS[trained.kind]
    labels = None if data.labels is None or trained.classes is None else data.labels[part][:most]
    return (data.train, data.validation, data.test)[part][:most], labels


def _shown(trained: Trained, data: Dataset) -> tuple[Tensor, int | None]:
    """Training rows to look at; of a conditional model's images, all classes in turn, a column for each."""
    count = min(SHOWN_ROWS[trained.kind], len(data.train))
    columns = class_columns(trained.classes, count)
    if columns is None or data.labels is None:
        return data.train[:count], None
    each = [(data.labels[0] == k).nonzero().flatten() for k in range(columns)]
    lines = min(count // columns, *map(len, each))
    if lines == 0:
        return data.train[:count], None
    return data.train[torch.stack([places[:lines] for places in each], dim=1).flatten()], columns


def _standard_error(values: Tensor) -> float:
    return float(values.std()) / math.sqrt(len(values)) if len(values) > 1 else 0.0


def round_trip(trained: Trained, rows: Tensor, context: Tensor | None = None) -> float:
    """The largest |x − decode(encode(x))|; NaN where there is no way back.

    Of integers in their own unit; of other rows relative to the largest |x|.
    """
    try:
        error = trained.model.round_trip_error(rows, context)
    except (ConvergenceError, NonFiniteError):
        return math.nan
    if error is None:
        return math.nan
    largest = float(error.max())
    if trained.levels is not None:
        return largest
    return largest / float(rows.abs().max().clamp_min(torch.finfo(rows.dtype).tiny))


def density(trained: Trained, rows: Tensor) -> Density:
    """Over the range of the rows and a margin around it."""
    least, largest = rows.double().amin(0), rows.double().amax(0)
    margin = 0.12 * (largest - least).clamp_min(1e-6)
    (x0, y0), (x1, y1) = (least - margin).tolist(), (largest + margin).tolist()
    xs = torch.linspace(x0, x1, GRID, dtype=torch.float64)
    ys = torch.linspace(y0, y1, GRID, dtype=torch.float64)
    grid = torch.stack(torch.meshgrid(xs, ys, indexing="xy"), dim=-1)
    values = trained.log_likelihoods(grid.reshape(-1, 2)).exp().reshape(GRID, GRID)
    return Density(values, (x0, x1, y0, y1))
