"""A run that is killed anywhere and resumed ends with the very same bytes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def kills(folder: Path, model: str, kind: str, amount: int) -> list[dict[str, object]]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE)}
    command = [sys.executable, str(HERE / "kill_points.py"), str(folder), model, kind, str(amount)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def check(results: list[dict[str, object]], at_least: int) -> None:
    assert len(results) >= at_least
    assert all(result["resumed"] for result in results), [r for r in results if not r["resumed"]]
    assert all(result["same"] for result in results), [r for r in results if not r["same"]]


@pytest.mark.parametrize("model", ["flow", "vae"])
def test_killed_at_some_file_operations(tmp_path: Path, model: str) -> None:
    results = kills(tmp_path, model, "operations", 17)
    check(results, at_least=4)
    assert all(result["killed"] for result in results)


@pytest.mark.slow
def test_killed_before_every_file_operation(tmp_path: Path) -> None:
    results = kills(tmp_path, "flow", "operations", 1)
    check(results, at_least=40)
    assert all(result["killed"] for result in results)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["flow", "vae"])
def test_killed_at_random_moments(tmp_path: Path, model: str) -> None:
    results = kills(tmp_path, model, "moments", 20)
    check(results, at_least=20)
    assert sum(bool(result["killed"]) for result in results) >= 10  # others come to their end before: the first is slow
