"""What threads that wait cost: a training step of two threads, alone and beside busy processes."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import torch
from torch import nn

from expmflow.cli import SPINS
from expmflow.models import image_flow
from timing import table

POLICIES = {
    "as OpenMP does": {},
    f"{int(SPINS):,} spins: the command line": {"GOMP_SPINCOUNT": SPINS},
    "sleep at once": {"OMP_WAIT_POLICY": "passive"},
}
BUSY = {0: "alone", 1: "beside one busy process", 3: "beside 3 busy processes"}
BATCH, STEPS, WARM = 64, 30, 5


def step_times() -> list[float]:
    """Milliseconds of the steps of a small flow on digits; in a process whose environment has the policy."""
    torch.manual_seed(0)
    model = image_flow((1, 8, 8), subflow="sylvester", levels=1, subflows=4, hidden=32, grey_levels=17).train()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    x = torch.randint(17, (BATCH, 1, 8, 8))
    times = []
    for _ in range(WARM + STEPS):
        started = time.perf_counter()
        optimizer.zero_grad()
        (-model(x).mean()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 100.0)
        optimizer.step()
        times.append(1e3 * (time.perf_counter() - started))
    return times[WARM:]


def waiting_threads(rounds: int) -> str:
    """Each policy in fresh processes, in turn; the median of their medians."""
    found: dict[tuple[str, int], list[float]] = {}
    for busy in BUSY:
        with ExitStack() as stack:
            for _ in range(busy):
                other = subprocess.Popen([sys.executable, "-c", "while True: pass"])
                stack.callback(other.wait)
                stack.callback(other.kill)
            for _ in range(max(3, rounds // 5)):
                for policy, settings in POLICIES.items():
                    found.setdefault((policy, busy), []).append(statistics.median(_in_process(settings)))
    header = ["threads that wait", *(f"{words}, ms" for words in BUSY.values())]
    rows = [[policy, *(f"{statistics.median(found[policy, busy]):.1f}" for busy in BUSY)] for policy in POLICIES]
    return table(header, rows)


def _in_process(settings: dict[str, str]) -> list[float]:
    kept = {k: v for k, v in os.environ.items() if k not in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "OMP_NUM_THREADS")}
    run = subprocess.run(
        [sys.executable, "-c", "import json, waiting; print(json.dumps(waiting.step_times()))"],
        cwd=Path(__file__).parent,
        env={**kept, **settings},
        check=True,
        capture_output=True,
        text=True,
    )
    times: list[float] = json.loads(run.stdout.splitlines()[-1])
    return times
