"""`--dry-run`: the cost of a command, measured on a small part of its work, of which nothing is stored."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import torch
import typer
from torch import Tensor, nn

from expmflow._validation import expect
from expmflow.cli.measure import estimate, peak_bytes, seconds_of, size_text, time_text
from expmflow.distributions.describe import count_parameters
from expmflow.runs.evaluation import Trained
from expmflow.training.build import build_data, build_model, resolve
from expmflow.training.config import Config
from expmflow.training.distributed import Processes
from expmflow.training.job import Run
from expmflow.training.loop import step
from expmflow.training.optimizer import Average, build_optimizer
from expmflow.training.randomness import Randomness
from expmflow.training.run import RunFolder
from expmflow.training.state import State, evaluation_model
from expmflow.training.validation import mean_nll

DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Print parameters, memory and time, or what would be read; write nothing.")
]


def described(lines: dict[str, str]) -> str:
    """One line for each fact."""
    return "\n".join([*(f"{name:<11} {text}" for name, text in lines.items()), "nothing was written"])


def dry_run_text(config: Config, folder: Path, device: str) -> str:
    """The text for `train`."""
    data = build_data(config.data, Randomness(config.train.seed))
    config, size = resolve(config, data), config.train.batch_size
    RunFolder(folder).check(config, data)
    most = f"a batch of at most {len(data.train)} rows, as there are for training, by train.batch_size"
    expect(len(data.train) >= size, most, size)
    run = Run(config, data, RunFolder(Path("dry-run")), Processes(), torch.device(device), lambda record: None)
    model = build_model(config, data.event_shape).to(run.device).train()
    average = None if config.optim.ema is None else Average(model, config.optim.ema)
    state = State(model, build_optimizer(model, config.optim), average)
    step(run, state, model)  # the first step initialises
    batch = peak_bytes(lambda: step(run, state, model))
    training = seconds_of(lambda: step(run, state, model))
    part = 1 if len(data.validation) else 0
    rows = (data.train, data.validation)[part]
    labels = None if data.labels is None else data.labels[part][:size]
    trained = evaluation_model(state)
    one_batch = seconds_of(lambda: mean_nll(run, trained, rows[:size], "validation", labels))
    validation = one_batch * math.ceil(len(rows) / size)
    validations = math.ceil(config.train.steps / config.train.validate_every)
    copies = 3 + (average is not None)  # weights, the optimizer's two moments, their average
    held = copies * _bytes(*model.parameters()) + _bytes(data.train, data.validation, data.test)
    return described(
        {
            "reads": _place(config),
            "writes": str(folder),
            "data": f"{len(data.train) + len(data.validation) + len(data.test)} rows of shape {data.event_shape}: "
            f"{len(data.train)} for training, {len(data.validation)} for validation, {len(data.test)} for test",
            "parameters": parameters(model),
            "memory": f"about {size_text(held + batch)}: {size_text(batch)} for a batch of {size}, "
            f"{size_text(held)} for weights, optimizer and data",
            "time": f"about {time_text(training * config.train.steps + validation * validations)}: "
            f"{config.train.steps} steps of {1000 * training:.1f} ms, {validations} validations, on {device}",
        }
    )


def run_text(
    trained: Trained,
    work: Callable[[int], object],
    rows: int,
    batch: int,
    *,
    what: str,
    writes: Path | None = None,
    copies: int = 1,
) -> str:
    """For a command that processes rows of an open run: `work` takes a number of rows, `what` names them.

    With importance samples, each row is processed as many times as there are `copies` of it.
    """
    cost = estimate(work, rows * copies, batch)
    held = _bytes(*trained.model.parameters()) + rows * _bytes(torch.zeros(trained.event_shape))
    return described(
        {
            "reads": reads(trained),
            "writes": "nothing but what it prints" if writes is None else str(writes),
            "parameters": parameters(trained.model),
            "rows": f"{what}, of shape {trained.event_shape}",
            "memory": f"about {size_text(held + cost.bytes)}: {size_text(cost.bytes)} for a batch of "
            f"{min(rows * copies, batch)}, {size_text(held)} for weights and rows",
            "time": f"about {time_text(cost.seconds)}, on {trained.device}",
        }
    )


def reads(trained: Trained) -> str:
    """A run's folder, and the source of its rows."""
    return f"{trained.folder.path}; its data: {_place(trained.config)}"


def _place(config: Config) -> str:
    """The data's name, and its path if the config has one."""
    place = config.data.path or config.data.dir
    return config.data.name + ("" if place is None else f" ({place})")


def parameters(model: nn.Module) -> str:
    return f"{count_parameters(model):,}"


def _bytes(*tensors: Tensor) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)
