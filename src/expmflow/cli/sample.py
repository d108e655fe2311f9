"""`expmflow sample`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from expmflow._validation import expect, expect_count
from expmflow.cli.console import device_named, progress, result, say
from expmflow.cli.dry_run import DryRun, run_text
from expmflow.cli.output import save_npy, save_text, table_text, write_whole
from expmflow.report.figures import samples_figure, save_figure
from expmflow.training.evaluation import open_run
from expmflow.training.sampling import LARGEST_SAMPLE


def sample(
    run: Annotated[Path, typer.Argument(help="The folder of a run.")],
    n: Annotated[int, typer.Option("-n", "--number", help="How many.")] = 16,
    temperature: Annotated[float, typer.Option(help="Factor of the noise's standard deviation.")] = 1.0,
    seed: Annotated[int, typer.Option(help="The same seed draws the same samples.")] = 0,
    out: Annotated[Path | None, typer.Option(help="A .npy, .csv or .png file; stdout, as CSV, if not given.")] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, …")] = "cpu",
    dry_run: DryRun = False,
) -> None:
    """Draw samples from a run's density. Writes the file --out, and nothing else."""
    kind = ".csv" if out is None else out.suffix
    expect(kind in (".npy", ".csv", ".png"), "a .npy, .csv or .png file", out)
    trained = open_run(run, device_named(device))
    if dry_run:
        expect_count(n, "the number of samples")
        text = run_text(
            trained,
            lambda rows: trained.sample(rows, temperature=temperature, seed=seed),
            n,
            LARGEST_SAMPLE,
            what=f"{n} samples",
            writes=out,
        )
        result(text)
        return
    with progress("sampling", n) as advance:
        drawn = trained.sample(n, temperature=temperature, seed=seed, advance=advance)
    if out is None:
        result(table_text(drawn, trained.names).rstrip("\n"))
        return
    if kind == ".npy":
        save_npy(out, drawn)
    elif kind == ".csv":
        save_text(out, table_text(drawn, trained.names))
    else:
        figure = samples_figure(None, drawn)
        write_whole(out, lambda temporary: save_figure(figure, temporary))
    say(f"{n} samples in {out}")
