"""From a config to what it describes."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from expmflow.data import DataError, Dataset, load_table, split, two_moons
from expmflow.distributions import DequantizedFlow
from expmflow.models import dense_flow
from expmflow.training.config import Config, DataConfig
from expmflow.training.randomness import Randomness

DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.float32}


def build_data(config: DataConfig, randomness: Randomness) -> Dataset:
    """Load or draw the samples; a table's rows are shuffled, so that the split does not follow the file's order."""
    names: tuple[str, ...] = ()
    if config.name == "moons":
        rows = two_moons(config.samples, randomness.generator("moons"))
    else:
        if config.path is None:
            raise DataError("Expected data.path, the file of a table; got none.")
        table = load_table(config.path)
        rows, names = table.rows, table.names
        rows = rows[torch.randperm(len(rows), generator=randomness.generator("split"))]
    return replace(split(rows, config.validation, config.test), names=names)


def build_model(config: Config, event_shape: tuple[int, ...]) -> nn.Module:
    """The model with its initial weights, which follow from the seed alone."""
    state = torch.get_rng_state()
    torch.manual_seed(Randomness(config.train.seed).generator("weights").initial_seed())
    try:
        model = dense_flow(
            event_shape[0],
            blocks=config.model.blocks,
            hidden=config.model.hidden,
            coeff=config.model.coeff,
            coupling=config.model.coupling,
        )
    finally:
        torch.set_rng_state(state)
    return model.to(DTYPES[config.train.precision])


def log_likelihood(model: nn.Module, x: Tensor, noise: Tensor | None) -> Tensor:
    """log p(x), or a sample of its lower bound, for each row."""
    return model(x, noise=noise) if noise is not None else model(x)


def noise_kind(model: nn.Module) -> str | None:
    """The kind of noise that a likelihood needs, if any."""
    return model.dequantizer.noise if isinstance(model, DequantizedFlow) else None
