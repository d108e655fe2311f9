"""The training loop: setup, fit, validate."""

from __future__ import annotations

import copy
import logging
import math
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from expmflow._validation import expect
from expmflow.data import Dataset
from expmflow.distributions import NonFiniteError
from expmflow.numerics import ConvergenceError
from expmflow.training.build import DTYPES, build_data, build_model, class_context, log_likelihood, noise_kind, resolve
from expmflow.training.checkpoint import Checkpoint, list_checkpoints, newest_checkpoint, remove_old, save_checkpoint
from expmflow.training.config import Config
from expmflow.training.distributed import Processes, processes
from expmflow.training.optimizer import (
    Average,
    build_optimizer,
    gradient_norm,
    learning_rate,
    load_optimizer_state,
    optimizer_state,
)
from expmflow.training.randomness import Noise, Randomness
from expmflow.training.run import RunFolder, load, load_weights
from expmflow.training.sampling import draw

Report = Callable[[dict[str, Any]], None]
OnSamples = Callable[[int, Tensor], None]
OnStep = Callable[[int], None]
SHOWN_SAMPLES, SHOWN_IMAGES = 1024, 64
log = logging.getLogger(__name__)


class TrainingError(RuntimeError):
    """Training stopped; the message says at which step, in which layer, and where the last good checkpoint is."""


@dataclass
class State:
    """Everything that a checkpoint holds."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    average: Average | None
    step: int = 0
    best: float = math.inf
    best_step: int = -1
    stale: int = 0
    skipped: int = 0
    nonfinite_validations: int = 0

    def checkpoint(self) -> Checkpoint:
        tensors = {"model": self.model.state_dict(), "optimizer": optimizer_state(self.optimizer, self.model)}
        if self.average is not None:
            tensors["average"] = self.average.values
        plain = {"best": None if math.isinf(self.best) else self.best, "best_step": self.best_step}
        counts = {"skipped": self.skipped, "nonfinite_validations": self.nonfinite_validations}
        return Checkpoint(self.step, tensors, {**plain, "stale": self.stale, **counts})

    def restore(self, checkpoint: Checkpoint) -> None:
        self.model.load_state_dict(checkpoint.tensors["model"])
        load_optimizer_state(self.optimizer, self.model, checkpoint.tensors["optimizer"])
        if self.average is not None:
            self.average.load(checkpoint.tensors["average"])
        best = checkpoint.state["best"]
        self.step = checkpoint.step
        self.best = math.inf if best is None else best
        self.best_step, self.stale = checkpoint.state["best_step"], checkpoint.state["stale"]
        self.skipped = checkpoint.state["skipped"]
        self.nonfinite_validations = checkpoint.state.get("nonfinite_validations", 0)  # not in older checkpoints


@dataclass
class Run:
    """The fixed surroundings of the loop."""

    config: Config
    data: Dataset
    folder: RunFolder
    among: Processes
    device: torch.device
    report: Report = lambda record: None
    on_samples: OnSamples = lambda step, samples: None
    on_step: OnStep = lambda step: None
    randomness: Randomness = field(init=False)

    def __post_init__(self) -> None:
        self.randomness = Randomness(self.config.train.seed)

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES[self.config.train.precision]

    @property
    def steps_per_epoch(self) -> int:
        return max(1, len(self.data.train) // self.config.train.batch_size)

    def record(self, record: dict[str, Any]) -> None:
        """Into the metrics, and to whoever watches; one process speaks for all."""
        if self.among.writes:
            self.folder.append_metrics(record)
            self.report(record)

    def rows(self, rows: Tensor) -> Tensor:
        return rows.to(self.device, self.dtype if rows.is_floating_point() else rows.dtype)

    def batch(self, step: int) -> tuple[Tensor, Tensor | None]:
        """This process's rows of a training step, and their context."""
        size, labels = self.config.train.batch_size, None
        if self.data.draw is not None:
            return self.rows(self.among.slice(self.data.draw(size, self.randomness.generator("data", step)))), None
        chosen = self.among.slice(self.randomness.batch(step, len(self.data.train), size))
        x = self.data.train[chosen]
        if self.config.data.flip:
            turned = self.among.slice(self.randomness.noise("uniform", (size,), "flip", step)) < 0.5
            x = torch.where(turned[:, None, None, None], x.flip(3), x)
        if self.data.labels is not None:
            labels = self.data.labels[0][chosen]
        return self.rows(x), self.context(labels)

    def context(self, labels: Tensor | None) -> Tensor | None:
        """What the model is told of the rows with these labels."""
        told = class_context(labels, getattr(self.config.model, "classes", None), self.dtype)
        return None if told is None else told.to(self.device)

    def noise(self, model: nn.Module, rows: int, label: str, counter: int) -> Tensor | None:
        """Noise for a global batch, if the model wants any."""
        kind = noise_kind(model)
        if kind is None:
            return None
        shape = (rows, *self.data.event_shape)
        drawn = self.randomness.noise(_noise(kind), shape, label, counter)
        return drawn.to(self.device, self.dtype)


def train(
    config: Config,
    folder: str | Path,
    *,
    device: str = "cpu",
    init_from: str | Path | None = None,
    report: Report = lambda record: None,
    on_samples: OnSamples = lambda step, samples: None,
    on_step: OnStep = lambda step: None,
    model: nn.Module | None = None,
    data: Dataset | None = None,
) -> nn.Module:
    """Train, or go on training, the run in `folder`; return the model with its best weights.

    Args:
        config: what to do. A folder that holds a run already is resumed, if the config is the same; the number of steps
            may grow.
        folder: where the run is written.
        device: `"cpu"`, `"cuda"`, ….
        init_from: a run whose weights to start from.
        report: called with each record that goes into `metrics.jsonl`.
        on_samples: called with the step and samples of the averaged weights, every `train.sample_every` steps.
        on_step: called with the number of each step that is done, as often as there are steps.
        model, data: in place of what the config describes.
    """
    if config.train.threads is not None:
        torch.set_num_threads(config.train.threads)
    data = build_data(config.data, Randomness(config.train.seed)) if data is None else data
    config = resolve(config, data) if model is None else config
    expect(
        len(data.train) >= config.train.batch_size,
        f"a batch of at most {len(data.train)} rows, as there are for training",
        config.train.batch_size,
    )
    where = torch.device(device)
    with processes(where) as among, _interruptible() as interrupted:
        run = Run(config, data, RunFolder(Path(folder)), among, where, report, on_samples, on_step)
        state = setup(run, model, init_from)
        fit(run, state, interrupted)
        among.wait()
        return finish(run, state)


def setup(run: Run, model: nn.Module | None, init_from: str | Path | None) -> State:
    """A new state, or the one of the newest checkpoint that is whole."""
    if run.among.writes:
        run.folder.start(run.config, run.data.event_shape, run.data.names)
    run.among.wait()
    model = build_model(run.config, run.data.event_shape) if model is None else model
    if init_from is not None:
        model.load_state_dict(load(init_from).state_dict())
    model = model.to(run.device).train()
    average = None if run.config.optim.ema is None else Average(model, run.config.optim.ema)
    state = State(model, build_optimizer(model, run.config.optim), average)
    checkpoint = newest_checkpoint(run.folder.checkpoints)
    if checkpoint is not None:
        state.restore(checkpoint)
        log.info("Resuming at step %d.", state.step)
    if run.among.writes:
        run.folder.trim_metrics(state.step)
    return state


def fit(run: Run, state: State, interrupted: Callable[[], bool]) -> None:
    """All the steps that are left; a checkpoint at intervals, at the end, and when interrupted."""
    settings = run.config.train
    replica: Any = DistributedDataParallel(state.model) if run.among.count > 1 else state.model
    replica = torch.compile(replica) if settings.compile else replica
    since, seconds = state.step, time.perf_counter()
    while state.step < settings.steps and not _gave_up(run, state):
        loss = step(run, state, replica)
        state.step += 1
        if run.among.writes:
            run.on_step(state.step)
        if state.step % settings.log_every == 0 or state.step == settings.steps:
            elapsed = time.perf_counter() - seconds
            mean = run.among.total(loss.detach()) / run.among.count
            rate = learning_rate(run.config.optim, state.step - 1, run.steps_per_epoch)
            run.record(
                {
                    "step": state.step,
                    "nll": float(mean),
                    "lr": rate,
                    "seconds_per_step": elapsed / (state.step - since),
                    "skipped": state.skipped,
                }
            )
            since, seconds = state.step, time.perf_counter()
        if state.step % settings.validate_every == 0 or state.step == settings.steps:
            validate(run, state)
        stop = run.among.total(torch.tensor(float(interrupted()))) > 0
        if stop or state.step % settings.checkpoint_every == 0 or state.step == settings.steps:
            keep(run, state)
        if stop:
            raise KeyboardInterrupt
        if settings.sample_every and state.step % settings.sample_every == 0 and run.among.writes:
            _show_samples(run, state)
    if _gave_up(run, state):
        keep(run, state)


def step(run: Run, state: State, replica: nn.Module) -> Tensor:
    """One step of the optimizer on this process's part of the batch; the loss."""
    settings, size = run.config.train, run.config.train.batch_size
    x, context = run.batch(state.step)
    noise = run.noise(state.model, size, "noise", state.step)
    for group in state.optimizer.param_groups:
        group["lr"] = learning_rate(run.config.optim, state.step, run.steps_per_epoch)
    state.optimizer.zero_grad(set_to_none=True)
    problem = ""
    loss = torch.full((), math.nan)
    coarse = torch.autocast(run.device.type, torch.bfloat16, enabled=settings.precision == "bfloat16")
    try:
        with coarse:
            own = None if noise is None else run.among.slice(noise)
            loss = -log_likelihood(replica, x, own, context).mean()
        problem = "" if math.isfinite(float(loss.detach())) else "the loss"
    except NonFiniteError as error:
        problem = error.layer
    if not _anywhere(run, problem):
        loss.backward()
        norm = gradient_norm(state.model, run.config.optim.clip)
        problem = "" if bool(torch.isfinite(norm)) else "the gradient"
        if not _anywhere(run, problem):
            state.optimizer.step()
            if state.average is not None:
                state.average.update(state.model, state.step)
            return loss
    if settings.on_nonfinite == "stop":
        raise _stopped(run, f"loss at step {state.step + 1}", problem)
    state.skipped += 1
    state.optimizer.zero_grad(set_to_none=True)
    return loss


def validate(run: Run, state: State) -> None:
    """The mean negative log-likelihood of the validation rows under the averaged weights; the best are written out."""
    part = 1 if len(run.data.validation) else 0
    rows = (run.data.train, run.data.validation)[part]
    labels = None if run.data.labels is None else run.data.labels[part]
    value, problem = mean_nll(run, evaluation_model(state), rows, "validation", labels)
    if not math.isfinite(value):
        if run.config.train.on_nonfinite == "stop":
            raise _stopped(run, f"validation at step {state.step}", problem)
        state.nonfinite_validations += 1
    better = value < state.best
    state.stale = 0 if better else state.stale + 1
    lost = {"nonfinite_validations": state.nonfinite_validations} if state.nonfinite_validations else {}
    run.record({"step": state.step, "validation_nll": value, "best": better, **lost})
    if better:
        state.best, state.best_step = value, state.step
        if run.among.writes:
            run.folder.save_weights(evaluation_model(state).state_dict())


@torch.no_grad()
def mean_nll(run: Run, model: nn.Module, rows: Tensor, label: str, labels: Tensor | None = None) -> tuple[float, str]:
    """In batches, every process taking its share of them; the result does not depend on how many there are.

    NaN if it is not finite, with the layer where this process has found that.
    """
    problem = ""
    size = run.config.train.batch_size
    total = torch.zeros(2, dtype=torch.float64, device=run.device)
    for k, batch in enumerate(rows.split(size)):
        if k % run.among.count == run.among.rank:
            noise = run.noise(model, len(batch), label, k)
            context = run.context(None if labels is None else labels[k * size : (k + 1) * size])
            try:
                total[0] -= log_likelihood(model, run.rows(batch), noise, context).double().sum()
            except NonFiniteError as error:  # the other processes still wait for this one's sum
                total[0], problem = math.nan, error.layer
            total[1] += len(batch)
    if not problem and not bool(total[0].isfinite()):
        problem = "the likelihood"
    total = run.among.total(total)
    mean = float(total[0] / total[1])
    return (mean, "") if math.isfinite(mean) else (math.nan, problem)


def evaluation_model(state: State) -> nn.Module:
    """A copy in evaluation mode, with the averaged weights if there are any."""
    model = copy.deepcopy(state.model).eval()
    if state.average is not None:
        state.average.copy_to(model)
    return model


def keep(run: Run, state: State) -> None:
    """Write a checkpoint; the ones before the previous go, except the best."""
    if run.among.writes:
        save_checkpoint(run.folder.checkpoints, state.checkpoint())
        remove_old(run.folder.checkpoints, keep={state.best_step})
    run.among.wait()


def finish(run: Run, state: State) -> nn.Module:
    """The model with the best weights that validation found."""
    if state.best_step < 0:
        raise TrainingError(f"Expected a validation that is finite; got {state.nonfinite_validations} that were not.")
    model = copy.deepcopy(state.model).eval()
    load_weights(model, run.folder.weights)
    return model


def _gave_up(run: Run, state: State) -> bool:
    patience = run.config.train.patience
    return patience is not None and state.stale >= patience


def _show_samples(run: Run, state: State) -> None:
    """A picture is no reason to end a run: where there are no samples, there is a warning."""
    try:
        count = SHOWN_IMAGES if len(run.data.event_shape) == 3 else SHOWN_SAMPLES
        classes = getattr(run.config.model, "classes", None)
        context = run.context(torch.arange(count) % classes if classes else None)
        samples = draw(evaluation_model(state), count, run.randomness, context=context)
    except (NonFiniteError, ConvergenceError) as error:
        log.warning("No samples at step %d: %s", state.step, error)
        return
    run.on_samples(state.step, samples)


def _stopped(run: Run, what: str, problem: str) -> TrainingError:
    known = list_checkpoints(run.folder.checkpoints)
    last = f"the last good checkpoint is {known[0]}" if known else "there is no checkpoint yet"
    return TrainingError(f"Expected a finite {what}; got NaN or infinity in {problem or 'another process'}; {last}.")


def _anywhere(run: Run, problem: str) -> bool:
    """Whether any process has a problem; all of them have to do the same next."""
    return bool(run.among.total(torch.tensor(float(bool(problem)), device=run.device)) > 0)


def _noise(kind: str) -> Noise:
    return "uniform" if kind == "uniform" else "normal"


@contextmanager
def _interruptible() -> Iterator[Callable[[], bool]]:
    """Ctrl-C asks the loop to stop after the step, instead of tearing it apart."""
    asked = False

    def ask(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        asked = True
        signal.signal(signal.SIGINT, before)  # who asks twice does not want to wait

    try:
        before = signal.signal(signal.SIGINT, ask)
    except ValueError:  # not the main thread
        yield lambda: False
        return
    try:
        yield lambda: asked
    finally:
        signal.signal(signal.SIGINT, before)
