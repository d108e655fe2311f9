"""`expmflow data`."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from expmflow.cli.console import result, result_table, say
from expmflow.cli.dry_run import DryRun, described
from expmflow.cli.measure import size_text
from expmflow.data import DataError, load_table
from expmflow.training.build import build_data
from expmflow.training.config import DataConfig
from expmflow.training.randomness import Randomness

NAMES = ("moons",)
MOST_COLUMNS = 50


def data(
    source: Annotated[str, typer.Argument(metavar="NAME|FILE", help="moons, or a .npy or .csv file.")],
    dry_run: DryRun = False,
) -> None:
    """Describe a data set: its rows, its columns and their ranges. Writes nothing."""
    path = Path(source)
    if source not in NAMES and path.suffix not in (".npy", ".csv"):
        near = difflib.get_close_matches(source, NAMES, n=1)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        raise DataError(f"Expected {', '.join(NAMES)}, or a .npy or .csv file; got {source!r}{hint}.")
    if dry_run:
        result(described({"reads": f"nothing: {source} is drawn" if source in NAMES else _size(path)}))
        return
    if source in NAMES:
        drawn = build_data(DataConfig(validation=0, test=0), Randomness(0))
        rows, names, where = drawn.train, drawn.names, f"{source} (drawn; data.samples=N draws N rows)"
    else:
        table, where = load_table(path), source
        rows, names = table.rows, table.names
    values = rows.double()
    columns = names or [f"x{k + 1}" for k in range(rows.shape[1])]
    shown = Table(title=f"{escape(where)}: {len(rows)} rows, {rows.shape[1]} columns", title_justify="left")
    shown.add_column("column")
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


def _size(path: Path) -> str:
    if not path.is_file():
        raise DataError(f"Expected the file {path}; got none.")
    return f"{path}, {size_text(path.stat().st_size)}"
