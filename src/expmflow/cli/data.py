"""`expmflow data`."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from expmflow._validation import expect, expect_count
from expmflow.cli.console import reading, result, result_table, say
from expmflow.cli.dry_run import DryRun, described
from expmflow.cli.measure import size_text
from expmflow.data import DataError, Dataset
from expmflow.data.kinds import KINDS, Source, kind_of_source, sources
from expmflow.data.kinds.base import Description
from expmflow.training.build import build_data
from expmflow.training.config import DataConfig
from expmflow.training.randomness import Randomness


def _named() -> dict[str, Source]:
    """The sources that need no file of the user's."""
    return {name: source for name, source in sources().items() if "path" not in source.settings}


def _files() -> str:
    """The formats of a user's own data."""
    return ", or ".join(source.origin for source in sources().values() if "path" in source.settings)


def data(
    source: Annotated[
        str,
        typer.Argument(
            metavar="NAME|PATH",
            help=f"{', '.join(_named())}; {_files()}.",
        ),
    ],
    folder: Annotated[Path | None, typer.Option("--dir", help="The folder of the official files.")] = None,
    size: Annotated[int | None, typer.Option(help="Resize your own images to this height and width.")] = None,
    dry_run: DryRun = False,
) -> None:
    """Describe a data set: its rows, their shape and ranges, classes, splits.

    Downloads mnist, fashion-mnist or cifar10 if they are neither in --dir nor in the user's cache. Writes nothing else.
    """
    path, named = Path(source), _named()
    name = source if source in named else _own_source(path)
    if name is None:
        near = difflib.get_close_matches(source, named, n=1)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        raise DataError(f"Expected {', '.join(named)}, {_files()}; got {source!r}{hint}.")
    if size is not None:
        expect_count(size, "--size")
        expect("size" in sources()[name].settings, "--size with images of your own", source)
    published = [other for other in named if "dir" in named[other].settings]
    expect(folder is None or source in published, f"--dir with one of {', '.join(published)}", source)
    if dry_run:
        result(described({"reads": _reads(source, name, folder)}))
        return
    own = None if source in named else path
    config = DataConfig(name=name, path=own, size=size, dir=folder, skip_broken=True)

    def load() -> Dataset:
        with reading() as loading:
            return build_data(config, Randomness(0), loading)

    _show(kind_of_source(name).describe(source, name, own, load))


def _own_source(path: Path) -> str | None:
    """The source that reads a file or folder of the user's."""
    answers = (kind.own_source(path) for kind in KINDS.values())
    return next((answer for answer in answers if answer is not None), None)


def _show(found: Description) -> None:
    table = Table(title=escape(found.title), title_justify="left", show_header=bool(found.header))
    for k, name in enumerate(found.header):
        table.add_column(name, overflow="fold") if k == 0 else table.add_column(name, justify="right")
    for row in found.rows:
        table.add_row(*map(escape, row))
    result_table(table)
    for note in found.notes:
        say(note)


def _reads(source: str, name: str, folder: Path | None) -> str:
    origin = _named()[source].origin if source in _named() else ""
    if origin == "drawn":
        return f"nothing: {source} is drawn"
    if folder is not None:
        return f"the files of {source} in {folder}"
    if origin:
        return f"{source}, from {origin}"
    path = Path(source)
    if path.is_dir():
        return f"the {name} in {path}"
    if not path.is_file():
        raise DataError(f"Expected the file {path}; got none.")
    return f"{path}, {size_text(path.stat().st_size)}"
