"""The result does not depend on how many processes share a batch."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from image_run import make_model

from cli_runs import run_command
from expmflow.training import distributed
from expmflow.training.checkpoint import newest_checkpoint
from expmflow.training.distributed import ExchangeError, processes
from expmflow.training.run import RunFolder

HERE = Path(__file__).parent
SHORT = 0.03  # minutes
SILENT = """
import sys, time, torch
from expmflow.training.distributed import ExchangeError, processes
print("here", flush=True)
sys.stdin.readline()
try:
    with processes(torch.device("cpu"), 0.1) as among:
        time.sleep(60) if among.rank == 0 else among.total(torch.ones(1))
except ExchangeError as error:
    print(error)
"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


@pytest.fixture
def second_of_two(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The environment of this process is that of rank 1; that of rank 0, which hosts the meeting, is returned."""
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    for name, value in {**shared, "RANK": "1", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    return {**os.environ, "RANK": "0", "LOCAL_RANK": "0"}


def start(folder: Path, count: int, model: str, precision: str = "float64", steps: int = 10) -> None:
    port = free_port()
    ranks = []
    for rank in range(count):
        place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(count)}
        meet = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE)}
        ranks.append(
            subprocess.Popen(
                [sys.executable, str(HERE / "rank.py"), str(folder), model, precision, str(steps)],
                env={**os.environ, **place, **meet},
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    for process in ranks:
        _, errors = process.communicate(timeout=300)
        assert process.returncode == 0, errors[-3000:]


@pytest.mark.parametrize(
    ("model", "trained"),
    [("flow", "flow.transform.layers.0.shift"), ("vae", "posterior.transform.layers.0.inner.last.bias")],
)
def test_two_processes_equal_one(tmp_path: Path, model: str, trained: str) -> None:
    for count in (1, 2):
        start(tmp_path / str(count), count, model)
    one, two = (newest_checkpoint(tmp_path / str(count) / "checkpoints") for count in (1, 2))
    assert one is not None
    assert two is not None
    assert one.step == two.step == 10
    for group in ("model", "average"):
        for name, value in one.tensors[group].items():
            torch.testing.assert_close(two.tensors[group][name], value, rtol=0, atol=1e-10, msg=name)
    before = make_model(torch.float64, model).state_dict()[trained]
    assert not torch.allclose(one.tensors["model"][trained], before)
    alone, shared = (
        [(m["step"], m["validation_nll"]) for m in RunFolder(tmp_path / str(count)).read_metrics() if "best" in m]
        for count in (1, 2)
    )
    assert [step for step, _ in alone] == [5, 10]
    torch.testing.assert_close(torch.tensor(shared), torch.tensor(alone), rtol=0, atol=1e-9)


@pytest.mark.slow
def test_in_float32_two_processes_stay_close_to_one(tmp_path: Path) -> None:
    """Roundings that the optimizer amplifies: docs/training.md names what is promised of 30 steps."""
    for count in (1, 2):
        start(tmp_path / str(count), count, "flow", "float32", steps=30)
    one, two = (newest_checkpoint(tmp_path / str(count) / "checkpoints") for count in (1, 2))
    assert one is not None
    assert two is not None
    assert one.step == two.step == 30
    for name, value in one.tensors["model"].items():
        torch.testing.assert_close(two.tensors["model"][name], value, rtol=0, atol=5e-5, msg=name)


@pytest.mark.usefixtures("second_of_two")
def test_a_process_that_nobody_meets_ends_with_a_sentence(tmp_path: Path) -> None:
    outcome = run_command("train", "moons", f"train.timeout={SHORT}", "--out", tmp_path / "run")
    assert outcome.code == 1
    assert outcome.err.startswith(f"Expected the other processes to answer within {SHORT} minutes (train.timeout); got")
    assert "no answer in process 1 of 2: " in outcome.err
    assert not (tmp_path / "run").exists()


def test_an_exchange_that_nobody_answers_ends_with_a_sentence(second_of_two: dict[str, str]) -> None:
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    silent, waiting = (
        subprocess.Popen([sys.executable, "-c", SILENT], env=environment, **pipes)  # type: ignore[call-overload]
        for environment in (second_of_two, dict(os.environ))
    )
    try:
        for process in (silent, waiting):
            assert process.stdout.readline() == "here\n"
        silent.stdin.write("go\n")
        silent.stdin.flush()
        said, _ = waiting.communicate("go\n", timeout=60)
    finally:
        for process in (silent, waiting):
            process.kill()
            process.communicate()
    assert "within 0.1 minutes (train.timeout); got no answer in process 1 of 2: Timed out" in said


@pytest.mark.usefixtures("second_of_two")
def test_errors_of_a_process_itself_are_not_blamed_on_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def join(*args: object, **kwargs: object) -> None:
        raise RuntimeError("a problem of my own")

    monkeypatch.setattr(distributed, "_meeting_place", lambda limit: (None, 1, 2))  # where nobody else would come
    monkeypatch.setattr(torch.distributed, "init_process_group", join)
    with pytest.raises(RuntimeError, match="of my own") as caught, processes(torch.device("cpu"), 1):
        pass
    assert not isinstance(caught.value, ExchangeError)
