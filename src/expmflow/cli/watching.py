"""The display of a training run: a bar on a terminal, lines elsewhere, and TensorBoard's files."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Protocol

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    Task,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Column
from rich.text import Text

from expmflow.cli.console import console, say, speaks
from expmflow.data.kinds import NATS, Unit
from expmflow.training.config import Config
from expmflow.training.job import OnStep, Report
from expmflow.training.run import RunFolder


class Writer(Protocol):
    """The part of TensorBoard's interface that is used."""

    def add_scalar(self, tag: str, value: float, step: int) -> None: ...

    def close(self) -> None: ...


class StepTime(ProgressColumn):
    """The time of a step, averaged over the latest."""

    def __init__(self) -> None:
        super().__init__(Column(no_wrap=True))

    def render(self, task: Task) -> Text:
        return Text(f"{1000 / task.speed:.1f} ms/step" if task.speed else "")


@contextmanager
def watching(config: Config, run: RunFolder, before: int, unit: Unit = NATS) -> Iterator[tuple[Report, OnStep]]:
    """The functions to call with each record, and after each step; `before` steps are done already.

    Losses are displayed in the unit; files have them in nats.
    """
    shown, steps, writer = console(), config.train.steps, _tensorboard(run, before)
    bar = _bar(shown)
    task = bar.add_task("", total=steps, completed=before)
    seen: dict[str, str] = {}

    def on_record(record: dict[str, Any]) -> None:
        for name, value in record.items():
            if writer is not None and name not in ("step", "best"):
                writer.add_scalar(name, float(value), record["step"])
        name = "validation_nll" if "validation_nll" in record else "nll"
        number = f"{unit.per_nat * record[name]:.4f}"
        seen[name.removesuffix("_nll")] = number if unit == NATS else f"{number} {unit.short}"
        bar.update(task, description="  ".join(f"{what} {value}" for what, value in seen.items()))
        if not shown.is_terminal:
            value = f"{name.replace('_', ' ')} {seen[name.removesuffix('_nll')]}"
            say(f"step {record['step']}/{steps}  {value}  {_remark(record, steps)}".rstrip())

    try:
        with bar:
            yield on_record, lambda step: bar.update(task, completed=step)
    finally:
        if writer is not None:
            writer.close()


def _bar(shown: Console) -> Progress:
    columns = (
        SpinnerColumn(),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.description}"),
        StepTime(),
        TimeRemainingColumn(),
        TextColumn("left"),
    )
    return Progress(*columns, console=shown, disable=not shown.is_terminal or not speaks())


def _remark(record: dict[str, Any], steps: int) -> str:
    if "validation_nll" in record:
        return "(best)" if record.get("best") else ""
    seconds = record["seconds_per_step"]
    return f"{1000 * seconds:.1f} ms/step  {timedelta(seconds=round(seconds * (steps - record['step'])))} left"


def _tensorboard(run: RunFolder, before: int) -> Writer | None:
    if not speaks():
        return None
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return None

    class Lazy:
        """Creates its folder with the first number, so that a refused run leaves nothing behind."""

        def __init__(self) -> None:
            self.writer: SummaryWriter | None = None

        def add_scalar(self, tag: str, value: float, step: int) -> None:
            if self.writer is None:
                self.writer = SummaryWriter(str(run.path / "tensorboard"), purge_step=before + 1)
            self.writer.add_scalar(tag, value, step)

        def close(self) -> None:
            if self.writer is not None:
                self.writer.close()

    return Lazy()
