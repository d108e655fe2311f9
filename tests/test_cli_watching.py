"""What is seen of a run while it trains."""

import io
from pathlib import Path

import pytest
from rich.console import Console

from cli_runs import TINY, run_command
from expmflow.cli import watching as watching_module
from expmflow.cli.watching import watching
from expmflow.training.config import load_config
from expmflow.training.run import RunFolder

RECORD = {"nll": 1.25, "lr": 0.1, "seconds_per_step": 0.5, "skipped": 0}


@pytest.fixture
def screen(monkeypatch: pytest.MonkeyPatch) -> Console:
    """A terminal whose text can be read."""
    terminal = Console(file=io.StringIO(), force_terminal=True, width=80, color_system=None)
    monkeypatch.setattr(watching_module, "console", lambda: terminal)
    monkeypatch.setattr(watching_module, "_tensorboard", lambda run, before: None)
    return terminal


def text(screen: Console) -> str:
    assert isinstance(screen.file, io.StringIO)
    return screen.file.getvalue()


def test_the_bar_moves_with_every_step_whatever_is_logged(
    screen: Console, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    made = []
    monkeypatch.setattr(
        watching_module, "_bar", lambda shown, make=watching_module._bar: made.append(make(shown)) or made[0]
    )
    config = load_config("moons", ["train.steps=50", "train.log_every=1000"])
    with watching(config, RunFolder(tmp_path), 10) as (_, on_step):
        for step in range(11, 31):
            on_step(step)
            made[0].refresh()
            shown = text(screen)
            assert f"{step}/50" in shown
    assert "ms/step" in shown
    assert "left" in shown
    assert not any(tmp_path.iterdir())


def test_the_bar_shows_the_newest_losses(screen: Console, tmp_path: Path):
    config = load_config("moons", ["train.steps=50"])
    with watching(config, RunFolder(tmp_path), 0) as (on_record, on_step):
        on_step(20)
        on_record({"step": 20, **RECORD})
        on_record({"step": 20, "validation_nll": 1.5, "best": True})
        on_record({"step": 21, **RECORD, "nll": 1.125})
    assert "nll 1.1250  validation 1.5000" in text(screen)


def test_lines_where_there_is_no_terminal(tmp_path: Path):
    outcome = run_command("train", "moons", *TINY, "--out", tmp_path / "run")
    assert "step 2/6 nll" in outcome.err
    assert "step 6/6 validation nll" in outcome.err
    assert "\x1b" not in outcome.err


def test_pictures_come_before_the_first_validation(tmp_path: Path):
    settings = (*TINY, "train.sample_every=1", "train.validate_every=100")
    outcome = run_command("train", "moons", *settings, "--out", tmp_path / "run")
    assert outcome.code == 0, outcome.err
    assert len(list((tmp_path / "run" / "samples").iterdir())) == 6
