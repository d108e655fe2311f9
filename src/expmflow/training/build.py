"""From a config to what it describes."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from expmflow.data import DataError, Dataset, load_images, load_table, split, two_moons
from expmflow.data.download import Progress
from expmflow.data.graphs import MIXTURES
from expmflow.distributions import Density
from expmflow.models import dense_flow, graph_flow, image_flow
from expmflow.training.config import Config, ConfigError, DataConfig, DenseModelConfig, GraphModelConfig
from expmflow.training.randomness import Randomness

DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.float32}
DRAWN_GRAPHS = 10_000  # for validation, and to measure scores against; training draws new ones at every step
KINDS = {1: "dense", 2: "graph", 3: "image"}  # the kind of model for events of so many axes


def build_data(config: DataConfig, randomness: Randomness, progress: Progress | None = None) -> Dataset:
    """Load or draw the samples; a table's rows are shuffled, so that the split does not follow the file's order.

    `progress` is told of downloads, and of images read.
    """
    _check_settings(config)
    if config.name in MIXTURES:
        return _graphs(config, randomness)
    if config.name == "moons":
        return split(two_moons(config.samples, randomness.generator("moons")), config.validation, config.test)
    if config.name in ("table", "images") and config.path is None:
        raise DataError(f"Expected data.path, where the {config.name} data is; got none.")
    if config.name == "table" and config.path is not None:
        table = load_table(config.path)
        rows = table.rows[torch.randperm(len(table.rows), generator=randomness.generator("split"))]
        return replace(split(rows, config.validation, config.test), names=table.names)
    return load_images(
        config.name,
        path=config.path,
        folder=config.dir,
        size=config.size,
        crop=config.crop,
        channels=config.channels,
        validation=config.validation,
        test=config.test,
        generator=randomness.generator("split"),
        progress=progress,
    )


def _check_settings(config: DataConfig) -> None:
    """Raise for a setting that says something about other data; `load_images` does so for images."""
    if config.name in ("moons", "table", *MIXTURES):
        for setting in ("path", "dir", "size", "channels"):
            given = getattr(config, setting)
            if given is not None and (config.name, setting) != ("table", "path"):
                other = "table or images" if setting == "path" else "images"
                raise DataError(f"Expected data.name={other} with data.{setting}={given}; got data.name={config.name}.")


def _graphs(config: DataConfig, randomness: Randomness) -> Dataset:
    mixture = MIXTURES[config.name]
    counts = {"train": DRAWN_GRAPHS, "validation": DRAWN_GRAPHS, "test": config.samples}
    train, validation, test = (mixture.sample(n, randomness.generator(f"graphs {part}")) for part, n in counts.items())
    return Dataset(train, validation, test, draw=mixture.sample)


def fits(config: Config, data: Dataset) -> bool:
    """Whether the config's model is of the kind for this data."""
    return config.model.kind == KINDS.get(len(data.event_shape))


def resolve(config: Config, data: Dataset) -> Config:
    """The config with what follows from the data filled in, or a `ConfigError` if model and data do not fit."""
    kind = KINDS.get(len(data.event_shape))
    if kind is None:
        raise ConfigError(f"Expected data of vectors, graphs or images; got events of {len(data.event_shape)} axes.")
    if not fits(config, data):
        raise ConfigError(
            f"Expected a model of kind {kind} for the data {config.data.name}; got model.kind={config.model.kind}."
        )
    if config.model.kind != "image":
        if config.data.flip:
            raise ConfigError("Expected data.flip=false for data that are no images; got true.")
        if config.data.shift:
            raise ConfigError(f"Expected data.shift=0 for data that are no images; got {config.data.shift}.")
        return config
    levels = config.model.grey_levels if data.levels is None else data.levels
    known = {"grey_levels": levels, "classes": data.classes if config.model.conditional else None}
    if config.model.conditional and not data.classes:
        raise ConfigError("Expected data with classes for model.conditional=true; got none.")
    if config.model.classes is not None and not config.model.conditional:
        raise ConfigError("Expected model.conditional=true for model.classes; got false.")
    for key, value in known.items():
        given = getattr(config.model, key)
        if given not in (None, value):
            raise ConfigError(f"Expected model.{key}={value}, as the data has; got {given}.")
    return config.model_copy(update={"model": config.model.model_copy(update=known)})


def build_model(config: Config, event_shape: tuple[int, ...]) -> Density:
    """The model of a resolved config, with its initial weights, which follow from the seed alone."""
    state = torch.get_rng_state()
    torch.manual_seed(Randomness(config.train.seed).generator("weights").initial_seed())
    settings = config.model.model_dump(exclude={"kind"})
    try:
        model: Density
        if isinstance(config.model, DenseModelConfig):
            model = dense_flow(event_shape[0], **settings)
        elif isinstance(config.model, GraphModelConfig):
            model = graph_flow(*event_shape, **settings)
        else:
            settings["grey_levels"] = settings["grey_levels"] or 256
            model = image_flow(event_shape, **settings)
    finally:
        torch.set_rng_state(state)
    return model.to(DTYPES[config.train.precision])


def class_context(labels: Tensor | None, classes: int | None, dtype: torch.dtype) -> Tensor | None:
    """What a conditional model is told of its rows: one-hot vectors of their classes."""
    return None if classes is None or labels is None else F.one_hot(labels, classes).to(dtype)
