"""The preset cifar10-anchor-convexp and the plain model, trained in turn on CIFAR-10: the time of all their steps."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

import plain_image
from expmflow import transforms as T
from expmflow.data import load_images
from expmflow.training.build import build_data, build_model, resolve
from expmflow.training.config import load_config
from expmflow.training.loop import train
from expmflow.training.randomness import Randomness
from timing import table, undisturbed

STEPS = 1500
STRETCH = 250  # steps that share a row
TURN = 10  # steps that one model makes before it is the other's turn


def whole_training(rounds: int) -> str:
    """Step times over a training, in which the norms of the convolutions grow, and the number of terms with them."""
    ours, plain = take_turns("ours", "plain")
    rows = []
    for first in range(0, STEPS, STRETCH):
        mine, theirs = (steps[first : first + STRETCH] for steps in (ours, plain))
        norms, terms = (mine[-1][key] for key in ("norms", "terms"))
        found = [f"{min(norms):.2f} to {max(norms):.2f}", f"{sum(terms) / len(terms):.1f}"]
        rows.append([f"{first + 1} to {first + STRETCH}", *found, *_compared(mine, theirs)])
    rows.append(["all", "", "", *_compared(ours, plain)])
    header = ["steps", "norms at the end", "terms", "plain, ms", "ours, ms", "ratio", "of means", "of the undisturbed"]
    return table(header, rows)


def _compared(*models: Any) -> list[str]:
    mine, theirs = ([step["ms"] for step in steps] for steps in models)
    middle, *more = (typical(mine) / typical(theirs) for typical in (statistics.median, statistics.fmean, undisturbed))
    milliseconds = [f"{statistics.median(times):.0f}" for times in (theirs, mine)]
    return [*milliseconds, f"**{middle:.2f}**", *(f"{ratio:.2f}" for ratio in more)]


def take_turns(*names: str) -> list[list[dict[str, Any]]]:
    """What each of the models says of its steps; each is trained in a process of its own, while the others wait."""
    said: list[list[dict[str, Any]]] = [[] for _ in names]
    with ExitStack() as stack:
        workers = []
        for name in names:
            command, pipe = [sys.executable, __file__, name], subprocess.PIPE
            workers.append(stack.enter_context(subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)))
            stack.callback(workers[-1].kill)  # validation and test come after the last step
        for step in range(0, STEPS, TURN):
            for worker, steps in zip(workers, said, strict=True):
                print(file=worker.stdin, flush=True)
                steps += [json.loads(worker.stdout.readline()) for _ in range(TURN)]  # type: ignore[union-attr]
            print(f"\r{step + TURN} of {STEPS} steps", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return said


def answer(run: Callable[[Callable[..., None]], object], facts: Callable[[], dict[str, Any]] = dict) -> None:
    """Train, with a line of JSON for each step; wait for a line before the first and after every `TURN` of them."""
    sys.stdin.readline()
    start = time.perf_counter()

    def after(step: int, *_: object) -> None:
        nonlocal start
        print(json.dumps({"ms": 1e3 * (time.perf_counter() - start), **facts()}), flush=True)
        if step % TURN == 0:
            sys.stdin.readline()
        start = time.perf_counter()

    run(after)


def ours() -> None:
    """As `expmflow train` does it."""
    config = load_config("cifar10-anchor-convexp", [f"train.steps={STEPS}", "train.log_every=10000"])
    data = build_data(config.data, Randomness(config.train.seed))
    config = resolve(config, data)
    model = build_model(config, data.event_shape)
    with tempfile.TemporaryDirectory() as folder:
        answer(lambda after: train(config, folder, model=model, data=data, on_step=after), lambda: _state(model))


def _state(model: nn.Module) -> dict[str, Any]:
    layers = [layer for layer in model.modules() if isinstance(layer, T.ConvExp)]
    return {
        "norms": [layer.coeff * layer.parametrizations.kernel[-1].used for layer in layers],
        "terms": [layer.plan(layer.parametrizations.kernel.original).terms for layer in layers],
    }


def plain() -> None:
    data = load_images("cifar10", generator=torch.Generator())
    answer(lambda after: plain_image.fit(plain_image.PlainImageFlow("convexp"), data.train, STEPS, after))


if __name__ == "__main__":
    {"ours": ours, "plain": plain}[sys.argv[1]]()
