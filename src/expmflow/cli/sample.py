"""`expmflow sample`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import torch
import typer
from torch import Tensor

from expmflow._validation import expect, expect_count
from expmflow.cli.console import Device, progress, result, say
from expmflow.cli.device import device_named
from expmflow.cli.dry_run import DryRun, run_text
from expmflow.cli.output import save_npy, save_npz, save_text
from expmflow.data.drawing.grids import class_columns
from expmflow.data.kinds import KINDS
from expmflow.runs.evaluation import Trained, open_run
from expmflow.training.files import write_whole
from expmflow.training.sampling import LARGEST_SAMPLE


def sample(
    run: Annotated[Path, typer.Argument(help="The folder of a run, or the name of a model such as digits.")],
    n: Annotated[int, typer.Option("-n", "--number", help="The number of samples.")] = 16,
    temperature: Annotated[float, typer.Option(help="Factor of the noise's standard deviation.")] = 1.0,
    seed: Annotated[int, typer.Option(help="The same seed draws the same samples.")] = 0,
    classes: Annotated[
        str | None, typer.Option(help="Alternate these classes, such as 3,7 (conditional models); all by default.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="A .npy, .npz, .csv or .png file; if not given, samples.png for images, and stdout for others."
        ),
    ] = None,
    device: Device = None,
    dry_run: DryRun = False,
) -> None:
    """Draw samples from a run's density. Writes the file --out, and nothing else.

    Images become a grid in a .png file, pixel for pixel, with small images enlarged by an integer factor, or bytes of
    shape (n, channels, height, width) in a .npy file. For a conditional model, each column of the grid is a class.
    Graphs become a .csv file with a line for each node, a .npy file of shape (n, nodes, features), or a picture. Graphs
    with their own edges become a .npz file of the format that they are read from.
    """
    known = {suffix for kind in KINDS.values() for suffix in kind.formats}
    expect(out is None or out.suffix in known, "a .npy, .npz, .csv or .png file", out)
    trained = open_run(run, device_named(device))
    out, formats = out or trained.kind.default_file, trained.kind.formats
    expect(out is None or out.suffix in formats, f"a {' or '.join(formats)} file for samples of {trained.name}", out)
    expect_count(n, "the number of samples")
    chosen = _chosen(trained, classes)
    labels = None if chosen is None else torch.tensor(chosen)[torch.arange(n) % len(chosen)]
    if dry_run:
        text = run_text(
            trained,
            lambda rows: trained.sample(
                rows, temperature=temperature, seed=seed, labels=None if labels is None else labels[:rows]
            ),
            n,
            LARGEST_SAMPLE,
            what=f"{n} samples",
            writes=out,
        )
        result(text)
        return
    with progress("sampling", n) as advance:
        drawn = trained.sample(n, temperature=temperature, seed=seed, labels=labels, advance=advance)
    _write(trained, drawn, out, class_columns(None if chosen is None else len(chosen), n))


def _chosen(trained: Trained, classes: str | None) -> list[int] | None:
    """The classes to sample, in turn; None for a model without classes."""
    count = trained.classes
    if classes is None:
        return None if count is None else list(range(count))
    if count is None:
        raise ValueError(f"Expected a conditional model for --classes; got {trained.name}, which has no classes.")
    numbers = {name: k for k, name in enumerate(trained.class_names)}
    found = [numbers.get(word.strip(), int(word) if word.strip().isdecimal() else -1) for word in classes.split(",")]
    inside = all(0 <= k < count for k in found)
    named = f" or names ({', '.join(numbers)})" if numbers else ""
    expect(inside, f"--classes from 0 to {count - 1}{named}, with commas between them", repr(classes))
    return found


def _write(trained: Trained, drawn: Tensor, out: Path | None, columns: int | None) -> None:
    kind, layout = trained.kind, trained.layout
    if out is None:
        result((kind.text(drawn, layout) or "").rstrip("\n"))
        return
    if out.suffix == ".npy":
        save_npy(out, kind.array(drawn))
    elif out.suffix == ".npz":
        save_npz(out, kind.arrays(drawn))
    elif out.suffix == ".png":
        write_whole(out, kind.draw(drawn, layout, columns=columns).write)
    else:
        save_text(out, kind.text(drawn, layout) or "")
    say(f"{len(drawn)} samples in {out}")
