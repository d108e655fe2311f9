"""`expmflow data`."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table
from torch import Tensor

from expmflow._validation import expect, expect_count
from expmflow.cli.console import reading, result, result_table, say
from expmflow.cli.dry_run import DryRun, described
from expmflow.cli.measure import size_text
from expmflow.data import IMAGE_SETS, DataError, Dataset, load_table
from expmflow.data.graphs import MIXTURES
from expmflow.data.table import Table as Rows
from expmflow.training.build import build_data
from expmflow.training.config import DataConfig
from expmflow.training.randomness import Randomness

DRAWN = ("moons", *MIXTURES)
PUBLISHED = tuple(name for name in IMAGE_SETS if name != "images")
NAMES = (*DRAWN, *PUBLISHED)
MOST_COLUMNS = 50
IMAGE_AXES = 3  # of an array: (rows, height, width), or more


def data(
    source: Annotated[
        str,
        typer.Argument(
            metavar="NAME|PATH", help=f"{', '.join(NAMES)}; a .npy or .csv table; a folder, .npy or .npz of images."
        ),
    ],
    folder: Annotated[Path | None, typer.Option("--dir", help="Where the official files are.")] = None,
    size: Annotated[int | None, typer.Option(help="Bring your own images to this height and width.")] = None,
    dry_run: DryRun = False,
) -> None:
    """Describe a data set: its rows, their shape and ranges, classes, parts.

    Downloads mnist, fashion-mnist or cifar10 if they are neither in --dir nor in the user's cache. Writes nothing else.
    """
    path = Path(source)
    if source not in NAMES and path.suffix not in (".npy", ".csv", ".npz") and not path.is_dir():
        near = difflib.get_close_matches(source, NAMES, n=1)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        files = "a .npy or .csv table, or a folder, .npy or .npz of images"
        raise DataError(f"Expected {', '.join(NAMES)}, {files}; got {source!r}{hint}.")
    if size is not None:
        expect_count(size, "--size")
        own = source not in NAMES and path.suffix != ".csv" and (path.suffix != ".npy" or _holds_images(path))
        expect(own, "--size with images of your own", source)
    expect(folder is None or source in PUBLISHED, f"--dir with one of {', '.join(PUBLISHED)}", source)
    if dry_run:
        result(described({"reads": _reads(source, folder)}))
        return
    if source in MIXTURES:
        _describe_graphs(source)
    elif source in PUBLISHED:
        _describe_images(source, _load(DataConfig(name=source, dir=folder)))
    elif source == "moons":
        drawn = _load(DataConfig(validation=0, test=0))
        _describe_columns(f"{source} (drawn; data.samples=N draws N rows)", drawn.train, drawn.names)
    elif path.suffix == ".csv" or (path.suffix == ".npy" and not _holds_images(path)):
        table: Rows = load_table(path)
        _describe_columns(source, table.rows, table.names)
    else:
        _describe_images(source, _load(DataConfig(name="images", path=path, size=size)))


def _load(config: DataConfig) -> Dataset:
    with reading() as told:
        return build_data(config, Randomness(0), told)


def _holds_images(path: Path) -> bool:
    """Whether the array has the axes of images; a table has two."""
    import numpy as np

    try:
        return path.is_file() and np.load(path, mmap_mode="r", allow_pickle=False).ndim >= IMAGE_AXES
    except (OSError, ValueError, EOFError):
        return False  # reading it as a table says what is wrong


def _describe_images(source: str, data: Dataset) -> None:
    parts = {"training": data.train, "validation": data.validation, "test": data.test}
    channels, height, width = data.event_shape
    title = f"{escape(source)}: {sum(map(len, parts.values()))} images"
    shown = Table(title=title, title_justify="left", show_header=False)
    colour = "grey" if channels == 1 else f"{channels} channels"
    shown.add_row("shape (channels, height, width)", f"{data.event_shape}, {colour}")
    least, largest = int(data.train.min()), int(data.train.max())
    shown.add_row("grey levels", f"{data.levels}; in the training images from {least} to {largest}")
    shown.add_row("rows", ", ".join(f"{len(rows)} {name}" for name, rows in parts.items()))
    if data.labels is None:
        shown.add_row("classes", "none")
    else:
        counts = sum((part.bincount(minlength=data.classes) for part in data.labels), start=data.labels[0].new_zeros(1))
        listed = [f"{k}: {int(count)}" for k, count in enumerate(counts[:MOST_COLUMNS])]
        more = ", …" if data.classes > MOST_COLUMNS else ""
        shown.add_row(f"classes: {data.classes}", ", ".join(listed) + more)
    result_table(shown)
    for length, name in ((height, "height"), (width, "width")):
        if length % 2:
            say(f"Models of images halve the {name} at each level; {length} is odd: data.size brings them to another.")


def _describe_graphs(name: str) -> None:
    mixture = MIXTURES[name]
    turned = ", each graph turned by a random angle" if mixture.turned else ""
    shown = Table(title=f"{name}: drawn anew at every training step", title_justify="left", show_header=False)
    shown.add_row("nodes", f"{mixture.nodes}, around {mixture.nodes} centres in random order{turned}")
    shown.add_row("features of a node", "2")
    shown.add_row("entropy, nats per node", f"{mixture.entropy():.4f}")
    result_table(shown)


def _describe_columns(where: str, rows: Tensor, names: tuple[str, ...]) -> None:
    values = rows.double()
    columns = names or [f"x{k + 1}" for k in range(rows.shape[1])]
    shown = Table(title=f"{escape(where)}: {len(rows)} rows, {rows.shape[1]} columns", title_justify="left")
    shown.add_column("column", overflow="fold")
    for name in ("least", "mean", "std", "largest"):
        shown.add_column(name, justify="right")
    spread = values.std(0) if len(rows) > 1 else values.new_zeros(rows.shape[1])
    numbers = zip(values.amin(0), values.mean(0), spread, values.amax(0), strict=True)
    for k, row in enumerate(numbers):
        if k == MOST_COLUMNS:
            shown.add_row("…", *[""] * 4)
            break
        shown.add_row(escape(columns[k]), *(f"{float(v):.4g}" for v in row))
    result_table(shown)
    constant = [name for name, s in zip(columns, spread, strict=True) if float(s) == 0]
    if constant:
        say(f"Constant columns have no density; leave them out: {', '.join(constant)}.")


def _reads(source: str, folder: Path | None) -> str:
    if source in DRAWN:
        return f"nothing: {source} is drawn"
    if source in PUBLISHED:
        where = f"the files of {source} in {folder}" if folder else f"{source}, from the user's cache or the network"
        return "digits, from scikit-learn" if source == "digits" else where
    path = Path(source)
    if path.is_dir():
        return f"the images in {path}"
    if not path.is_file():
        raise DataError(f"Expected the file {path}; got none.")
    return f"{path}, {size_text(path.stat().st_size)}"
