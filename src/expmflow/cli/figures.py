"""`expmflow figures`."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from expmflow._validation import expect
from expmflow.cli.console import progress, say
from expmflow.experiments.figures import FIGURES, MissingWeightsError, Sources, write_figure

if TYPE_CHECKING:
    Name = str
else:  # the names follow the registry
    Name = StrEnum("Name", {name: name for name in FIGURES})
RESULTS = Path("results")
ABOUT = "; ".join(f"{name}, {entry.about}" for name, entry in FIGURES.items())


def figures(
    out: Annotated[Path, typer.Option(help="The folder to write to.")] = Path("figures"),
    only: Annotated[list[Name] | None, typer.Option(help=f"One figure, or several: {ABOUT}.")] = None,
    run: Annotated[
        str | None,
        typer.Option(
            help="The model of the sampled images; by default the best Sylvester flow in --results, or digits."
        ),
    ] = None,
    results: Annotated[Path, typer.Option(help="The folder of the tables, with the weights beside them.")] = RESULTS,
) -> None:
    """Draw the paper's figures as PNG and SVG; without --only, all whose trained models are available."""
    expect(not out.exists() or out.is_dir(), "--out to be a folder", f"the file {out}")
    expect(results == RESULTS or results.is_dir(), "--results to be a folder", f"none at {results}")
    sources, names = Sources(results, run), []
    for name in map(str, only or FIGURES):  # check all before the first is drawn
        try:
            FIGURES[name].check(sources)
            names.append(name)
        except MissingWeightsError as error:
            if only:
                raise
            say(f"{name}: left out. {error}")
    with progress("drawing", len(names)) as advance:
        for name in names:
            written = write_figure(name, out, sources)
            say(f"{name}: {', '.join(map(str, written))}")
            advance(1)
