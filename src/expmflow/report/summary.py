"""What a report says of a run: numbers and arrays, before anything is drawn."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from expmflow.distributions import NonFiniteError
from expmflow.numerics import ConvergenceError, SeriesPlan, plan_series
from expmflow.numerics.plan import series_error
from expmflow.training.evaluation import Trained
from expmflow.transforms.base import Transform, layer_name, watching
from expmflow.transforms.exponential import Exponential, GraphConvExp

SHOWN_ROWS = 3000
CHECKED_ROWS = 512
GRID = 240


@dataclass(frozen=True)
class Certificate:
    """One exponential layer: the norm of its operator, the plan for it, and the error that the plan keeps."""

    name: str
    kind: str
    norm: float
    log_norm: float
    plan: SeriesPlan


@dataclass(frozen=True)
class Density:
    """p(x) on a grid over the plane, `(GRID, GRID)`, the rows going up."""

    values: Tensor
    extent: tuple[float, float, float, float]


@dataclass(frozen=True)
class Summary:
    """All that is shown of one run."""

    name: str
    config: dict[str, Any]
    parameters: int
    rows: dict[str, int]
    records: list[dict[str, Any]]
    test_nll: float
    test_error: float
    certificates: list[Certificate]
    round_trip: float
    sample_seconds: float
    likelihood_seconds: float
    data: Tensor
    samples: Tensor
    density: Density | None = field(default=None)

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
    """Measure a run: likelihoods, samples, certificates, round trips, timings."""
    data = trained.data()
    tested = data.test if len(data.test) else data.train
    started = time.perf_counter()
    log_prob = trained.log_likelihoods(tested)
    likelihood_seconds = (time.perf_counter() - started) / len(tested)
    shown = data.train[:SHOWN_ROWS]
    started = time.perf_counter()
    samples = trained.sample(len(shown))
    sample_seconds = (time.perf_counter() - started) / len(samples)
    checked = trained.rows(tested[:CHECKED_ROWS])
    return Summary(
        name=str(trained.folder.path),
        config=trained.config.model_dump(mode="json"),
        parameters=sum(p.numel() for p in trained.model.parameters()),
        rows={"training": len(data.train), "validation": len(data.validation), "test": len(data.test)},
        records=trained.folder.read_metrics(),
        test_nll=-float(log_prob.mean()),
        test_error=float(log_prob.std()) / math.sqrt(len(tested)) if len(tested) > 1 else 0.0,
        certificates=certificates(trained, checked),
        round_trip=round_trip(trained, checked),
        sample_seconds=sample_seconds,
        likelihood_seconds=likelihood_seconds,
        data=shown,
        samples=samples,
        density=density(trained, shown) if trained.event_shape == (2,) else None,
    )


@torch.no_grad()
def certificates(trained: Trained, rows: Tensor) -> list[Certificate]:
    """Of every exponential in the model, at the shape that it meets there."""
    flow = trained.flow
    if flow is None:
        return []
    shapes: dict[Transform, tuple[int, ...]] = {}

    def note(layer: Transform, x: Tensor, *results: Tensor) -> None:
        shapes[layer] = tuple(x.shape[1:])  # an exponential keeps the shape

    with watching(note):
        flow.transform(rows[:1])
    found = []
    for name, layer in flow.named_modules():
        if not isinstance(layer, Exponential) or isinstance(layer, GraphConvExp) or layer not in shapes:
            continue  # a graph exponential has a norm for each graph
        op, shape = layer.operator(), shapes[layer]
        norm, log_norm = float(op.norm_bound(shape)), float(op.log_norm_bound(shape))
        plan = plan_series(norm, layer.tol, rows.dtype, log_norm=log_norm)
        if layer.terms is not None:
            error = series_error(norm, 1, layer.terms, torch.finfo(rows.dtype).eps / 2, max(log_norm, 0.0))
            plan = SeriesPlan(1, layer.terms, error)
        found.append(Certificate(name, layer_name(layer), norm, log_norm, plan))
    return found


@torch.no_grad()
def round_trip(trained: Trained, rows: Tensor) -> float:
    """The largest |x − decode(encode(x))|, relative to the largest |x|; NaN where there is no way back."""
    flow = trained.flow
    if flow is None or not rows.is_floating_point():
        return math.nan
    try:
        back = flow.decode(flow.encode(rows))
    except (ConvergenceError, NonFiniteError):
        return math.nan
    return float((back - rows).abs().max() / rows.abs().max().clamp_min(torch.finfo(rows.dtype).tiny))


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
