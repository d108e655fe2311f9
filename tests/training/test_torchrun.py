"""`torchrun` as a user starts it: the result of two processes is that of one, and one of them writes."""

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from expmflow.training.checkpoint import newest_checkpoint
from expmflow.training.run import RunFolder

SETTINGS = (
    "data.samples=240",
    "model.blocks=2",
    "model.hidden=8",
    "train.steps=8",
    "train.batch_size=32",
    "train.log_every=2",
    "train.validate_every=4",
    "train.checkpoint_every=4",
    "train.precision=float64",
    "train.threads=1",
)


def command_line(folder: Path, *before: str) -> str:
    """What `expmflow train` says when it is started so."""
    command = [*before, "-m", "expmflow", "train", "moons", *SETTINGS, "--out", folder.name]
    done = subprocess.run(
        command,
        cwd=folder.parent,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stderr


@pytest.mark.slow
def test_two_processes_equal_one_and_one_of_them_writes(tmp_path: Path) -> None:
    alone = command_line(tmp_path / "alone", sys.executable)
    torchrun = str(Path(sys.executable).with_name("torchrun"))
    # --standalone takes a free port, so that runs on one machine do not meet
    shared = command_line(tmp_path / "shared", torchrun, "--standalone", "--nproc-per-node", "2")

    one, two = (newest_checkpoint(tmp_path / name / "checkpoints") for name in ("alone", "shared"))
    assert one is not None
    assert two is not None
    assert one.step == two.step == 8
    for group in ("model", "average", "optimizer"):
        assert one.tensors[group].keys() == two.tensors[group].keys()
        for name, value in one.tensors[group].items():
            torch.testing.assert_close(two.tensors[group][name], value, rtol=0, atol=1e-10, msg=name)

    records = [RunFolder(tmp_path / name).read_metrics() for name in ("alone", "shared")]
    for single, double in zip(*records, strict=True):  # a second writer would have doubled the lines
        assert single.keys() == double.keys()
        for key in single.keys() - {"seconds_per_step"}:
            assert double[key] == pytest.approx(single[key], rel=0, abs=1e-9), key

    assert len(list((tmp_path / "shared" / "tensorboard").iterdir())) == 1
    assert {path.name for path in tmp_path.iterdir()} == {"alone", "shared"}
    for text in (alone, shared):
        assert text.count("Writing to ") == text.count("Done at step 8") == text.count("step 8/8  nll") == 1


THRICE = """
from pathlib import Path
from expmflow.training.config import load_config
from expmflow.training.loop import train
import sys
config = load_config("moons", sys.argv[2:])
for name in ("first", "second", "third"):
    train(config, Path(sys.argv[1], name))
"""


@pytest.mark.slow
def test_processes_that_train_several_times_meet_anew_each_time(tmp_path: Path) -> None:
    (tmp_path / "thrice.py").write_text(THRICE)
    torchrun = str(Path(sys.executable).with_name("torchrun"))
    done = subprocess.run(
        [torchrun, "--standalone", "--nproc-per-node", "2", tmp_path / "thrice.py", tmp_path / "runs", *SETTINGS],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    first, *others = (
        newest_checkpoint(tmp_path / "runs" / name / "checkpoints") for name in ("first", "second", "third")
    )
    assert first is not None
    for other in others:
        assert other is not None
        assert all(torch.equal(value, other.tensors["model"][name]) for name, value in first.tensors["model"].items())


@pytest.mark.slow
@pytest.mark.parametrize("delay", [0.0, 0.3])  # before they have loaded torch and met
def test_ranks_do_not_outlive_a_torchrun_that_was_killed(tmp_path: Path, delay: float) -> None:
    torchrun = str(Path(sys.executable).with_name("torchrun"))
    settings = [s for s in SETTINGS if not s.startswith("train.steps")]
    command = [torchrun, "--standalone", "--nproc-per-node", "2", "-m", "expmflow", "train", "moons", *settings]
    agent = subprocess.Popen(
        [*command, "train.steps=1000000", "train.timeout=0.05"],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    ranks: list[str] = []
    try:
        deadline = time.monotonic() + 120
        while len(ranks) < 2 and time.monotonic() < deadline:
            ranks = Path(f"/proc/{agent.pid}/task/{agent.pid}/children").read_text().split()
            time.sleep(0.02)
        assert len(ranks) == 2
        time.sleep(delay)
    finally:
        agent.kill()
    try:
        _, said = agent.communicate(timeout=120)  # ends once nobody is left who could write to it
    finally:
        for rank in ranks:
            with suppress(ProcessLookupError):
                os.kill(int(rank), signal.SIGKILL)
    assert said.count("Expected the other processes to answer within 0.05 minutes") == 2
