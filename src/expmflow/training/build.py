"""Builds the data and the model that a config describes."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from expmflow.data import DataError, Dataset
from expmflow.data.download import Progress
from expmflow.data.kinds import KINDS, sources
from expmflow.distributions import Density
from expmflow.training.config import Config, ConfigError, DataConfig
from expmflow.training.defaults import default_training
from expmflow.training.randomness import Randomness
from expmflow.training.sections import GIVEN, Section

DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.float32}
OF_ONE_SOURCE = (
    "path",
    "size",
    "channels",
    "columns",
    "drop",
    "separator",
)  # settings about the user's own files


def build_data(config: DataConfig, randomness: Randomness, progress: Progress | None = None) -> Dataset:
    """Load or draw the samples. `progress` is called during downloads, and while images are read."""
    if config.name == GIVEN:
        raise DataError("Expected data that a config describes; got a run of rows that were given to expmflow.train.")
    source = sources()[config.name]
    for setting in OF_ONE_SOURCE:
        given = getattr(config, setting)
        if given is not None and setting not in source.settings:
            others = " or ".join(name for name, other in sources().items() if setting in other.settings)
            raise DataError(f"Expected data.name={others} with data.{setting}={given}; got data.name={config.name}.")
    settings = {name: getattr(config, name) for name in source.settings}
    return source.load(**settings, generator=randomness.generator, progress=progress)


def fits(config: Config, data: Dataset) -> bool:
    """Whether the config's model is meant for this kind of data."""
    return config.model.kind in KINDS[data.kind].models


def resolve(config: Config, data: Dataset) -> Config:
    """The config, completed from the data; raises `ConfigError` if model and data do not fit."""
    kind = KINDS[data.kind]
    kind.check_event_shape(data.event_shape)
    if not fits(config, data):
        raise ConfigError(
            f"Expected a model of kind {' or '.join(kind.models)} for the data {config.data.name}; got "
            f"model.kind={config.model.kind}."
        )
    for other in KINDS.values():
        for setting in other.augmentations.keys() - kind.augmentations.keys():
            given = getattr(config.data, setting)
            if given:
                raise ConfigError(f"Expected no data.{setting} for {kind.name}, only for {other.name}; got {given}.")
    if config.optim.weight_decay and config.optim.optimizer != "adam":
        raise ConfigError(f"Expected optim.optimizer=adam for weight decay; got {config.optim.optimizer}.")
    filled: dict[str, Section] = {"model": config.model.resolved(data)}
    for section, values in config.model.defaults(len(data.train)).items():
        filled[section] = getattr(config, section).filled(**values)
    if data.integers is not None:  # a table from the user
        given, known = config.train, default_training(len(data.train))
        filled["train"] = given.model_copy(update={k: v for k, v in known.items() if k not in given.model_fields_set})
    return config.model_copy(update=filled)


def build_model(config: Config, event_shape: tuple[int, ...]) -> Density:
    """The model of a resolved config, with its initial weights, which follow from the seed alone."""
    state = torch.get_rng_state()
    torch.manual_seed(Randomness(config.train.seed).generator("weights").initial_seed())
    try:
        model = config.model.build(event_shape)
    finally:
        torch.set_rng_state(state)
    return model.to(DTYPES[config.train.precision])


def class_context(labels: Tensor | None, classes: int | None, dtype: torch.dtype) -> Tensor | None:
    """The context of a conditional model: one-hot vectors of the classes."""
    return None if classes is None or labels is None else F.one_hot(labels, classes).to(dtype)
