"""A small image model with everything that has state: what the kill and process tests train."""

from pathlib import Path

import torch

from expmflow import nn as N
from expmflow import transforms as T
from expmflow.data import Dataset
from expmflow.distributions import DequantizedFlow, DiagonalGaussian, Flow, VariationalDequantization
from expmflow.training.config import Config, parse_config
from expmflow.training.loop import train

CHANNELS, SIZE, LEVELS = 2, 4, 8


def make_model(dtype: torch.dtype = torch.float32) -> DequantizedFlow:
    """ActNorm, ConvExp, ConvSylvester, a coupling and a residual block, with variational dequantization."""
    torch.manual_seed(0)
    flow = Flow(
        T.Chain(
            [
                T.ActNorm(CHANNELS),
                T.ConvExp(CHANNELS),
                T.ConvSylvester(CHANNELS, hidden=6),
                T.AffineCoupling(N.DenseNet(1, 2, growth=4, depth=1), CHANNELS),
                T.ResidualBlock(N.LipschitzConvNet(CHANNELS, hidden=5)),
            ]
        ),
        DiagonalGaussian((CHANNELS, SIZE, SIZE)),
    )
    context = N.DenseNet(CHANNELS, 3, growth=4, depth=1)
    coupling = T.AffineCoupling(N.DenseNet(1, 2, growth=4, depth=1, context_channels=3), CHANNELS)
    noise = VariationalDequantization(T.Chain([T.ConvExp(CHANNELS), coupling]), context)
    return DequantizedFlow(flow, noise, levels=LEVELS).to(dtype)


def make_data() -> Dataset:
    """Integers with neighbours that resemble each other."""
    generator = torch.Generator().manual_seed(1)
    smooth = torch.rand(60, CHANNELS, SIZE, 1, generator=generator) + 0.3 * torch.rand(
        60, CHANNELS, SIZE, SIZE, generator=generator
    )
    images = (smooth / 1.3 * LEVELS).floor().clamp(0, LEVELS - 1).to(torch.int64)
    return Dataset(images[:48], images[48:], images[48:], kind="images")


def make_config(steps: int = 9, **train_settings: object) -> Config:
    values = {"steps": steps, "batch_size": 8, "log_every": 2, "validate_every": 3, "checkpoint_every": 3}
    return parse_config(
        {
            "optim": {"lr": 0.01, "warmup": 4, "decay": 0.9, "clip": 10.0, "ema": 0.9},
            "train": {**values, "threads": 1, **train_settings},
        }
    )


def run(folder: Path, config: Config | None = None) -> None:
    config = make_config() if config is None else config
    dtype = torch.float64 if config.train.precision == "float64" else torch.float32
    train(config, folder, model=make_model(dtype), data=make_data())
