"""`expmflow score`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import torch
import typer

from expmflow._validation import expect
from expmflow.cli.console import device_named, progress, result, say
from expmflow.cli.dry_run import DryRun, run_text
from expmflow.cli.output import csv_text, save_text
from expmflow.data import DataError, load_table
from expmflow.training.evaluation import LARGEST_BATCH, ROWS_FOR_SCORES, Typicality, open_run


def score(
    run: Annotated[Path, typer.Argument(help="The folder of a run.")],
    file: Annotated[Path, typer.Argument(help="A .npy or .csv table with the columns of the run's data.")],
    out: Annotated[Path | None, typer.Option(help="A .csv file; stdout if not given.")] = None,
    quantile: Annotated[float, typer.Option(help="Flag rows less typical than this part of the training rows.")] = 0.99,
    threshold: Annotated[
        float | None, typer.Option(help="Flag typicalities above this, whatever the quantile.")
    ] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, …")] = "cpu",
    dry_run: DryRun = False,
) -> None:
    """The log-likelihood of each row of a table, and whether the row is unlike the training data.

    The columns of the file may stand in any order if they have the names of the run's; without names, their place
    counts.

    Printed columns: row, log_likelihood (nats), typicality, flagged. The typicality is |nll − mean| / std, with the
    mean and the standard deviation of the training rows: rows that are too likely are unusual too. Writes the file
    --out, and nothing else.
    """
    expect(out is None or out.suffix == ".csv", "a .csv file for the scores", out)
    expect(0 < quantile < 1, "a quantile between 0 and 1", quantile)
    expect(threshold is None or threshold >= 0, "a threshold of at least 0", threshold)
    trained = open_run(run, device_named(device))
    rows = load_table(file).arranged(trained.names)
    if tuple(rows.shape[1:]) != trained.event_shape:
        width = ", ".join(map(str, trained.event_shape))
        raise DataError(f"Expected {width} columns in {file}, as the run has; got {rows.shape[1]}.")
    known = trained.data().train[:ROWS_FOR_SCORES]
    if dry_run:
        all_rows = torch.cat([known, rows])
        text = run_text(
            trained,
            lambda n: trained.log_likelihoods(all_rows[:n]),
            len(all_rows),
            LARGEST_BATCH,
            what=f"{len(rows)} of {file}, and {len(known)} training rows to measure them against",
            writes=out,
        )
        result(text)
        return
    with progress("scoring", len(known) + len(rows)) as advance:
        typical = Typicality.of(-trained.log_likelihoods(known, advance), quantile=quantile, threshold=threshold)
        log_prob = trained.log_likelihoods(rows, advance)
    scores = typical.score(-log_prob)
    flagged = scores > typical.threshold
    columns = zip(range(1, len(rows) + 1), log_prob.tolist(), scores.tolist(), flagged.int().tolist(), strict=True)
    text = csv_text(("row", "log_likelihood", "typicality", "flagged"), columns)
    if out is None:
        result(text.rstrip("\n"))
    else:
        save_text(out, text)
    place = "" if out is None else f"; scores in {out}"
    say(f"{int(flagged.sum())} of {len(rows)} rows flagged (typicality above {typical.threshold:.3g}){place}")
