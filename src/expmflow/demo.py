"""Two flows of the same size on the same digits: which one explains them better?

    python -m expmflow.demo --out runs/demo

A Convolutional Sylvester flow against couplings with 1×1 mixing, on the 8 × 8 digits that ship with scikit-learn: equal
parameters, equal steps, and for each model the learning rate that was best on the validation digits, out of the same
few (`--choose-rates` repeats that search). It ends with bits per dimension on the test digits, samples, and a report.
"""

from __future__ import annotations

import argparse
import math
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from expmflow.cli import let_waiting_threads_sleep

if __name__ == "__main__":  # before torch is loaded, which takes a while
    let_waiting_threads_sleep()

    def _leave(number: int, frame: object) -> None:
        os.write(2, b"Interrupted: nothing was begun yet.\n")
        os._exit(130)

    _before = signal.signal(signal.SIGINT, _leave)

import torch
from torch import Tensor

from expmflow.cli.console import by_step_number, progress, result, say, say_error
from expmflow.cli.errors import FAILED, INTERRUPTED, sentence
from expmflow.cli.output import save_text
from expmflow.data.drawing.grids import image_grid, save_grid
from expmflow.distributions import DequantizedFlow, bits_per_dim
from expmflow.distributions.describe import count_parameters
from expmflow.report.html import render
from expmflow.report.summary import summarise
from expmflow.runs.evaluation import Trained, open_run
from expmflow.runs.importance import importance_estimates, results_file
from expmflow.training.build import build_data, resolve
from expmflow.training.checkpoint import CheckpointError, newest_step
from expmflow.training.config import Config, ConfigError, parse_config
from expmflow.training.files import write_whole
from expmflow.training.loop import train
from expmflow.training.randomness import Randomness
from expmflow.training.run import RunFolder

if TYPE_CHECKING:
    from PIL.Image import Image

STEPS = 800
IMPORTANCE_SAMPLES = 100
GREY_LEVELS, COLUMNS = 17, 16
RATES = (0.003, 0.01, 0.03, 0.1)  # the rates that both could choose from
MODELS: dict[str, dict[str, Any]] = {
    "sylvester": {"subflow": "sylvester", "levels": 1, "subflows": 6, "hidden": 48},
    "coupling": {"subflow": "coupling", "mixing": "1x1", "levels": 1, "subflows": 6, "growth": 12},
}
CHOSEN = {"sylvester": 0.03, "coupling": 0.03}  # python -m expmflow.demo --choose-rates


@dataclass(frozen=True)
class Outcome:
    """The results of a model: bits per dimension of each test digit, two ways, and the round-trip error."""

    parameters: int
    elbo: Tensor
    nll: Tensor
    round_trip: float
    seconds: float


def config(model: str, rate: float, steps: int = STEPS) -> Config:
    """The config of one model's run."""
    return parse_config(
        {
            "data": {"name": "digits"},
            "model": {"kind": "image", **MODELS[model]},
            "optim": {"optimizer": "adamax", "lr": rate, "warmup": 50, "decay": 0.5, "decay_every": 300, "ema": 0.99},
            "train": {
                "steps": steps,
                "batch_size": 64,
                "validate_every": 100,
                "checkpoint_every": 200,
                "log_every": 20,
            },
        }
    )


def run(model: str, folder: Path, *, rate: float | None = None, steps: int = STEPS) -> Trained:
    """Train one of the models, with progress; resume a run of the same settings."""
    wanted = config(model, rate or CHOSEN[model], steps)
    done = _done(wanted, folder)
    if done < steps:
        say(f"Going on with {model} in {folder} after step {done}." if done else f"Training {model} for {steps} steps.")
    else:
        say(f"{model} in {folder} is trained already, for {done} steps.")
    with progress(model, steps) as advance:
        train(wanted, folder, on_step=by_step_number(advance))
    return open_run(folder)


def _done(wanted: Config, folder: Path) -> int:
    """The finished steps of a run of these settings; a run of others, as of an earlier version, is set aside."""
    run, data = RunFolder(folder), build_data(wanted.data, Randomness(wanted.train.seed))
    try:
        run.check(resolve(wanted, data), data)
    except (ConfigError, CheckpointError):
        aside = next(place for k in count(1) if not (place := folder.with_name(f"{folder.name}-before-{k}")).exists())
        folder.rename(aside)
        say(f"The run in {folder} began with other settings: it is in {aside} now, and a new one begins.")
    return newest_step(run.checkpoints)


def evaluate(trained: Trained, seconds: float, samples: int = IMPORTANCE_SAMPLES) -> Outcome:
    """Evaluate on the test digits."""
    rows = trained.data().test
    with progress("testing", len(rows)) as advance:
        estimates = importance_estimates(
            trained, rows, samples, kept_in=results_file(trained, "test", samples), advance=advance
        )
    elbo, nll = (bits_per_dim(value, trained.event_shape) for value in (estimates.elbo, estimates.log_prob))
    return Outcome(count_parameters(trained.model), elbo, nll, round_trip(trained), seconds)


@torch.no_grad()
def round_trip(trained: Trained, n: int = 64) -> float:
    """The largest |z − encode(decode(z))| over samples."""
    flow = cast(DequantizedFlow, trained.model).flow
    z = flow.base.rsample(n, noise=torch.randn(n, *trained.event_shape, generator=torch.Generator().manual_seed(0)))
    return float((flow.encode(flow.decode(z)) - z).abs().max())


def training_seconds(trained: Trained) -> float:
    """The training time of all steps, including those before an interruption."""
    seconds, last = 0.0, 0
    for record in trained.folder.read_metrics():
        if "seconds_per_step" in record:
            seconds, last = seconds + (record["step"] - last) * record["seconds_per_step"], record["step"]
    return seconds


def samples_grid(opened: Sequence[Trained]) -> Image:
    """Two lines of test digits, then two of samples for each model."""
    lines = [opened[0].data().test[: 2 * COLUMNS], *(trained.sample(2 * COLUMNS) for trained in opened)]
    return image_grid(torch.cat([line.long() for line in lines]), levels=GREY_LEVELS, columns=COLUMNS)


def comparison(outcomes: dict[str, Outcome]) -> str:
    """The final output."""
    lines = [f"{'':12}{'parameters':>11}{'−ELBO':>16}{'NLL':>16}{'round trip':>12}{'seconds':>9}"]
    for name, found in outcomes.items():
        elbo, nll = _with_error(found.elbo), _with_error(found.nll)
        lines.append(
            f"{name:12}{found.parameters:>11,}{elbo:>16}{nll:>16}{found.round_trip:>12.1e}{found.seconds:>9.0f}"
        )
    sylvester, coupling = outcomes["sylvester"], outcomes["coupling"]
    difference = coupling.nll - sylvester.nll
    ahead = "sylvester" if float(difference.mean()) > 0 else "coupling"
    lines.append(
        f"coupling − sylvester, digit by digit: {_with_error(difference)} bits per dimension (NLL): {ahead} is ahead"
    )
    return "\n".join(lines)


def choose_rates(folder: Path) -> None:
    """Train both models at each of the rates; prints the validation bits per dimension, lower is better."""
    for model in MODELS:
        for rate in RATES:
            trained = run(model, folder / f"{model}-{rate}", rate=rate)
            best = min(r["validation_nll"] for r in trained.folder.read_metrics() if "validation_nll" in r)
            result(f"{model} {rate}: {best / (64 * math.log(2)):.4f}")


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(
        prog="python -m expmflow.demo",
        description="Train two flows on digits and compare them. Writes to --out alone.",
        epilog="example: python -m expmflow.demo --out runs/demo",
    )
    parser.add_argument("--out", type=Path, default=Path("runs/demo"), help="where the runs and the report go")
    parser.add_argument("--steps", type=_count, default=STEPS, help="optimizer steps of each model (%(default)s)")
    parser.add_argument(
        "--importance-samples", type=_count, default=IMPORTANCE_SAMPLES, help="for each test digit (%(default)s)"
    )
    parser.add_argument("--choose-rates", action="store_true", help="search the learning rates instead")
    given = parser.parse_args(arguments)
    if given.out.exists() and not given.out.is_dir():
        parser.error(f"Expected --out to be a folder; got the file {given.out}.")
    try:
        if given.choose_rates:
            choose_rates(given.out)
        else:
            _compare(given.out, given.steps, given.importance_samples)
    except KeyboardInterrupt:
        say("Interrupted: the same command goes on where this one was.")
        return INTERRUPTED
    except Exception as error:
        text = sentence(error)
        if text is None:
            raise
        say_error(text)
        return FAILED
    return 0


def _compare(out: Path, steps: int, samples: int) -> None:
    """Train, test, and say which model is ahead."""
    outcomes, opened = {}, []
    for model in MODELS:
        trained = run(model, out / model, steps=steps)
        outcomes[model] = evaluate(trained, training_seconds(trained), samples)
        opened.append(trained)
    grid = samples_grid(opened)
    write_whole(out / "samples.png", lambda temporary: save_grid(grid, temporary))
    save_text(out / "report.html", render([summarise(trained) for trained in opened]))
    result(comparison(outcomes))
    say(f"report in {out / 'report.html'}; test digits, then samples of each, in {out / 'samples.png'}")


def _count(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"Expected a whole number of at least 1; got {text!r}.")
    return int(text)


def _with_error(values: Tensor) -> str:
    return f"{float(values.mean()):.4f} ± {float(values.std()) / math.sqrt(len(values)):.4f}"


if __name__ == "__main__":
    signal.signal(signal.SIGINT, _before)
    sys.exit(main())
