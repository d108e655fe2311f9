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


def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="The folders of one or more runs.")],
    out: Annotated[
        Path | None, typer.Option(help="An .html file; RUN/report.html for one run, report.html here for several.")
    ] = None,
    dry_run: DryRun = False,
) -> None:
    """One self-contained HTML page: curves, densities, samples, tables; several runs side by side."""
    target = out or (runs[0] / "report.html" if len(runs) == 1 else Path("report.html"))
    expect(target.suffix == ".html", "an .html file", target)
    opened = [open_run(run) for run in runs]
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
