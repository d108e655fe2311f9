"""`expmflow report`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import torch
import typer

from expmflow._validation import expect
from expmflow.cli.console import Data, progress, result, say
from expmflow.cli.dry_run import DryRun, described, parameters, reads
from expmflow.cli.measure import Estimate, estimate, size_text, time_text
from expmflow.cli.output import save_text
from expmflow.report.html import render
from expmflow.report.summary import summarise
from expmflow.runs.evaluation import Trained, open_run
from expmflow.runs.reference import load_reference
from expmflow.runs.shipped import place_beside
from expmflow.training.sampling import LARGEST_SAMPLE


def report(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN...", help="Folders of runs, or names of models such as digits.")
    ],
    out: Annotated[
        Path | None,
        typer.Option(help="An .html file; by default RUN/report.html, or report.html in this folder for several runs."),
    ] = None,
    data: Data = None,
    dry_run: DryRun = False,
) -> None:
    """Write one self-contained HTML page: curves, samples beside the data, tables; several runs side by side.

    A finished run stores what the page shows of its data: the likelihoods of the first 500 images of each split, or of
    the first 10000 rows or graphs, and some rows to show. `expmflow evaluate` takes all test rows; its results with
    importance samples are on the page too.
    """
    expect(data is None or len(runs) == 1, "one run for --data", len(runs))
    expect(out is None or out.suffix == ".html", "an .html file", out)
    opened = [open_run(run, data=data) for run in runs]
    target = out or (place_beside(opened[0].folder.path) if len(runs) == 1 else Path()) / "report.html"
    if dry_run:
        read = {f"run {k}": f"{reads(t)}; {parameters(t.model)} parameters" for k, t in enumerate(opened, start=1)}
        costs = [_cost(trained) for trained in opened]
        taken = {
            "memory": f"about {size_text(max(cost.bytes for cost in costs))}, for the largest batch",
            "time": f"about {time_text(sum(cost.seconds for cost in costs))}, for likelihoods and samples",
        }
        result(described({**read, "writes": str(target), **taken}))
        return
    with progress("reporting", len(opened)) as advance:
        summaries = []
        for trained in opened:
            summaries.append(summarise(trained))
            advance(1)
        page = render(summaries)
    save_text(target, page)
    say(f"report in {target}")


def _cost(trained: Trained) -> Estimate:
    """The cost of the slowest parts: likelihoods of test rows, and samples."""
    known = None if trained.place is not None else load_reference(trained)
    if known is None:
        data = trained.data()
        rows = torch.cat([part[: trained.kind.measured_rows] for part in (data.train, data.validation, data.test)])
    else:
        rows = known.rows
    parts = [estimate(lambda n: trained.log_likelihoods(rows[:n]), len(rows), trained.batch_size)]
    parts.append(estimate(lambda n: trained.sample(n), trained.kind.report_rows, LARGEST_SAMPLE))
    return Estimate(sum(part.seconds for part in parts), max(part.bytes for part in parts))
