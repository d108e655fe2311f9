"""Likelihoods of discrete rows by importance sampling: a bound that is exact in the limit."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from expmflow._validation import expect
from expmflow.distributions import elbo, importance_weighted
from expmflow.runs.evaluation import Advance, Trained, tolerant_likelihood
from expmflow.runs.shipped import place_beside
from expmflow.training.files import parse_json
from expmflow.training.randomness import Randomness

CHUNK = 64  # importance samples of one row that are computed at a time


@dataclass(frozen=True)
class Estimates:
    """For each row: the evidence lower bound and the importance-weighted bound, in nats."""

    elbo: Tensor
    log_prob: Tensor


def importance_estimates(
    trained: Trained,
    rows: Tensor,
    samples: int,
    labels: Tensor | None = None,
    *,
    kept_in: Path | None = None,
    advance: Advance = lambda done: None,
) -> Estimates:
    """Bounds on log P of each row, from `samples` noise samples that depend only on the seed and the row's place.

    Args:
        rows: integers, as in the model's training data.
        samples: noise samples for each row.
        labels: the classes of the rows, for a conditional model.
        kept_in: a file that stores each row's result at once; a second call continues from it.
        advance: called with the number of finished rows.
    """
    trained.model.check_weighable(samples)
    expect(trained.classes is None or labels is not None, "labels for the rows of a conditional model", "none")
    known = {k: values for k, of, values in (_read(kept_in) if kept_in else ()) if k < len(rows) and of == _of(rows[k])}
    estimates = []
    for k in range(len(rows)):
        if k not in known:
            known[k] = _estimate(trained, rows[k], samples, None if labels is None else labels[k], k)
            if kept_in:
                _append(kept_in, k, _of(rows[k]), known[k])
        estimates.append(known[k])
        advance(1)
    return _stacked(estimates)


def results_file(trained: Trained, split: str, samples: int) -> Path:
    """Where the estimates of a run are stored: a separate file for other weights, rows or samples."""
    return place_beside(trained.folder.path) / "evaluation" / f"{split}-{samples}-{_digest(trained)}.jsonl"


def kept_results(trained: Trained, split: str) -> dict[int, Estimates]:
    """The stored results of the run's current weights: for each number of samples, the finished rows."""
    estimates = {}
    folder, digest = place_beside(trained.folder.path) / "evaluation", _digest(trained)
    for path in folder.glob(f"{split}-*-{digest}.jsonl"):
        samples = path.name.removeprefix(f"{split}-").partition("-")[0]
        rows = {k: values for k, _, values in _read(path)}
        if samples.isdecimal() and rows:
            estimates[int(samples)] = _stacked(rows[k] for k in sorted(rows))
    return dict(sorted(estimates.items()))


def _digest(trained: Trained) -> str:
    """A checksum of the weights, and of the source of the rows."""
    data = json.dumps(trained.config.data.model_dump(mode="json"), sort_keys=True).encode()
    return hashlib.sha256(trained.folder.weights.read_bytes() + data).hexdigest()[:12]


def _stacked(values: Iterable[tuple[float, float]]) -> Estimates:
    both = torch.tensor(list(values), dtype=torch.float64).reshape(-1, 2)
    return Estimates(both[:, 0], both[:, 1])


@torch.no_grad()
def _estimate(trained: Trained, row: Tensor, samples: int, label: Tensor | None, place: int) -> tuple[float, float]:
    randomness = Randomness(trained.config.train.seed)
    weights = []
    for chunk, start in enumerate(range(0, samples, CHUNK)):
        count = min(CHUNK, samples - start)
        drawn = randomness.draws(trained.model.draws, CHUNK, "importance", place, chunk)
        noise = [trained.rows(part[:count]) for part in drawn]
        copies = trained.rows(row.expand(count, *row.shape))
        context = trained.context(None if label is None else label.expand(count))
        weights.append(tolerant_likelihood(trained.model, copies, noise, context).double().cpu())
    log_weights = torch.cat(weights).unsqueeze(1)
    return float(elbo(log_weights)), float(importance_weighted(log_weights))


def _of(row: Tensor) -> str:
    """A checksum of a row."""
    return hashlib.sha256(row.contiguous().cpu().numpy().tobytes()).hexdigest()[:12]


def _read(path: Path) -> Iterator[tuple[int, str, tuple[float, float]]]:
    """The complete lines of the file, with the checksum of their row; incomplete ones are computed again."""
    if path.is_file():
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                record = parse_json(line)
                yield int(record["row"]), str(record["of"]), (float(record["elbo"]), float(record["log_prob"]))
            except (KeyError, OverflowError, TypeError, ValueError):
                continue


def _append(path: Path, row: int, of: str, values: tuple[float, float]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    line = json.dumps({"row": row, "of": of, "elbo": values[0], "log_prob": values[1]})
    with open(path, "a", encoding="utf-8") as file:
        file.write(f"\n{line}\n")  # ends an incomplete line before it
