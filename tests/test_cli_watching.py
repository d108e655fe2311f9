"""What is seen of a run while it trains."""

import io
import math
from pathlib import Path

import pytest
from rich.console import Console

from cli_runs import TINY, run_command
from expmflow.cli import console as console_module
from expmflow.cli import watching as watching_module
from expmflow.cli.watching import watching
from expmflow.training.config import load_config
from expmflow.training.run import RunFolder
from kind_runs import IMAGES

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


def test_images_are_watched_in_bits_per_dimension(tmp_path: Path):
    (tmp_path / "c.yaml").write_text(IMAGES)
    outcome = run_command("train", tmp_path / "c.yaml", "--out", tmp_path / "run")
    assert outcome.code == 0, outcome.err
    records = RunFolder(tmp_path / "run").read_metrics()
    bits = next(r["nll"] for r in records if "nll" in r) / (64 * math.log(2))
    assert f"step 1/3 nll {bits:.4f} bpd" in outcome.err


def test_early_stopping_says_so(tmp_path: Path):
    settings = (*TINY, "train.steps=40", "train.validate_every=2", "train.patience=1", "optim.lr=0.5", "optim.warmup=0")
    outcome = run_command("train", "moons", *settings, "--out", tmp_path / "run", "--on-nonfinite", "skip")
    assert outcome.code == 0, outcome.err
    best = max(r["step"] for r in RunFolder(tmp_path / "run").read_metrics() if r.get("best"))
    assert f"Stopped early: no better validation in 1, after step {best}." in outcome.err
    assert "Stopped early" not in run_command("train", "moons", *TINY, "--out", tmp_path / "other").err


def test_progress_where_there_is_no_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr(console_module, "SECONDS_BETWEEN_LINES", 0.0)
    with console_module.progress("testing", 10) as advance:
        advance(4)
        advance(6)
    assert [line for line in capsys.readouterr().err.splitlines() if line] == ["testing: 4 of 10", "testing: 10 of 10"]
