"""`expmflow evaluate`."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table
from torch import Tensor

from expmflow._validation import expect, expect_count
from expmflow.cli.console import Data, Device, progress, reading, result, result_table, say
from expmflow.cli.device import device_named
from expmflow.cli.dry_run import DryRun, run_text
from expmflow.data import DataError
from expmflow.data.kinds import NATS
from expmflow.runs.evaluation import Trained, open_run
from expmflow.runs.importance import CHUNK, Estimates, importance_estimates, results_file
from expmflow.runs.reference import Reference, load_reference


class Split(StrEnum):
    """Which rows of the run's data."""

    train = "train"
    validation = "validation"
    test = "test"


def evaluate(
    run: Annotated[Path, typer.Argument(help="The folder of a run, or the name of a model such as digits.")],
    split: Annotated[Split, typer.Option(help="Which rows of the run's data.")] = Split.test,
    images: Annotated[
        int | None, typer.Option("--images", "--rows", help="Evaluate at most this many rows, the first ones.")
    ] = None,
    importance_samples: Annotated[
        int | None, typer.Option(help="Noise samples per image, for the importance-weighted bound; 1000 in the paper.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    data: Data = None,
    device: Device = None,
    dry_run: DryRun = False,
) -> None:
    """Print the negative log-likelihood of a run's test rows, with its standard error.

    In nats per row, and in bits per dimension (the nats of a row divided by its number of features and log 2);
    black-and-white images only in nats. For a continuous density either may be negative. Graphs also have nats per
    node, and mixtures with a known entropy have that too.

    For images the result is a bound, −ELBO, from one noise sample for each image. With --importance-samples K it uses
    K samples, and also gives the tighter importance-weighted bound. This is slow, so each image's result is stored at
    once in RUN/evaluation, and the same command continues after an interruption. Nothing else is written.

    If the data is not available, the command shows what the run stores: the likelihoods of the first rows of each
    split. If --data holds other rows than the run's own, all of them are evaluated, whatever the split.
    """
    trained = open_run(run, device_named(device), data)
    if importance_samples is not None:
        trained.model.check_weighable(importance_samples)
    if images is not None:
        expect_count(images, "--images")
    try:
        rows, labels, split_name = _rows(trained, split, images)
    except DataError as error:
        other = dry_run or importance_samples is not None or data is not None
        known = None if other or not trained.data_is_away else load_reference(trained)
        if known is None:
            raise
        say(f"{str(error).rstrip('.')}: these are the values that the run stores.")
        _show(trained, {**_head(run, split.value), **_kept(trained, known, split, images)}, as_json)
        return
    if dry_run:
        result(_dry_run_text(trained, rows, labels, split, importance_samples))
        return
    found = {**_head(run, split_name), "rows": len(rows)}
    if importance_samples is None:
        with progress("evaluating", len(rows)) as advance:
            log_prob = trained.log_likelihoods(rows, advance, labels)
        lost = int((~log_prob.isfinite()).sum())
        expect(lost == 0, "a finite likelihood of every row", f"{lost} rows of {len(rows)} without")
        found |= _measures(trained, log_prob)
    else:
        kept = results_file(trained, split.value, importance_samples)
        say(f"{'Going on with' if kept.exists() else 'Results are kept in'} {kept}")
        estimates = _weighted(trained, rows, labels, importance_samples, kept)
        found |= {**_measures(trained, estimates.elbo), "importance_samples": importance_samples}
        weighted = _measures(trained, estimates.log_prob)
        found |= {f"importance_weighted_{name}": value for name, value in weighted.items()} | {"kept_in": str(kept)}
    _show(trained, found, as_json)


def _head(run: Path, split: str) -> dict[str, Any]:
    return {"run": str(run), "split": split}


def _kept(trained: Trained, known: Reference, split: Split, images: int | None) -> dict[str, Any]:
    """The measures of the rows whose likelihoods the run stores."""
    nll = known.nll[split.value][:images]
    _expect_rows(trained, split, len(nll))
    expect(bool(nll.isfinite().all()), "a finite likelihood of every row", "some without")
    return {"rows": len(nll), **_measures(trained, -nll)}


def _expect_rows(trained: Trained, split: Split, count: int) -> None:
    """Refuse an empty split: a small fraction of few rows may be none."""
    share = getattr(trained.config.data, split.value, None)
    asked = "" if share is None else f", by data.{split.value}={share:g}; take another --split"
    expect(count > 0, f"rows for {split.value} in the run's data", f"none{asked}")


def _show(trained: Trained, found: dict[str, Any], as_json: bool) -> None:
    if trained.model.is_bound:
        found["bound"] = "elbo"
    entropy = trained.kind.entropy(trained.config.data.name)
    if entropy is not None:
        found[_entropy(trained)] = entropy
        found[_gap(trained)] = found[trained.unit.key] - entropy
    if as_json:
        result(json.dumps(found, indent=2))
    else:
        result_table(_table(trained, found))


def _rows(trained: Trained, split: Split, images: int | None) -> tuple[Tensor, Tensor | None, str]:
    """The requested rows, their labels if the model takes them, and the name of their split."""
    with reading() as loading:
        data = trained.data(loading)
    if not len(data.train):
        return data.test[:images], None, "other"
    rows: Tensor = getattr(data, split.value)[:images]
    _expect_rows(trained, split, len(rows))
    if trained.classes is None or data.labels is None:
        return rows, None, split.value
    return rows, data.labels[list(Split).index(split)][:images], split.value


def _weighted(trained: Trained, rows: Tensor, labels: Tensor | None, samples: int, kept: Path) -> Estimates:
    with progress("evaluating", len(rows)) as advance:
        return importance_estimates(trained, rows, samples, labels, kept_in=kept, advance=advance)


def _measures(trained: Trained, log_prob: Tensor) -> dict[str, float]:
    """Means with their standard errors, in every unit for such rows."""
    units = {unit.key: -log_prob * unit.per_nat for unit in trained.kind.units(trained.event_shape)}
    found = {}
    for name, values in units.items():
        found[name] = float(values.mean())
        found[f"{name}_standard_error"] = float(values.std()) / math.sqrt(len(values)) if len(values) > 1 else 0.0
    return found


def _table(trained: Trained, found: dict[str, Any]) -> Table:
    title = f"{escape(found['run'])}: {found['rows']} {found['split']} rows"
    table = Table(title=title, title_justify="left")
    for column in ("", "mean", "± standard error"):
        table.add_column(column, justify="left" if not column else "right")
    for label, name in _lines(trained, found):
        error = found.get(f"{name}_standard_error")
        table.add_row(label, f"{found[name]:.4f}", "" if error is None else f"{error:.4f}")
    return table


def _lines(trained: Trained, found: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """The label of each number, and its key."""
    other, bound = trained.kind.units(trained.event_shape)[-1], trained.model.is_bound
    yield "−ELBO (nats)" if bound else "nll (nats)", "nll"
    if other != NATS:
        yield f"−ELBO, {other.name}" if bound else other.name, other.key
    if "importance_samples" in found:
        yield "importance-weighted nll (nats)", "importance_weighted_nll"
        if other != NATS:
            yield f"importance-weighted, {other.name}", f"importance_weighted_{other.key}"
    if _entropy(trained) in found:
        yield f"entropy of the data, {trained.unit.name}", _entropy(trained)
        yield f"gap, {trained.unit.name}", _gap(trained)


def _entropy(trained: Trained) -> str:
    return f"entropy_{trained.unit.key.removeprefix('nats_')}"


def _gap(trained: Trained) -> str:
    return f"gap_{trained.unit.key.removeprefix('nats_')}"


def _dry_run_text(trained: Trained, rows: Tensor, labels: Tensor | None, split: Split, samples: int | None) -> str:
    what = f"{len(rows)} for {split.value}" + ("" if samples is None else f" with {samples} noises each")
    copies = 1 if samples is None else samples

    def work(n: int) -> Tensor:
        chosen = slice(0, n) if samples is None else [k // samples for k in range(n)]
        return trained.log_likelihoods(rows[chosen], labels=None if labels is None else labels[chosen])

    batch = trained.batch_size if samples is None else CHUNK
    kept = None if samples is None else results_file(trained, split.value, samples)
    return run_text(trained, work, len(rows), batch, what=what, writes=kept, copies=copies)
