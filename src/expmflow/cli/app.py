"""All commands in one place; each is loaded on first use, so that --help does not wait for torch."""

from __future__ import annotations

from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from expmflow import __version__
from expmflow.cli.console import speaks

SUMMARIES = {  # the first paragraphs of the commands' own descriptions
    "train": "Train a model, or resume an interrupted run. Writes only to the run's folder.",
    "evaluate": "Print the negative log-likelihood of a run's test rows, with its standard error.",
    "sample": "Draw samples from a run's density. Writes the file --out, and nothing else.",
    "score": "The likelihood of each row of a table, or of each image, and whether it is unlike the training data.",
    "report": "Write one self-contained HTML page: curves, samples beside the data, tables; several runs side by side.",
    "data": "Describe a data set: its rows, their shape and ranges, classes, splits.",
    "reproduce": "Run a table of the paper row by row; interrupted rows are resumed, finished rows are not run again.",
    "figures": "Draw the paper's figures as PNG and SVG; without --only, all whose trained models are available.",
    "export": "Write a model as a program that runs without expmflow: for torch alone, or as ONNX.",
}
EXAMPLES = {
    "train": "expmflow train moons train.steps=1000 optim.lr=0.001 --out runs/first",
    "evaluate": "expmflow evaluate runs/digits --images 500 --importance-samples 1000",
    "sample": "expmflow sample runs/digits -n 64 --temperature 0.9 --out grid.png",
    "score": "expmflow score runs/moons measurements.csv --out scores.csv",
    "report": "expmflow report runs/first runs/second --out comparison.html",
    "data": "expmflow data measurements.csv",
    "reproduce": "expmflow reproduce graph --preset laptop --only mog-4",
    "figures": "expmflow figures --only matrix --only terms --out figures",
    "export": "expmflow export digits --out digits.pt2",
}


class Commands(TyperGroup):
    """Commands that are only names and summaries until one of them is called."""

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        name, command, rest = super().resolve_command(ctx, args)
        return name, command if command is None or name is None else load_command(name), rest


def load_command(name: str) -> Any:
    """Load the command from the module of its name."""
    from expmflow.cli.errors import guarded

    only = typer.Typer(add_completion=False)
    only.callback()(lambda: None)
    function = getattr(import_module(f"expmflow.cli.{name}"), name)
    only.command(name, epilog=f"Example: {EXAMPLES[name]}")(guarded(function))
    group = typer.main.get_command(only)
    return group.commands[name]  # type: ignore[attr-defined]


app = typer.Typer(
    cls=Commands,
    help="Exact-likelihood models made of exponentials of linear operators.",
    epilog="Example: expmflow train moons && expmflow report runs/moons",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
for command, summary in SUMMARIES.items():
    app.command(command, help=summary)(lambda: None)


def _version(asked: bool) -> None:
    if not asked:
        return
    import torch

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
