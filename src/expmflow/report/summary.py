"""The content of a report: numbers and arrays, before anything is drawn."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from expmflow.data.kinds import Kind, Layout, Unit
from expmflow.distributions import NonFiniteError
from expmflow.distributions.describe import count_parameters
from expmflow.distributions.protocol import Latents
from expmflow.numerics import ConvergenceError
from expmflow.report.certificates import Certificate, certificates
from expmflow.runs.evaluation import Advance, Trained
from expmflow.runs.importance import kept_results
from expmflow.runs.reference import Reference, reference_of


@dataclass(frozen=True)
class Weighted:
    """The bounds that `expmflow evaluate` computed from importance samples: −nats, over some of the test rows."""

    samples: int
    rows: int
    nll: float
    error: float
    elbo: float
    elbo_error: float


@dataclass(frozen=True)
class Summary:
    """All that a report shows of one run."""

    name: str
    kind: Kind
    layout: Layout
    config: dict[str, Any]
    parameters: int
    known: Reference
    records: list[dict[str, Any]]
    test_nll: float
    test_error: float
    certificates: list[Certificate]
    round_trip: float
    sample_seconds: float
    likelihood_seconds: float
    samples: Tensor
    density: Tensor | None = None
    is_bound: bool = False
    weighted: tuple[Weighted, ...] = ()
    entropy: float | None = None
    latents: Latents | None = None
    latents_of: str = "test"

    @property
    def unit(self) -> Unit:
        """The unit in which the literature reports such likelihoods."""
        return self.kind.unit(self.layout.event_shape)

    @property
    def best(self) -> dict[str, Any]:
        """The validation with the smallest nll; validations that were not finite are recorded as NaN."""
        validations = [r for r in self.records if math.isfinite(r.get("validation_nll", math.nan))]
        return min(validations, key=lambda r: r["validation_nll"], default={"step": 0, "validation_nll": math.nan})

    @property
    def seconds_per_step(self) -> float:
        """The mean over the run's records."""
        seconds = [r["seconds_per_step"] for r in self.records if "seconds_per_step" in r]
        return sum(seconds) / len(seconds) if seconds else math.nan

    @property
    def last_step(self) -> int:
        """The last step on record."""
        return max((r["step"] for r in self.records), default=0)


def summarise(trained: Trained, advance: Advance = lambda done: None) -> Summary:
    """Measure a run: samples, certificates, round trips, timings; and likelihoods, stored ones or those of its data."""
    known = reference_of(trained, advance)
    started = time.perf_counter()
    trained.log_likelihoods(known.rows, labels=known.labels)
    likelihood_seconds = (time.perf_counter() - started) / len(known.rows)
    started = time.perf_counter()
    samples = trained.sample(len(known.rows))
    sample_seconds = (time.perf_counter() - started) / len(samples)
    checked = trained.kind.report_checked
    labels = None if known.labels is None else known.labels[:checked]
    rows, context = trained.rows(known.rows[:checked]), trained.context(labels)
    nll = known.nll[known.tested]
    part, examples = ("train", known.rows) if known.examples is None else (known.tested, known.examples)
    return Summary(
        name=trained.name,
        kind=trained.kind,
        layout=trained.layout,
        config=trained.config.model_dump(mode="json"),
        parameters=count_parameters(trained.model),
        known=known,
        records=trained.folder.read_metrics(),
        test_nll=float(nll.mean()),
        test_error=_standard_error(nll),
        certificates=certificates(trained.model, rows, context),
        round_trip=round_trip(trained, rows, context),
        sample_seconds=sample_seconds,
        likelihood_seconds=likelihood_seconds,
        samples=samples,
        density=density(trained, known.rows),
        is_bound=trained.model.is_bound,
        weighted=tuple(
            Weighted(
                k,
                len(found.log_prob),
                -float(found.log_prob.mean()),
                _standard_error(found.log_prob),
                -float(found.elbo.mean()),
                _standard_error(found.elbo),
            )
            for k, found in kept_results(trained, "test").items()
        ),
        entropy=trained.kind.entropy(trained.config.data.name),
        latents=trained.model.latents(trained.rows(examples[:checked])) if len(examples) > 1 else None,
        latents_of=part,
    )


def _standard_error(values: Tensor) -> float:
    return float(values.std()) / math.sqrt(len(values)) if len(values) > 1 else 0.0


def round_trip(trained: Trained, rows: Tensor, context: Tensor | None = None) -> float:
    """The largest |x − decode(encode(x))|; NaN if there is no inverse.

    For integers in their own unit; for other rows relative to the largest |x|.
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


def density(trained: Trained, rows: Tensor) -> Tensor | None:
    """p(x) over the range of the rows, if they can be drawn in the plane."""
    place = trained.kind.landscape(rows)
    return None if place is None else trained.log_likelihoods(place.points).exp()
