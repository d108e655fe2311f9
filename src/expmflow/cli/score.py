"""`expmflow score`."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor

from expmflow._validation import expect
from expmflow.cli.console import Data, Device, progress, reading, result, say
from expmflow.cli.device import device_named
from expmflow.cli.dry_run import DryRun, run_text
from expmflow.cli.output import save_text
from expmflow.data.kinds import KINDS, Rows
from expmflow.data.kinds.base import csv_text
from expmflow.runs.evaluation import Advance, Trained, open_run
from expmflow.runs.importance import importance_estimates
from expmflow.runs.reference import load_reference
from expmflow.runs.typicality import Typicality, auroc

WEIGHTED_ROWS = 500  # validation rows that scores from importance samples are compared with


def score(
    run: Annotated[Path, typer.Argument(help="The folder of a run, or the name of a model such as digits.")],
    files: Annotated[
        list[Path],
        typer.Argument(
            metavar="FILE...",
            help=f"{'; '.join(dict.fromkeys(kind.files for kind in KINDS.values()))}.",
        ),
    ],
    out: Annotated[Path | None, typer.Option(help="A .csv or .json file; stdout, as CSV, if not given.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    reference: Annotated[
        list[Path] | None, typer.Option(help="Files of rows known to be normal, for an AUROC; may be repeated.")
    ] = None,
    fit: Annotated[
        bool, typer.Option("--fit", help="Bring images to the model's size, channels and grey levels.")
    ] = False,
    importance_samples: Annotated[
        int | None, typer.Option(help="Noise samples per image, for a tighter bound; one by default.")
    ] = None,
    quantile: Annotated[
        float, typer.Option(help="Flag rows that are less typical than this fraction of the held-out rows.")
    ] = 0.99,
    threshold: Annotated[
        float | None, typer.Option(help="Flag typicalities above this; overrides the quantile.")
    ] = None,
    data: Data = None,
    device: Device = None,
    dry_run: DryRun = False,
) -> None:
    """The likelihood of each row of a table, or of each image, and whether it is unlike the training data.

    The columns of a table may be in any order if they have the names of the run's columns; without names, their
    position counts. Images are cropped and resized as the run's data was; with --fit, to the form that the model takes.

    Printed columns: row, log_likelihood (nats), typicality, flagged. For images: name, bpd (bits per dimension) instead
    of the first two; for black-and-white images: name, nll (nats). The typicality is |nll − mean| / std, with the mean
    and the standard deviation of the validation rows: rows that are too likely are unusual too. Smooth images are
    likelier than photographs under a model of photographs, so low likelihood alone misses many outliers.

    With --reference, also the AUROC: how often a row of FILE is less typical than a row that is known to be normal,
    such as held-out images; 1 is perfect separation, 0.5 is chance. Writes only the file --out.

    Only importance samples need the run's own data: a run stores the likelihoods of its validation rows. A conditional
    model does not get the classes of FILE, and assumes that all classes are equally likely.
    """
    expect(out is None or out.suffix in (".csv", ".json"), "a .csv or .json file for the scores", out)
    expect(0 < quantile < 1, "a quantile between 0 and 1", quantile)
    expect(threshold is None or threshold >= 0, "a threshold of at least 0", threshold)
    trained = open_run(run, device_named(device), data)
    fitting = " or ".join(kind.name for kind in KINDS.values() if kind.takes_fit)
    expect(not fit or trained.kind.takes_fit, f"a model of {fitting} for --fit", f"a model of {trained.kind.name}")
    if importance_samples is not None:
        trained.model.check_weighable(importance_samples)
        expect(trained.classes is None, "a model without classes for importance samples of files", trained.name)
    with reading() as loading:
        rows = trained.kind.read(files, trained.layout, fit=fit, progress=loading)
        normal = trained.kind.read(reference, trained.layout, fit=fit, progress=loading) if reference else None
        held_out = _held_out(trained, importance_samples)
    if dry_run:
        result(_dry_run_text(trained, files, rows, held_out, importance_samples, out))
        return
    count = len(held_out.rows) + len(rows) + (0 if normal is None else len(normal))
    with progress("scoring", count) as advance:
        measured = held_out.nll
        if measured is None:
            measured = -_likelihoods(trained, held_out.rows, importance_samples, advance)
        typical = Typicality.of(measured, quantile=quantile, threshold=threshold)
        log_prob = _likelihoods(trained, rows.rows, importance_samples, advance)
        against = None if normal is None else _likelihoods(trained, normal.rows, importance_samples, advance)
    columns = _columns(trained, rows, log_prob, typical)
    separated = None if against is None else _auroc(log_prob, against, typical)
    in_json = _as_json(columns, typical, separated)
    if out is not None:
        save_text(out, in_json if out.suffix == ".json" else _as_csv(columns))
    if out is None or as_json:
        result((in_json if as_json else _as_csv(columns)).rstrip("\n"))
    flagged = sum(columns["flagged"])
    place = "" if out is None else f"; scores in {out}"
    say(f"{flagged} of {len(rows)} rows flagged (typicality above {typical.threshold:.3g}){place}")
    count = int(measured.isfinite().sum())
    if threshold is None and (count + 1) * (1 - quantile) < 1:
        say(
            f"{count} {held_out.part} rows are too few for a rate of {1 - quantile:.2g}: of new rows like them, "
            f"about {1 / (count + 1):.2g} are flagged. Lower --quantile, or give --threshold."
        )
    if separated is not None and normal is not None:
        found = f"{separated['typicality']:.3f} by typicality, {separated['bpd']:.3f} by low likelihood"
        say(f"AUROC against {len(normal)} reference rows: {found}")


@dataclass(frozen=True)
class HeldOut:
    """What scores are calibrated on: stored likelihoods, or rows whose likelihoods are still to be computed."""

    nll: Tensor | None
    rows: Tensor
    part: str = "held-out"


def _held_out(trained: Trained, samples: int | None) -> HeldOut:
    known = None if trained.place is not None or samples is not None else load_reference(trained)
    if known is not None:
        if known.held_out == "train":  # the model is more certain of them than of any others
            say("No rows were held out: scores are calibrated on training rows, and flag too many rows.")
        return HeldOut(known.scored, known.rows[:0], "training" if known.held_out == "train" else "held-out")
    data = trained.data()
    parts = [part for part in (data.validation, data.test, data.train) if len(part) > 1]
    expect(len(parts) > 0, "at least two rows of the run's data to calibrate scores on", "fewer")
    return HeldOut(None, parts[0][: trained.kind.measured_rows if samples is None else WEIGHTED_ROWS])


def _likelihoods(trained: Trained, rows: Tensor, samples: int | None, advance: Advance) -> Tensor:
    if samples is None:
        return trained.log_likelihoods(rows, advance)
    return importance_estimates(trained, rows, samples, advance=advance).log_prob


def _columns(trained: Trained, rows: Rows, log_prob: Tensor, typical: Typicality) -> dict[str, list[Any]]:
    """The columns by name, with an entry for each row."""
    scores = typical.score(-log_prob)
    columns = trained.kind.scored(rows, log_prob, trained.layout)
    flagged = (scores > typical.threshold).int()
    return {**columns, "typicality": scores.tolist(), "flagged": flagged.tolist()}


def _auroc(log_prob: Tensor, against: Tensor, typical: Typicality) -> dict[str, float]:
    return {
        "typicality": auroc(typical.score(-log_prob), typical.score(-against)),
        "bpd": auroc(-log_prob, -against),
    }


def _as_csv(columns: dict[str, list[Any]]) -> str:
    return csv_text(list(columns), zip(*columns.values(), strict=True))


def _as_json(columns: dict[str, list[Any]], typical: Typicality, separated: dict[str, float] | None) -> str:
    rows = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
    scores = {} if separated is None else {"auroc": separated}
    scores |= {"threshold": typical.threshold, "rows": [_finite(row) for row in rows]}  # type: ignore[dict-item]
    return json.dumps(scores, indent=2) + "\n"


def _finite(row: dict[str, Any]) -> dict[str, Any]:
    """None instead of infinity, which JSON does not have."""
    return {
        name: None if isinstance(value, float) and not torch.tensor(value).isfinite() else value
        for name, value in row.items()
    }


def _dry_run_text(
    trained: Trained, files: list[Path], rows: Rows, held_out: HeldOut, samples: int | None, out: Path | None
) -> str:
    copies = 1 if samples is None else samples
    all_rows = torch.cat([held_out.rows.to(rows.rows.dtype), rows.rows])
    names = ", ".join(map(str, files))
    noises = "" if samples is None else f", with {samples} noises each"
    others = f", and {len(held_out.rows)} of the run to measure them by" if len(held_out.rows) else ""
    return run_text(
        trained,
        lambda n: trained.log_likelihoods(all_rows[[k // copies for k in range(n)]]),
        len(all_rows),
        trained.batch_size,
        what=f"{len(rows)} of {names}{others}{noises}",
        writes=out,
        copies=copies,
    )
