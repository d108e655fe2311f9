"""`expmflow report`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from expmflow._validation import expect
from expmflow.cli.console import progress, result, say
from expmflow.cli.dry_run import DryRun, described, parameters, reads
from expmflow.cli.measure import Estimate, estimate, size_text, time_text
from expmflow.cli.output import save_text
from expmflow.report.html import render
from expmflow.report.summary import summarise, tested_rows
from expmflow.runs.evaluation import Trained, open_run
from expmflow.runs.shipped import place_beside
from expmflow.training.sampling import LARGEST_SAMPLE


def report(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN...", help="Folders of runs, or names of models such as digits.")
    ],
    out: Annotated[
        Path | None, typer.Option(help="An .html file; RUN/report.html for one run, report.html here for several.")
    ] = None,
    dry_run: DryRun = False,
) -> None:
    """One self-contained HTML page: curves, samples beside the data, tables; several runs side by side.

    Images are measured on the first 500 of the test, graphs on the first 20000; `expmflow evaluate` takes them all.
    What it has found with importance samples is on the page too.
    """
    expect(out is None or out.suffix == ".html", "an .html file", out)
    opened = [open_run(run) for run in runs]
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
    """Of what takes most of the time: likelihoods of test rows, and samples."""
    rows, labels = tested_rows(trained, trained.data())

    def likelihoods(n: int) -> object:
        return trained.log_likelihoods(rows[:n], labels=None if labels is None else labels[:n])

    parts = [estimate(likelihoods, len(rows), trained.batch_size)]
    parts.append(estimate(lambda n: trained.sample(n), trained.kind.report_rows, LARGEST_SAMPLE))
    return Estimate(sum(part.seconds for part in parts), max(part.bytes for part in parts))
