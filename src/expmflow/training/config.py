"""What a run is made of: validated as a whole, with every problem named at once."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

Positive = Annotated[int, Field(ge=1)]
Fraction = Annotated[float, Field(ge=0, lt=1)]


class ConfigError(ValueError):
    """A config that cannot be used; the message lists all its problems."""


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class DataConfig(_Section):
    """Where the samples come from."""

    name: Literal["moons", "table"] = Field("moons", description="two moons in the plane, or a table in a file")
    path: Path | None = Field(None, description="a .npy or .csv file of float rows (table)")
    samples: Positive = Field(10_000, description="how many to draw (moons)")
    validation: Fraction = Field(0.1, description="the part of the rows kept for validation")
    test: Fraction = Field(0.1, description="the part of the rows kept for the test")


class DenseModelConfig(_Section):
    """A flow on vectors: blocks of ActNorm, LinearExp, DenseSylvester and an affine coupling."""

    kind: Literal["dense"] = "dense"
    blocks: Positive = 4
    hidden: Positive = 64
    coeff: float = Field(0.9, gt=0)
    coupling: bool = Field(True, description="an affine coupling in each block (needs two features)")


class OptimConfig(_Section):
    """How the weights move."""

    optimizer: Literal["adam", "adamax"] = "adam"
    lr: float = Field(1e-3, gt=0)
    betas: tuple[Fraction, Fraction] = (0.9, 0.999)
    warmup: int = Field(0, ge=0, description="steps of linear warm-up")
    decay: float = Field(1.0, gt=0, le=1, description="factor of the learning rate per epoch, or per decay_every steps")
    decay_every: Positive | None = Field(None, description="steps; an epoch if not given")
    clip: float | None = Field(None, gt=0, description="the largest norm of the gradient")
    ema: Fraction | None = Field(None, description="decay of the moving average of the weights; off if not given")


class TrainConfig(_Section):
    """How long, how often, on what."""

    steps: Positive = 2000
    batch_size: Positive = 256
    seed: int = Field(0, ge=0)
    log_every: Positive = 50
    validate_every: Positive = 500
    checkpoint_every: Positive = 500
    sample_every: Positive | None = Field(None, description="steps between pictures of samples; none if not given")
    patience: Positive | None = Field(None, description="validations without improvement before stopping early")
    on_nonfinite: Literal["stop", "skip"] = "stop"
    precision: Literal["float32", "float64", "bfloat16"] = Field(
        "float32", description="bfloat16 is for the networks only: series, log-dets and losses stay in float32"
    )
    compile: bool = False
    threads: Positive | None = None


class Config(_Section):
    """A whole run."""

    data: DataConfig = DataConfig()
    model: DenseModelConfig = DenseModelConfig()
    optim: OptimConfig = OptimConfig()
    train: TrainConfig = TrainConfig()


def load_config(source: str, overrides: Sequence[str] = ()) -> Config:
    """A preset's name or a YAML or JSON file, with `section.key=value` on top.

    Raises:
        ConfigError: with one line per problem.
    """
    try:
        from omegaconf import OmegaConf
        from omegaconf.errors import OmegaConfBaseException
        from yaml import YAMLError
    except ImportError as error:  # a trained model is loaded without it
        raise ImportError("Expected omegaconf to read configs; got none. Install the extra `train`.") from error
    for override in overrides:
        key, separator, _ = override.partition("=")
        if not separator or not key.strip():
            raise ConfigError(f"Expected an override key=value; got {override!r}.")
    text, place = _read(source)
    try:
        given = OmegaConf.create(text)
        if not OmegaConf.is_dict(given):
            raise ConfigError(f"Expected a config of sections in {place}; got {type(given).__name__}.")
        values = OmegaConf.to_container(OmegaConf.merge(given, OmegaConf.from_dotlist(list(overrides))), resolve=True)
    except (OmegaConfBaseException, YAMLError) as error:
        raise ConfigError(f"Expected a valid config in {place}; got: {_in_one_line(error)}.") from None
    return parse_config(values)


def parse_config(values: Any) -> Config:
    """A config out of plain values, or every problem that they have."""
    if not isinstance(values, Mapping):
        raise ConfigError(f"Expected a config of sections; got {type(values).__name__}.")
    try:
        return Config.model_validate(values)
    except ValidationError as error:
        problems = [_problem(entry) for entry in error.errors()]
        count = f"{len(problems)} problem{'s' if len(problems) > 1 else ''}"
        raise ConfigError(f"Expected a valid config; got {count}:\n" + "\n".join(f"  {p}" for p in problems)) from None


def presets() -> dict[str, str]:
    """The presets inside the package: name to text."""
    folder = resources.files("expmflow") / "presets"
    return {p.name.removesuffix(".yaml"): p.read_text() for p in folder.iterdir() if p.name.endswith(".yaml")}


def _read(source: str) -> tuple[str, str]:
    """The text of a config, and what to call its place in a message. JSON is YAML too."""
    known = presets()
    if source in known:
        return known[source], f"the preset {source}"
    path = Path(source)
    if path.suffix in (".yaml", ".yml", ".json"):
        try:
            return path.read_text(encoding="utf-8"), str(path)
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"Expected a config in {path}; got: {error}.") from None
    hint = _nearest(source, known)
    raise ConfigError(f"Expected a preset ({', '.join(sorted(known))}) or a .yaml file; got {source!r}{hint}.")


def _problem(entry: Any) -> str:
    """One problem as a line: where, what is expected, what was given."""
    place = ".".join(str(part) for part in entry["loc"])
    if entry["type"] == "extra_forbidden":
        return f"{place}: no such key{_nearest(str(entry['loc'][-1]), _keys(entry['loc'][:-1]))}"
    given = repr(entry["input"])
    given = given if len(given) <= 80 else f"{given[:77]}..."
    return f"{place}: {entry['msg'][0].lower()}{entry['msg'][1:]}, got {given}"


def _keys(place: Sequence[Any]) -> list[str]:
    section: Any = Config
    for part in place:
        section = section.model_fields[part].annotation
    return list(section.model_fields)


def _nearest(word: str, known: Any) -> str:
    near = difflib.get_close_matches(word, list(known), n=1)
    return f" (did you mean {near[0]!r}?)" if near else ""


def _in_one_line(error: Exception) -> str:
    return " ".join(str(error).split()).rstrip(".")
