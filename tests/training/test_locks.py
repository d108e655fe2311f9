"""Folders that one process works in at a time."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from cli_runs import run_command
from expmflow.training.locks import InUseError, locked

pytest.importorskip("fcntl")
HOLD = """
import sys
from pathlib import Path
from expmflow.training.locks import locked
with locked(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def other(tmp_path: Path):
    """A process that works in `tmp_path`."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", HOLD, tmp_path], text=True, **pipes) as process:
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


def test_others_are_kept_out_until_the_process_is_gone(tmp_path: Path, other):
    with pytest.raises(InUseError, match=f"Expected a folder that no other process works in; got {tmp_path}"):
        locked(tmp_path).__enter__()
    other.kill()
    other.wait()
    with locked(tmp_path):
        pass


def test_who_has_it_may_ask_again_and_nothing_is_left(tmp_path: Path):
    with locked(tmp_path), locked(tmp_path / ".." / tmp_path.name):
        pass
    assert not list(tmp_path.iterdir())


def test_who_waits_goes_on_when_the_other_is_done(tmp_path: Path, other):
    other.stdin.close()
    with locked(tmp_path, wait=True):
        assert other.wait() == 0


@pytest.mark.usefixtures("other")
def test_a_run_that_is_being_trained_is_left_alone(tmp_path: Path):
    outcome = run_command("train", "moons", "--out", tmp_path, "train.steps=1")
    assert outcome.code == 1
    assert "no other process works in" in outcome.err
    assert not list(tmp_path.iterdir())
