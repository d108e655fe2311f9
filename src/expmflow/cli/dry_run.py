"""What a run will take: measured on a few steps, of which nothing is kept."""

from __future__ import annotations

import math
import time
from datetime import timedelta
from pathlib import Path

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from expmflow._validation import expect
from expmflow.training.build import build_data, build_model, log_likelihood
from expmflow.training.config import Config
from expmflow.training.distributed import Processes
from expmflow.training.loop import Run, State, step
from expmflow.training.optimizer import Average, build_optimizer
from expmflow.training.randomness import Randomness
from expmflow.training.run import RunFolder

MEASURED_STEPS = 3


def dry_run_text(config: Config, device: str) -> str:
    """Parameters, memory and time, as `train --dry-run` prints them."""
    data = build_data(config.data, Randomness(config.train.seed))
    size = config.train.batch_size
    expect(len(data.train) >= size, f"a batch of at most {len(data.train)} rows, as there are for training", size)
    run = Run(config, data, RunFolder(Path("dry-run")), Processes(), torch.device(device), lambda record: None)
    model = build_model(config, data.event_shape).to(run.device).train()
    average = None if config.optim.ema is None else Average(model, config.optim.ema)
    state = State(model, build_optimizer(model, config.optim), average)
    step(run, state, model)  # the first one initialises, and is slow
    activations = _saved_bytes(run, state)
    started = time.perf_counter()
    for _ in range(MEASURED_STEPS):
        step(run, state, model)
        state.step += 1
    training = (time.perf_counter() - started) / MEASURED_STEPS
    validations = math.ceil(config.train.steps / config.train.validate_every)
    batches = math.ceil((len(data.validation) or len(data.train)) / size)
    seconds = training * config.train.steps + _forward_seconds(run, state) * batches * validations
    parameters = sum(p.numel() for p in model.parameters())
    width = next(model.parameters()).element_size()
    copies = 4 + (average is not None)  # weights, gradients, the optimizer's two moments, their average
    rows = sum(len(part) for part in (data.train, data.validation, data.test))
    held = parameters * width * copies + rows * torch.Size(data.event_shape).numel() * data.train.element_size()
    lines = [
        f"data        {rows} rows of shape {tuple(data.event_shape)}: {len(data.train)} for training, "
        f"{len(data.validation)} for validation, {len(data.test)} for test",
        f"parameters  {parameters:,}",
        f"memory      about {_size(held + activations)}: {_size(activations)} for a batch of {size}, "
        f"{_size(held)} for weights, optimizer and data",
        f"time        about {timedelta(seconds=round(seconds))}: {config.train.steps} steps of "
        f"{1000 * training:.1f} ms, {validations} validations, on {device}",
        "nothing was written",
    ]
    return "\n".join(lines)


def _saved_bytes(run: Run, state: State) -> int:
    """What a forward pass keeps for the backward pass, each piece of memory counted once."""
    seen: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        seen[storage.data_ptr()] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(note, lambda tensor: tensor):
        kept = _likelihood(run, state)
    del kept
    return sum(seen.values())


def _forward_seconds(run: Run, state: State) -> float:
    state.model.eval()
    with torch.no_grad():
        _likelihood(run, state)
        started = time.perf_counter()
        _likelihood(run, state)
    return time.perf_counter() - started


def _likelihood(run: Run, state: State) -> Tensor:
    size = run.config.train.batch_size
    x = run.rows(run.data.train[:size])
    return log_likelihood(state.model, x, run.noise(state.model, size, "noise", 0))


def _size(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"
