"""Timing side by side: every candidate once per round, so that what else the machine does hits all of them alike."""

from __future__ import annotations

import json
import math
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch


def medians(candidates: Mapping[str, Callable[[], object]], rounds: int = 15) -> dict[str, float]:
    """The median time of each candidate in milliseconds. Each runs three times in a row per round; the last counts."""
    for candidate in candidates.values():
        candidate()
    times: dict[str, list[float]] = {name: [] for name in candidates}
    for _ in range(rounds):
        for name, candidate in candidates.items():
            candidate()
            candidate()
            start = time.perf_counter()
            candidate()
            times[name].append(time.perf_counter() - start)
    return {name: 1e3 * statistics.median(values) for name, values in times.items()}


def in_fresh_processes(module: str, function: str, processes: int, *arguments: float | str) -> list[Any]:
    """What `module.function(*arguments)` returns in each of so many processes, one after the other; plain values."""
    call = f"import json, {module}; print(json.dumps({module}.{function}(*{arguments!r})))"
    command = [sys.executable, "-c", call]
    folder = Path(__file__).parent
    found = [subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True) for _ in range(processes)]
    return [json.loads(run.stdout.splitlines()[-1]) for run in found]


def times_apart(
    module: str, function: str, candidates: Mapping[str, tuple[str, ...]], rounds: int
) -> dict[str, list[float]]:
    """All times, in turn, of what `module.function` makes of each candidate's arguments, in a process of its own."""
    times: dict[str, list[float]] = {name: [] for name in candidates}
    with ExitStack() as stack:
        workers = {}
        for name, arguments in candidates.items():
            call = f"import timing, {module}; timing.answer({module}.{function}(*{arguments!r}))"
            command, pipe = [sys.executable, "-c", call], subprocess.PIPE
            worker = subprocess.Popen(command, cwd=Path(__file__).parent, stdin=pipe, stdout=pipe, text=True)
            workers[name] = stack.enter_context(worker)
        for _ in range(rounds):
            for name, worker in workers.items():
                print(file=worker.stdin, flush=True)
                times[name].append(float(worker.stdout.readline()))  # type: ignore[union-attr]
    return times


def undisturbed(times: list[float]) -> float:
    """What a tenth of the times stay below: whatever else a machine does only adds to them."""
    return sorted(times)[len(times) // 10]


def answer(candidate: Callable[[], object]) -> None:
    """Milliseconds of the candidate for each line that comes in, the last of three in a row."""
    candidate()
    for _ in sys.stdin:
        candidate()
        candidate()
        start = time.perf_counter()
        candidate()
        print(1e3 * (time.perf_counter() - start), flush=True)


def geometric_mean(values: list[float]) -> float:
    return math.exp(statistics.fmean(math.log(v) for v in values))


def table(header: list[str], rows: list[list[str]]) -> str:
    """A Markdown table; the first column is text, the others numbers."""
    rule = ["---", *("---:" for _ in header[1:])]
    return "\n".join("| " + " | ".join(row) + " |" for row in [header, rule, *rows])


def machine() -> str:
    """What the numbers were measured on."""
    model = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [line.split(":")[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
        model = names[0] if names else model
    return (
        f"{model}, {torch.get_num_threads()} threads, PyTorch {torch.__version__}, Python {platform.python_version()}"
    )
