"""Output: results on stdout, everything else on stderr, and one process speaks for all."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated
from unicodedata import category

import typer
from rich.console import Console, ConsoleOptions, RenderableType
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TaskProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)
from rich.segment import Segment
from rich.table import Table

UNSEEN = ("Cc", "Cs", "Zl", "Zp")
TURNS = "\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"

if TYPE_CHECKING:
    from expmflow.data.download import Progress as LoadProgress
    from expmflow.runs.evaluation import Advance


class _Terminal(Console):
    """A console that receives control codes only from rich, never from file names."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(visible(segment.text), segment.style)


def visible(text: str) -> str:
    """The text without characters that a terminal would obey or could not show, such as control codes and
    surrogates."""
    return "".join("�" if c not in "\n\t" and (category(c) in UNSEEN or c in TURNS) else c for c in text)


SECONDS_BETWEEN_LINES = 10.0  # between lines of progress, if there is no terminal


def speaks() -> bool:
    """Whether this process may print: the first of those that `torchrun` started, or the only one."""
    return os.environ.get("RANK", "0") == "0"


def console(*, always: bool = False) -> Console:
    """The console for messages beside the results; only one process prints, unless `always`."""
    return _Terminal(stderr=True, quiet=not (always or speaks()), highlight=False, soft_wrap=True)


def say(text: str) -> None:
    """Print a sentence on stderr."""
    console().print(text, markup=False)


def say_error(text: str, *, always: bool = False) -> None:
    """As `say`, in red if there are colours."""
    console(always=always).print(text, markup=False, style="red")


def result(text: str) -> None:
    """Print the requested result on stdout."""
    if speaks():
        typer.echo(visible(text))


def result_table(table: Table) -> None:
    """As `result`."""
    _Terminal(quiet=not speaks(), highlight=False).print(table)


Device = Annotated[str | None, typer.Option(help="cpu, cuda, …; by default, the machine's accelerator.")]


Data = Annotated[
    Path | None, typer.Option("--data", help="Where the run's data is now, if it has moved; or other data.")
]


@contextmanager
def progress(what: str, total: int) -> Iterator[Advance]:
    """A progress bar on a terminal, removed when the work is done; elsewhere a line now and then."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    terminal = console()
    if not terminal.is_terminal:
        yield _lines(what, total)
        return
    with Progress(*columns, console=terminal, transient=True) as bar:
        task = bar.add_task(what, total=total)
        yield lambda done: bar.advance(task, done)


def _lines(what: str, total: int) -> Advance:
    """Reports progress in a line every few seconds."""
    done, last = 0, time.monotonic()

    def advance(more: int) -> None:
        nonlocal done, last
        done += more
        if time.monotonic() - last > SECONDS_BETWEEN_LINES:
            last = time.monotonic()
            say(f"{what}: {done} of {total}")

    return advance


def by_step_number(advance: Advance) -> Callable[[int], None]:
    """Converts the number of the last step, as training reports it, to the number of new ones, as a bar takes it."""
    last = 0

    def step(number: int) -> None:
        nonlocal last
        advance(number - last)
        last = number

    return step


@contextmanager
def reading() -> Iterator[LoadProgress]:
    """As `progress`, with a bar for each slow part of loading data: downloads in bytes, images by number."""
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    terminal = console()
    with Progress(*columns, console=terminal, transient=True, disable=not terminal.is_terminal) as bar:
        tasks: dict[str, TaskID] = {}

        def update(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = bar.add_task(what, total=total or None)
            bar.update(tasks[what], completed=done, total=total or None)

        yield update


class _Handler(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        say(self.format(record))


@contextmanager
def logged() -> Iterator[None]:
    """The library's own messages on stderr."""
    logger, handler = logging.getLogger("expmflow"), _Handler()
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)
