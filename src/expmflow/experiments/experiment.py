"""The common part of all tables of the paper: rows that are trained and measured one by one, and results files."""

from __future__ import annotations

import tempfile
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Generic, Protocol, TypeVar

from expmflow.data import DataError
from expmflow.training.config import Config
from expmflow.training.files import read_json, write_json, write_text
from expmflow.training.job import OnStep
from expmflow.training.loop import train
from expmflow.training.run import RunFolder

TIMED_STEPS, WARM_STEPS = 24, 4

Result = dict[str, Any]
"""The result of one row, as in the results file."""


@dataclass(frozen=True)
class Comparison:
    """A number of the paper, and ours.

    Args:
        of: the row.
        unit: the unit of the numbers.
        paper, ours: the two numbers; None if the paper has none.
        paper_error, error: their error bars, if they have any.
        digits: the number of digits to round to.
    """

    of: str
    unit: str
    paper: float | None
    ours: float
    paper_error: float | None = None
    error: float | None = None
    digits: int = 3


class Row(Protocol):
    """One line of a table, and one training."""

    @property
    def name(self) -> str:
        """The name of the row, and of its run's folder."""

    def config(self, preset: str, threads: int | None = None) -> Config:
        """The config of the training."""


R = TypeVar("R", bound=Row)


class Experiment(ABC, Generic[R]):
    """A table of the paper.

    A row that has been trained and measured is written to `NAME.json` at once, under `rows`, in the order of the table;
    `NAME.md` beside it is generated from that file alone.
    """

    name: str
    of_paper: str
    """Its name in the paper."""

    presets: Mapping[str, str]
    """Names of presets, with descriptions."""

    main: str = "paper"
    """The preset whose results are `NAME.json`; those of the others are `NAME-PRESET.json`."""

    @abstractmethod
    def rows(self, preset: str) -> Sequence[R]:
        """All rows, in order."""

    @abstractmethod
    def row_name(self, result: Result) -> str:
        """The name of the row that a result belongs to; `KeyError` if it does not say."""

    @abstractmethod
    def steps(self, row: R, preset: str) -> int:
        """The total number of optimizer steps that the row takes."""

    @abstractmethod
    def train(
        self, row: R, preset: str, runs: Path, *, threads: int | None = None, device: str = "cpu", on_step: OnStep
    ) -> None:
        """Train the row in its own folder below `runs`, or resume it; alone or with other processes."""

    @abstractmethod
    def measure(self, row: R, preset: str, runs: Path, folder: Path, *, device: str = "cpu") -> Result:
        """The test result of a trained row; writes files that belong beside the table to `folder`."""

    @abstractmethod
    def text(self, table: Mapping[str, Any], preset: str) -> str:
        """The table as Markdown, from the contents of the results file."""

    @abstractmethod
    def summary(self, result: Result) -> str:
        """A row's result in a few words."""

    def comparisons(self, table: Mapping[str, Any]) -> list[Comparison]:
        """The paper's numbers beside ours, averaged over seeds, from the contents of the results file."""
        return []

    def run_folder(self, row: R, runs: Path) -> Path:
        """The folder in which the row is trained."""
        return runs / row.name

    def step_time(self, row: R, preset: str, *, threads: int | None = None, device: str = "cpu") -> float:
        """Seconds of a training step of the row, measured now on this machine."""
        raise ValueError(f"Expected a table whose rows say what a step takes; got {self.name}.")

    def more(self, found: Sequence[Result], folder: Path, preset: str) -> dict[str, Any]:
        """Further contents of the results file, besides its rows."""
        return {}

    def draw(self, table: Mapping[str, Any], path: Path) -> None:
        """The figure beside the table, if it has one."""

    def results_file(self, results: Path, preset: str) -> Path:
        """The path of a preset's results."""
        return results / (f"{self.name}.json" if preset == self.main else f"{self.name}-{preset}.json")

    def command(self, row: R, preset: str) -> str:
        """The command that runs only this row."""
        return f"expmflow reproduce {self.name} --preset {preset} --only {row.name}"

    def load(self, path: Path) -> list[Result]:
        """The rows that are already there."""
        if not path.exists():
            return []
        try:
            rows: list[Result] = read_json(path)["rows"]
            names = [self.row_name(r) for r in rows]
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(f"Expected the rows of a table in {path}; got: {type(error).__name__}: {error}.") from None
        strange = set(names) - set(self._order())
        if strange:
            raise DataError(f"Expected rows of the table in {path}; got {', '.join(sorted(strange))}.")
        return rows

    def save(self, path: Path, found: Sequence[Result], preset: str) -> None:
        """Write `path` with the rows in the table's order, and the Markdown and the figure beside it."""
        order = self._order()
        rows = sorted(found, key=lambda result: order[self.row_name(result)])
        table = {"rows": rows, **self.more(rows, path.with_suffix(""), preset)}
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, table)
        write_text(path.with_suffix(".md"), self.text(table, preset))
        self.draw(table, path)

    def _order(self) -> dict[str, int]:
        """The position of each row of any preset."""
        names = dict.fromkeys(row.name for preset in self.presets for row in self.rows(preset))
        return {name: place for place, name in enumerate(names)}


def median_step(config: Config, device: str) -> float:
    """Seconds of a training step, measured now on this machine: the median of the first few steps."""
    short = {"steps": WARM_STEPS + TIMED_STEPS, "log_every": 1, "validation_rows": 1, "checkpoint_every": 10**6}
    config = config.model_copy(update={"train": config.train.model_copy(update=short)})
    with tempfile.TemporaryDirectory() as folder:
        train(config, folder, device=device)
        records = RunFolder(Path(folder)).read_metrics()
    times = [record["seconds_per_step"] for record in records if "seconds_per_step" in record]
    return median(times[WARM_STEPS:])


def step_seconds(records: Iterable[dict[str, Any]]) -> Iterator[float]:
    """The seconds per step of a run, from the differences between its records, without pauses."""
    before = 0
    for record in records:
        if "seconds_per_step" in record:
            yield record["seconds_per_step"] * (record["step"] - before)
            before = record["step"]
