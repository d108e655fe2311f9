"""The training loop for your own densities, from Python."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from expmflow._validation import expect, expect_finite, expect_one_of, expect_type
from expmflow.data import Dataset, split
from expmflow.data.kinds import KINDS
from expmflow.distributions import Density
from expmflow.training.config import Config, OptimConfig, parse_config
from expmflow.training.loop import train as train_run
from expmflow.training.model_config import GivenModelConfig
from expmflow.training.randomness import Randomness
from expmflow.training.sections import GIVEN

BATCH = 256
PRECISIONS: dict[torch.dtype | None, str] = {torch.float32: "float32", torch.float64: "float64"}


def train(
    model: Density,
    data: Tensor | Dataset,
    folder: str | Path | None = None,
    *,
    kind: str = "vectors",
    validation: float = 0.1,
    device: str = "cpu",
    conditional: bool = False,
    report: Callable[[dict[str, Any]], None] = lambda record: None,
    on_step: Callable[[int], None] = lambda step: None,
    **settings: Any,
) -> Density:
    """Fit a density to rows; returns the weights with the best validation, in evaluation mode.

    This is the loop of `expmflow train`: every random number follows from the seed, checkpoints are atomic, a folder
    with the same training is resumed, and Ctrl-C saves first.

    Args:
        model: a flow, a dequantized flow, a VAE, or any other `distributions.Density`, in float32 or float64. The loop
            trains a copy; the result has the best weights, averaged if `ema` is given.
        data: `(rows, *event)`, or a `Dataset` with its own splits and labels.
        folder: where to write checkpoints and metrics; nowhere if None. A second call with the same folder, model, data
            and settings resumes an interrupted run; `steps` may grow. No config describes the model, so `expmflow.load`
            and the command line refuse the folder; write the result with `expmflow.save` if `expmflow.load` should
            read it.
        kind: of the rows, if `data` is a tensor: "vectors", "images", "graphs".
        validation: the fraction of a tensor's rows that is kept for validation, drawn by the seed.
        device: where to compute.
        conditional: give the model the classes of a `Dataset` with labels, as a one-hot context.
        report: called with each record of metrics: a dict with `step`, and `nll` or `validation_nll`, in nats.
        on_step: called with the number of each finished step.
        settings: of the sections `optim` and `train` of a config, by name: `steps`, `batch_size`, `lr`, `ema`,
            `patience`, `seed`, …. The default batch size is at most the number of training rows.

    Raises:
        ConfigError: with a line for each invalid setting.

    Example:
        >>> flow = ef.Flow(T.Chain([T.ActNorm(2), T.LinearExp(2)]), ef.distributions.StandardNormal((2,)))
        >>> best = ef.train(flow, torch.randn(200, 2), steps=20, lr=0.01, log_every=10)
        >>> best.log_prob(torch.zeros(1, 2)).shape
        torch.Size([1])
    """
    expect_type(isinstance(model, Density), "a distributions.Density to train", type(model).__name__)
    dtype = next((p.dtype for p in model.parameters()), None)
    expect(dtype in PRECISIONS, "a model with parameters in float32 or float64", dtype or "none")
    config = _config({"precision": PRECISIONS.get(dtype), **settings})
    rows = data if isinstance(data, Dataset) else _split(torch.as_tensor(data), validation, kind, config.train.seed)
    KINDS[rows.kind].check_event_shape(rows.event_shape)
    expect(
        rows.event_shape == model.event_shape,
        f"rows of shape {model.event_shape}, as the model has",
        rows.event_shape,
    )
    expect(not conditional or rows.labels is not None, "a Dataset with labels for conditional=True", "none")
    if conditional:
        config = config.model_copy(update={"model": GivenModelConfig(classes=rows.classes)})
    if "batch_size" not in settings:
        fitting = config.train.model_copy(update={"batch_size": min(BATCH, len(rows.train))})
        config = config.model_copy(update={"train": fitting})
    with tempfile.TemporaryDirectory() as nowhere:
        return train_run(
            config,
            nowhere if folder is None else folder,
            device=device,
            report=report,
            on_step=on_step,
            model=copy.deepcopy(model),
            data=rows,
        )


def _config(settings: dict[str, Any]) -> Config:
    """The settings by section; unknown ones are put into `train`, whose error message suggests similar names."""
    optim = OptimConfig.model_fields
    sections: dict[str, dict[str, Any]] = {"optim": {}, "train": {}}
    for name, value in settings.items():
        sections["optim" if name in optim else "train"][name] = value
    return parse_config({"data": {"name": GIVEN}, "model": {"kind": GIVEN}, **sections})


def _split(rows: Tensor, validation: float, kind: str, seed: int) -> Dataset:
    expect(rows.ndim > 1 and len(rows) > 1, "at least two rows (rows, *event)", f"shape {tuple(rows.shape)}")
    expect(0 <= validation < 1, "a share of rows for validation from 0 to below 1", validation)
    expect_one_of(kind, KINDS, "kind")
    rows = rows.detach().cpu()
    if rows.is_floating_point():
        expect_finite(rows, "data")
    order = torch.randperm(len(rows), generator=Randomness(seed).generator("split"), device="cpu")
    levels = None if rows.is_floating_point() else int(rows.max()) + 1
    return replace(split(rows[order], validation, 0.0), kind=kind, levels=levels)
