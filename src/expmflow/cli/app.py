"""All the commands in one place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import torch
import typer

from expmflow import __version__
from expmflow.cli.console import speaks
from expmflow.cli.data import data
from expmflow.cli.errors import guarded
from expmflow.cli.evaluate import evaluate
from expmflow.cli.figures import figures
from expmflow.cli.report import report
from expmflow.cli.reproduce import reproduce
from expmflow.cli.sample import sample
from expmflow.cli.score import score
from expmflow.cli.train import train

app = typer.Typer(
    help="Exact-likelihood models made of exponentials of linear operators.",
    epilog="Example: expmflow train moons && expmflow report runs/moons",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)

EXAMPLES: dict[Callable[..., None], str] = {
    train: "expmflow train moons train.steps=1000 optim.lr=0.001 --out runs/first",
    evaluate: "expmflow evaluate runs/digits --images 500 --importance-samples 1000",
    sample: "expmflow sample runs/digits -n 64 --temperature 0.9 --out grid.png",
    score: "expmflow score runs/moons measurements.csv --out scores.csv",
    report: "expmflow report runs/first runs/second --out comparison.html",
    data: "expmflow data measurements.csv",
    reproduce: "expmflow reproduce graph --preset laptop --only mog-4",
    figures: "expmflow figures --only matrix --only terms --out figures",
}

for function, example in EXAMPLES.items():
    app.command(epilog=f"Example: {example}")(guarded(function))


def _version(asked: bool) -> None:
    if not asked:
        return
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    if speaks():
        typer.echo(f"expmflow {__version__}, torch {torch.__version__}, device {device}")
    raise typer.Exit


@app.callback()
def start(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Name expmflow, torch and the device.")
    ] = False,
) -> None:
    """Exact-likelihood models made of exponentials of linear operators."""
