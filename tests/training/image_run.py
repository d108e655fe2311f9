"""Small image models with everything that has state, a flow and a VAE: what the kill and process tests train."""

from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from expmflow import nn as N
from expmflow import transforms as T
from expmflow.data import Dataset
from expmflow.distributions import (
    Density,
    DequantizedFlow,
    DiagonalGaussian,
    Flow,
    LogisticMixture,
    VariationalDequantization,
)
from expmflow.models import VAE
from expmflow.models.posteriors import FlowSettings, build_posterior
from expmflow.training.config import Config, parse_config
from expmflow.training.loop import train

CHANNELS, SIZE, LEVELS = 2, 4, 8


def make_flow() -> DequantizedFlow:
    """ActNorm, ConvExp, ConvSylvester, a coupling and a residual block, with variational dequantization."""
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
    return DequantizedFlow(flow, noise, levels=LEVELS)


def make_vae() -> VAE:
    """Convolutional Sylvester flows for the posterior, a mixture of logistics for the pixels."""
    mixture = LogisticMixture(CHANNELS, components=2, levels=LEVELS)
    posterior = build_posterior("conv-sylvester", (2, SIZE, SIZE), FlowSettings(flows=2, hidden=6, context=2))
    encoder = nn.Conv2d(CHANNELS, posterior.params_per_sample, 3, padding=1)
    decoder = nn.Conv2d(2, mixture.param_channels(CHANNELS), 3, padding=1)
    return VAE(encoder, posterior, decoder, likelihood=mixture)


MODELS: dict[str, Callable[[], Density]] = {"flow": make_flow, "vae": make_vae}


def make_model(dtype: torch.dtype = torch.float32, kind: str = "flow") -> Density:
    """One of `MODELS`, always with the same weights."""
    torch.manual_seed(0)
    return MODELS[kind]().to(dtype)


def make_data() -> Dataset:
    """Integers with neighbours that resemble each other."""
    generator = torch.Generator().manual_seed(1)
    smooth = torch.rand(60, CHANNELS, SIZE, 1, generator=generator) + 0.3 * torch.rand(
        60, CHANNELS, SIZE, SIZE, generator=generator
    )
    images = (smooth / 1.3 * LEVELS).floor().clamp(0, LEVELS - 1).to(torch.int64)
    return Dataset(images[:48], images[48:], images[48:], kind="images")


def make_config(steps: int = 9, kind: str = "flow", **train_settings: object) -> Config:
    values = {"steps": steps, "batch_size": 8, "log_every": 2, "validate_every": 3, "checkpoint_every": 3}
    warmup = {"kl_warmup": 5} if kind == "vae" else {}
    return parse_config(
        {
            "optim": {"lr": 0.01, "warmup": 4, "decay": 0.9, "clip": 10.0, "ema": 0.9, **warmup},
            "train": {**values, "threads": 1, **train_settings},
        }
    )


def run(folder: Path, config: Config | None = None, kind: str = "flow") -> None:
    config = make_config(kind=kind) if config is None else config
    dtype = torch.float64 if config.train.precision == "float64" else torch.float32
    train(config, folder, model=make_model(dtype, kind), data=make_data())
