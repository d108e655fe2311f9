"""A small run, and the command line without a process of its own."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from typer.testing import CliRunner

from expmflow.cli.app import app

TINY = (
    "data.samples=240",
    "model.blocks=1",
    "model.hidden=8",
    "train.steps=6",
    "train.batch_size=32",
    "train.log_every=2",
    "train.validate_every=3",
    "train.checkpoint_every=2",
)


@dataclass(frozen=True)
class Outcome:
    """What a command returned and printed; lines wrapped by the terminal are joined."""

    code: int
    out: str
    err: str


def run_command(*arguments: str | Path) -> Outcome:
    """Run a command; an exception that it let through is raised here."""
    result = CliRunner().invoke(app, [str(a) for a in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return Outcome(result.exit_code, result.stdout, " ".join(result.stderr.split()))


def train_tiny(folder: Path, *overrides: str) -> Path:
    """Two moons in six steps."""
    outcome = run_command("train", "moons", *TINY, *overrides, "--out", folder)
    assert outcome.code == 0, outcome.err
    return folder


def files(folder: Path) -> set[str]:
    """The names of all files in a folder and below it."""
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
