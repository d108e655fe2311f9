"""`expmflow evaluate`."""

from __future__ import annotations

import json
import math
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from expmflow._validation import expect
from expmflow.cli.console import device_named, progress, result, result_table
from expmflow.cli.dry_run import DryRun, run_text
from expmflow.distributions import bits_per_dim
from expmflow.training.evaluation import LARGEST_BATCH, open_run


class Split(StrEnum):
    """Which rows of the run's data."""

    train = "train"
    validation = "validation"
    test = "test"


def evaluate(
    run: Annotated[Path, typer.Argument(help="The folder of a run.")],
    split: Annotated[Split, typer.Option(help="Which rows of the run's data.")] = Split.test,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    device: Annotated[str, typer.Option(help="cpu, cuda, …")] = "cpu",
    dry_run: DryRun = False,
) -> None:
    """The negative log-likelihood of a run's test rows, with its standard error.

    In nats per row, and in bits per dimension (the nats of a row over its features and log 2). Of a continuous density
    either may be negative. Writes nothing.
    """
    trained = open_run(run, device_named(device))
    rows = getattr(trained.data(), split.value)
    expect(len(rows) > 0, f"rows for {split.value} in the run's data", f"none: data.{split.value} is 0")
    if dry_run:
        what = f"{len(rows)} for {split.value}"
        result(run_text(trained, lambda n: trained.log_likelihoods(rows[:n]), len(rows), LARGEST_BATCH, what=what))
        return
    with progress("evaluating", len(rows)) as advance:
        log_prob = trained.log_likelihoods(rows, advance)
    lost = int((~log_prob.isfinite()).sum())
    expect(lost == 0, "a finite likelihood of every row", f"{lost} rows of {len(rows)} without")
    bpd = bits_per_dim(log_prob, trained.event_shape)
    root = math.sqrt(len(rows))
    error, bpd_error = ((float(v.std()) / root if len(rows) > 1 else 0.0) for v in (log_prob, bpd))
    found = {
        "run": str(run),
        "split": split.value,
        "rows": len(rows),
        "nll": -float(log_prob.mean()),
        "nll_standard_error": error,
        "bpd": float(bpd.mean()),
        "bpd_standard_error": bpd_error,
    }
    if as_json:
        result(json.dumps(found, indent=2))
    else:
        table = Table(title=f"{escape(str(run))}: {len(rows)} {split.value} rows", title_justify="left")
        for column in ("", "mean", "± standard error"):
            table.add_column(column, justify="left" if not column else "right")
        table.add_row("nll (nats)", f"{found['nll']:.4f}", f"{error:.4f}")
        table.add_row("bits per dimension", f"{found['bpd']:.4f}", f"{bpd_error:.4f}")
        result_table(table)
