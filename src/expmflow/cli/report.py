"""`expmflow report`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from expmflow._validation import expect
from expmflow.cli.console import progress, result, say
from expmflow.cli.dry_run import DryRun, described, parameters, reads
from expmflow.cli.output import save_text
from expmflow.report.html import render
from expmflow.report.summary import summarise
from expmflow.training.evaluation import open_run
from expmflow.training.shipped import place_beside


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
        result(described({**read, "writes": str(target)}))
        return
    with progress("reporting", len(opened)) as advance:
        summaries = []
        for trained in opened:
            summaries.append(summarise(trained))
            advance(1)
        page = render(summaries)
    save_text(target, page)
    say(f"report in {target}")
