"""`expmflow export`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from expmflow.cli.console import reading, result, say
from expmflow.runs.export import export as write_program


def export(
    run: Annotated[Path, typer.Argument(help="The folder of a run, or the name of a model such as digits.")],
    out: Annotated[Path, typer.Option(help="A .pt2 file for torch.export.load, or an .onnx file.")],
    what: Annotated[
        Literal["likelihood", "sample"],
        typer.Option(help="A program from rows to likelihoods, or from noise to rows."),
    ] = "likelihood",
) -> None:
    """Write a model as a program that runs without expmflow: for torch alone, or as ONNX.

    The likelihood program takes rows as the model does (images as whole numbers, tables in their own units), and
    returns log-likelihoods in nats. If the model has a bound, the random numbers of the bound are another argument, so
    that the result is a function of the arguments. If it is conditional, so are one-hot vectors of the classes.

    The sampling program maps noise (standard normal at temperature 1) to rows. Layers that iterate, such as inverses of
    Sylvester layers, cannot be exported: a run with such layers has only the likelihood program.

    The arguments are printed, and described in the file. A program takes any number of rows. Before the file gets its
    name, it is loaded and compared with the model. Writes only the file --out. ONNX needs the extra `export`.
    """
    say("Recording, writing and comparing the program: seconds for small models, minutes for large ones.")
    with reading() as update:
        update("recording, writing and comparing the program", 0, 0)
        program = write_program(run, out, what=what)
    for each in program.inputs:
        shape = ", ".join(("batch", *map(str, each.shape)) if not each.shared else map(str, each.shape))
        result(f"{each.name}: {each.dtype} ({shape}), {each.meaning}")
    result(f"result: {program.result}")
    say(f"Program in {out}")
