"""`expmflow reproduce`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import torch
import typer

from expmflow._validation import expect, expect_one_of
from expmflow.cli.console import Device, by_step_number, progress, result, say, speaks
from expmflow.cli.device import device_named
from expmflow.experiments.experiment import Experiment, Row
from expmflow.experiments.page import update_page
from expmflow.experiments.registry import EXPERIMENTS
from expmflow.training.locks import InUseError, locked

if TYPE_CHECKING:
    Name = str
    Preset = str
else:  # the names follow the registry, and a wrong one is refused before anything is run
    presets = dict.fromkeys(preset for table in EXPERIMENTS.values() for preset in table.presets)
    Name = StrEnum("Name", {name: name for name in EXPERIMENTS})
    Preset = StrEnum("Preset", {preset: preset for preset in presets})


def _about_presets() -> str:
    """A description of each preset, given once if tables share it."""
    tables: dict[tuple[str, str], list[str]] = {}
    for name, table in EXPERIMENTS.items():
        for preset, about in table.presets.items():
            tables.setdefault((preset, about), []).append(name)
    return "; ".join(f"{preset} ({', '.join(names)}): {about}" for (preset, about), names in tables.items())


def reproduce(
    experiment: Annotated[Name, typer.Argument(help="Which of the paper's tables.")],
    preset: Annotated[Preset, typer.Option(help=f"{_about_presets()}.")] = "laptop",
    only: Annotated[list[str] | None, typer.Option(help="Rows whose names begin like this; all by default.")] = None,
    runs: Annotated[Path, typer.Option(help="The folder of the runs.")] = Path("runs/reproduce"),
    results: Annotated[Path, typer.Option(help="The folder of the table and its files.")] = Path("results"),
    threads: Annotated[int | None, typer.Option(help="Threads of each run.")] = None,
    device: Device = None,
    time: Annotated[
        bool, typer.Option("--time", help="Run nothing; measure the step time of each finished row again.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List the rows; run and write nothing.")] = False,
) -> None:
    """Run a table of the paper row by row; interrupted rows are resumed, finished rows are not run again.

    Each row is a separate run below --runs, and its result is written to --results at once. Several processes of the
    same command share the rows. To train each row with many processes, of which one measures all rows at the end:
    torchrun --standalone --nproc-per-node 2 -m expmflow reproduce graph.
    """
    experiment, preset = str(experiment), str(preset)
    table = EXPERIMENTS[experiment]
    expect_one_of(preset, table.presets, f"--preset of {experiment}")
    device = device_named(device)
    for name, folder in (("--runs", runs), ("--results", results)):  # before hours of training, not after
        expect(not folder.exists() or folder.is_dir(), f"{name} to be a folder", f"the file {folder}")
    table_rows = table.rows(preset)
    known = ", ".join(row.name for row in table_rows)
    strange = [name for name in only or [] if not any(row.name.startswith(name) for row in table_rows)]
    expect(not strange, f"--only to begin the name of a row ({known})", ", ".join(strange))
    rows = [row for row in table_rows if not only or any(row.name.startswith(name) for name in only)]
    path = table.results_file(results, preset)
    if time:
        _time_again(table, rows, preset, path, threads, device)
        return
    done = {table.row_name(r) for r in table.load(path)}
    if dry_run:
        for row in rows:
            steps = table.steps(row, preset)
            result(f"{row.name}: done, in {path}" if row.name in done else f"{row.name}: {steps} steps")
        return
    for row in rows:
        if row.name in done:
            say(f"{row.name}: done already, in {path}; with another --results it is run again")
    place, missing = runs / experiment / preset, [row for row in rows if row.name not in done]

    def measure(row: Row) -> None:
        if speaks():  # only one process tests and writes
            found = table.measure(row, preset, place, path.with_suffix(""), device=device)
            results.mkdir(parents=True, exist_ok=True)
            with locked(results, wait=True):
                table.save(path, [*table.load(path), found], preset)
                update_page(results)
            say(f"{row.name}: {table.summary(found)}")

    def train(row: Row) -> None:
        with progress(row.name, table.steps(row, preset)) as advance:
            table.train(row, preset, place, threads=threads, device=device, on_step=by_step_number(advance))

    if os.environ.get("WORLD_SIZE", "1") == "1":
        for row in missing:
            run = table.run_folder(row, place)
            run.mkdir(parents=True, exist_ok=True)
            try:
                with locked(run):
                    if row.name not in {table.row_name(r) for r in table.load(path)}:  # by another process meanwhile
                        train(row)
                        measure(row)
            except InUseError:
                say(f"{row.name}: left to the other process that works on it")
    else:
        for row in missing:
            train(row)
        for row in missing:  # at the end, when nobody waits for the process that measures
            measure(row)
    say(f"The table is in {path.with_suffix('.md')}")


def _time_again(
    table: Experiment[Any], rows: Sequence[Row], preset: str, path: Path, threads: int | None, device: str
) -> None:
    """Measure the seconds again: rows may have been trained beside other work."""
    found = {table.row_name(result): result for result in table.load(path)}
    done = [row for row in rows if row.name in found]
    for row in done:
        seconds = table.step_time(row, preset, threads=threads, device=device)
        found[row.name] |= {"seconds_per_step": round(seconds, 4), "timed_threads": torch.get_num_threads()}
        say(f"{row.name}: {seconds:.3f} seconds a step")
    if done:
        table.save(path, list(found.values()), preset)
    else:
        say(f"No row is done in {path}: nothing was measured")
