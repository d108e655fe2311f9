"""`expmflow reproduce`."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from expmflow._validation import expect
from expmflow.cli.console import progress, result, say, speaks
from expmflow.experiments import graph


class Experiment(StrEnum):
    """The paper's experiments that are here."""

    graph = "graph"


class Preset(StrEnum):
    """How long, which models, and whether gradients are clipped."""

    laptop = "laptop"
    paper = "paper"
    best = "best"
    clipped = "clipped"


def reproduce(
    experiment: Annotated[Experiment, typer.Argument(help="Which of the paper's tables.")],
    preset: Annotated[Preset, typer.Option(help="Short, the paper's, our best, or MoG-16 clipped.")] = Preset.laptop,
    only: Annotated[list[str] | None, typer.Option(help="Rows whose name begins so; all if not given.")] = None,
    runs: Annotated[Path, typer.Option(help="Where the runs are written.")] = Path("runs/reproduce"),
    results: Annotated[Path, typer.Option(help="Where the table and the weights are written.")] = Path("results"),
    threads: Annotated[int | None, typer.Option(help="Threads of each run.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List the rows; run and write nothing.")] = False,
) -> None:
    """Run a table of the paper, row by row. A row that was cut is resumed; one that is done is not run again.

    Each row is a run of its own below --runs; its result goes into --results at once, with its weights beside it. With
    many processes: torchrun --standalone --nproc-per-node 2 -m expmflow reproduce graph.
    """
    table_rows = graph.table_rows(preset)
    known = ", ".join(row.name for row in table_rows)
    strange = [name for name in only or [] if not any(row.name.startswith(name) for row in table_rows)]
    expect(not strange, f"--only to begin the name of a row ({known})", ", ".join(strange))
    rows = [row for row in table_rows if not only or any(row.name.startswith(name) for name in only)]
    table = results / (f"{experiment.value}.json" if preset is Preset.paper else f"{experiment.value}-{preset}.json")
    weights = table.with_suffix("")
    done = {graph.Row(r["data"], r["model"], r["seed"]).name for r in graph.load_results(table)}
    steps = graph.PRESETS[preset]["steps"]
    for row in rows:
        if dry_run:
            result(f"{row.name}: done, in {table}" if row.name in done else f"{row.name}: {steps} steps")
            continue
        if row.name in done:
            say(f"{row.name}: done already, in {table}; with another --results it is run again")
            continue
        with progress(row.name, steps) as advance:
            last = 0

            def step(number: int, advance=advance) -> None:  # type: ignore[no-untyped-def]
                nonlocal last
                advance(number - last)
                last = number

            place = runs / experiment.value / preset
            graph.train_row(row, preset, place, threads=threads, on_step=step)
            if not speaks():  # of several processes one tests and writes
                continue
            found = graph.measure_row(row, preset, place, weights)
        graph.save_results(table, [*graph.load_results(table), found], preset)
        say(f"{row.name}: {found['nats_per_node']:.4f} nats per node (paper {found['paper']:.2f})")
    if not dry_run:
        say(f"The table is in {table.with_suffix('.md')}")
