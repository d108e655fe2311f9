"""The training loop: setup, fit, finish."""

from __future__ import annotations

import copy
import logging
import math
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from expmflow._validation import expect
from expmflow.data import Dataset
from expmflow.data.kinds import KINDS
from expmflow.distributions import Density, NonFiniteError
from expmflow.numerics import ConvergenceError
from expmflow.training.build import build_data, build_model, fits, resolve
from expmflow.training.checkpoint import newest_checkpoint, remove_old, save_checkpoint
from expmflow.training.config import Config, ConfigError
from expmflow.training.distributed import own_device, processes
from expmflow.training.job import OnSamples, OnStep, Report, Run
from expmflow.training.locks import locked
from expmflow.training.memory import keep_freed_memory
from expmflow.training.optimizer import Average, build_optimizer, gradient_norm, kl_weight, learning_rate
from expmflow.training.randomness import Randomness
from expmflow.training.run import RunFolder
from expmflow.training.sampling import draw
from expmflow.training.state import State, evaluation_model
from expmflow.training.validation import TrainingError, stopped, validate
from expmflow.training.weights import load_weights

log = logging.getLogger(__name__)


def train(
    config: Config,
    folder: str | Path,
    *,
    device: str = "cpu",
    init_from: str | Path | None = None,
    report: Report = lambda record: None,
    on_samples: OnSamples = lambda step, samples: None,
    on_step: OnStep = lambda step: None,
    model: Density | None = None,
    data: Dataset | None = None,
) -> Density:
    """Train the run in `folder`, or resume it; returns the model with its best weights.

    Args:
        config: the settings. If the folder holds a run with the same config, it is resumed; the number of steps may
            grow.
        folder: where the run is written.
        device: `"cpu"`, `"cuda"`, ….
        init_from: the folder of a run whose weights are the initial ones.
        report: called with each record that goes into `metrics.jsonl`.
        on_samples: called with the step and samples of the averaged weights, every `train.sample_every` steps.
        on_step: called with the number of each finished step.
        model, data: instead of those that the config describes.
    """
    keep_freed_memory()
    if config.train.threads is not None:
        torch.set_num_threads(config.train.threads)
    data = build_data(config.data, Randomness(config.train.seed)) if data is None else data
    config = resolve(config, data) if model is None or fits(config, data) else config
    expect(
        len(data.train) >= config.train.batch_size,
        f"a batch of at most {len(data.train)} rows, as there are for training, by train.batch_size",
        config.train.batch_size,
    )
    where = own_device(device)
    with processes(where, config.train.timeout) as among, _interruptible() as interrupted, ExitStack() as until_done:
        run = Run(config, data, RunFolder(Path(folder)), among, where, report, on_samples, on_step)
        state = setup(run, model, init_from, until_done)
        fit(run, state, interrupted)
        among.wait()
        return finish(run, state)


def setup(run: Run, model: Density | None, init_from: str | Path | None, until_done: ExitStack) -> State:
    """A new state, or that of the newest intact checkpoint; other processes cannot use the folder meanwhile."""
    model = build_model(run.config, run.data.event_shape) if model is None else model
    run.row_dtype = torch.float64 if model.takes_double else None
    model.start_from(run.data.train)
    kl_warmup = run.config.optim.kl_warmup
    if kl_warmup and not model.takes_beta:
        raise ConfigError(
            f"Expected optim.kl_warmup=0 for {type(model).__name__}, which has no KL part; got {kl_warmup}."
        )
    if init_from is not None:
        load_weights(model, RunFolder(Path(init_from)).weights)
    if run.among.writes:  # what is refused before this leaves no files behind
        run.folder.check(run.config, run.data)
        run.folder.path.mkdir(parents=True, exist_ok=True)
        until_done.enter_context(locked(run.folder.path))
        run.folder.start(run.config, run.data)
    run.among.wait()
    model = model.to(run.device).train()
    average = None if run.config.optim.ema is None else Average(model, run.config.optim.ema)
    state = State(model, build_optimizer(model, run.config.optim), average)
    checkpoint = newest_checkpoint(run.folder.checkpoints)
    if checkpoint is not None:
        state.restore(checkpoint)
        log.info("Resuming at step %d.", state.step)
        if init_from is not None:
            log.warning(
                "The weights of %s are not used: the run in %s goes on with its own.", init_from, run.folder.path
            )
    if run.among.writes:
        if checkpoint is None:
            run.folder.set_weights_aside()
        run.folder.trim_metrics(state.step)
    return state


def fit(run: Run, state: State, interrupted: Callable[[], bool]) -> None:
    """All remaining steps, with a checkpoint at intervals, at the end, and on interruption."""
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
        stop = run.among.total(torch.tensor(float(interrupted()), device=run.device)) > 0
        if stop or state.step % settings.checkpoint_every == 0 or state.step == settings.steps:
            keep(run, state)
        if stop:
            raise KeyboardInterrupt
        if settings.sample_every and state.step % settings.sample_every == 0 and run.among.writes:
            _show_samples(run, state)
    if _gave_up(run, state):
        keep(run, state)


def step(run: Run, state: State, replica: nn.Module) -> Tensor:
    """One step of the optimizer on this process's slice of the batch; returns the loss."""
    settings, size = run.config.train, run.config.train.batch_size
    x, context = run.batch(state.step)
    noise = run.noise(state.model, size, "noise", state.step)
    weight = kl_weight(run.config.optim, state.step)
    beta = {"beta": torch.tensor(weight, device=run.device, dtype=run.dtype)} if state.model.takes_beta else {}
    for group in state.optimizer.param_groups:
        group["lr"] = learning_rate(run.config.optim, state.step, run.steps_per_epoch)
    state.optimizer.zero_grad(set_to_none=True)
    problem = ""
    loss = torch.full((), math.nan, device=run.device)
    coarse = torch.autocast(run.device.type, torch.bfloat16, enabled=settings.precision == "bfloat16")
    try:
        own_rows = run.among.slice(torch.arange(size)).tolist()
        with coarse, run.layer_draws(state.model, own_rows, "layers", state.step):
            own = tuple(run.among.slice(part) for part in noise)
            loss = -replica(x, context, noise=own, **beta).mean()
        problem = "" if math.isfinite(float(loss.detach())) else "the loss"
    except NonFiniteError as error:
        problem = error.layer
    if not _any_process(run, problem):
        loss.backward()
        norm = gradient_norm(state.model, run.config.optim.clip)
        problem = "" if bool(torch.isfinite(norm)) else "the gradient"
        if not _any_process(run, problem):
            state.optimizer.step()
            if state.average is not None:
                state.average.update(state.model, state.step)
            return loss
    if settings.on_nonfinite == "stop":
        raise stopped(run, f"loss at step {state.step + 1}", problem)
    state.skipped += 1
    state.optimizer.zero_grad(set_to_none=True)
    return loss


def keep(run: Run, state: State) -> None:
    """Write a checkpoint; keep the previous and the best one, and delete the others."""
    if run.among.writes:
        save_checkpoint(run.folder.checkpoints, state.checkpoint())
        remove_old(run.folder.checkpoints, keep={state.best_step})
    run.among.wait()


def finish(run: Run, state: State) -> Density:
    """The model with the weights that were best in validation."""
    if state.best_step < 0:
        raise TrainingError(f"Expected a validation that is finite; got {state.nonfinite_validations} that were not.")
    model = copy.deepcopy(state.model).eval()
    load_weights(model, run.folder.weights)
    return model


def _gave_up(run: Run, state: State) -> bool:
    patience = run.config.train.patience
    return patience is not None and state.stale >= patience


def _show_samples(run: Run, state: State) -> None:
    """Show samples; if they fail, warn instead of ending the run."""
    try:
        count = KINDS[run.data.kind].shown_samples
        classes = getattr(run.config.model, "classes", None)
        context = run.context(torch.arange(count) % classes if classes else None)
        samples = draw(evaluation_model(state), count, run.randomness, context=context)
    except (NonFiniteError, ConvergenceError) as error:
        log.warning("No samples at step %d: %s", state.step, error)
        return
    run.on_samples(state.step, samples)


def _any_process(run: Run, problem: str) -> bool:
    """Whether any process has a problem, because all of them must act alike."""
    return bool(run.among.total(torch.tensor(float(bool(problem)), device=run.device)) > 0)


@contextmanager
def _interruptible() -> Iterator[Callable[[], bool]]:
    """Ctrl-C asks the loop to stop after the current step."""
    stopping = False

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal stopping
        stopping = True
        signal.signal(signal.SIGINT, before)  # a second Ctrl-C stops at once

    try:
        before = signal.signal(signal.SIGINT, stop)
    except ValueError:  # not the main thread
        yield lambda: False
        return
    try:
        yield lambda: stopping
    finally:
        signal.signal(signal.SIGINT, before)
