"""The config of a run: validated as a whole, with every problem reported at once."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError, field_validator
from pydantic_core import PydanticCustomError

from expmflow.data.kinds import sources
from expmflow.training.files import read_text
from expmflow.training.model_config import MODELS, DenseModelConfig, ModelConfig
from expmflow.training.sections import (
    GIVEN,
    ConfigError,
    Fraction,
    Positive,
    Section,
)

LARGEST_TEXT = 2**20  # bytes of a config file
DEEPEST_TEXT = 50  # levels of nested sections and lists

__all__ = ["Config", "ConfigError", "load_config", "parse_config", "presets"]


class DataConfig(Section):
    """The source of the samples."""

    name: str = Field(
        "moons", description="the data set to draw or download, or what `path` holds (table, images, graphs)"
    )
    path: Path | None = Field(
        None,
        description="a .npy or .csv file of float rows (table); a folder, .npy or .npz (images), "
        "a folder or .npz (graphs)",
    )
    dir: Path | None = Field(
        None, description="the folder of the official files (MNIST, also in black and white, Fashion-MNIST, CIFAR-10)"
    )
    columns: list[str] | None = Field(None, description="the columns to take, in this order; all if not given (table)")
    drop: list[str] | None = Field(None, description="columns to leave out (table)")
    separator: str | None = Field(
        None, min_length=1, max_length=1, description="between the entries of a line; detected if not given (table)"
    )
    samples: Positive = Field(
        10_000, description="number to draw (moons), or to draw for the test (mixtures on graphs)"
    )
    validation: Fraction = Field(0.1, description="the fraction of rows kept for validation (moons and own data)")
    test: Fraction = Field(0.1, description="the fraction of rows kept for the test (moons and own data)")
    size: int | None = Field(None, ge=1, le=2**16, description="resize images to this height and width (images)")
    crop: bool = Field(True, description="crop the centre before resizing, instead of squashing (images)")
    channels: Literal["rgb", "grey"] | None = Field(None, description="make all images colour or grey (images)")
    skip_broken: bool = Field(False, description="skip files that are not images, with a warning (images)")
    flip: bool = Field(False, description="mirror half of the training images left to right (images)")
    shift: int = Field(
        0, ge=0, le=2**16, description="shift training images by up to this many pixels each way (images)"
    )
    jitter: float | None = Field(
        None,
        ge=0,
        le=1,
        description="perturb training rows by this share of their spread; by their number if not given",
    )

    @field_validator("columns", "drop", mode="before")
    @classmethod
    def _names(cls, given: Any) -> Any:
        """A single name becomes a list of one, and a name may be a number."""
        given = [given] if type(given) in (str, int) else given
        return [str(name) if type(name) is int else name for name in given] if isinstance(given, list) else given

    @field_validator("name")
    @classmethod
    def _known(cls, name: str) -> str:
        known = sources()
        if name not in known and name != GIVEN:
            raise PydanticCustomError("unknown_data", f"input should be one of {', '.join(known)}")
        return name


class OptimConfig(Section):
    """The optimizer and its schedule."""

    optimizer: Literal["adam", "adamax"] = Field("adam", description="adam or adamax")
    lr: float = Field(1e-3, gt=0, description="the learning rate")
    betas: tuple[Fraction, Fraction] = Field((0.9, 0.999), description="decay rates of the optimizer's two averages")
    eps: float = Field(1e-8, gt=0, description="added to the optimizer's denominators")
    warmup: int = Field(0, ge=0, le=10**9, description="steps of warm-up")
    warmup_power: Positive = Field(1, description="exponent of the warm-up: 1 is linear")
    kl_warmup: int = Field(
        0, ge=0, le=10**9, description="steps over which the weight of a bound's KL part grows to 1 (VAEs)"
    )
    decay: float = Field(1.0, gt=0, le=1, description="factor of the learning rate per epoch, or per decay_every steps")
    decay_every: Positive | None = Field(None, description="steps between decays; an epoch if not given")
    clip: float | None = Field(None, gt=0, description="the largest norm of the gradient")
    ema: Fraction | None = Field(None, description="decay of the moving average of the weights; off if not given")
    weight_decay: float | None = Field(
        None, ge=0, le=100, description="decoupled, on matrices (adam); if not given, by the rows of tables, else 0"
    )


class TrainConfig(Section):
    """Length, intervals and hardware of the training."""

    steps: Positive = Field(2000, description="optimizer steps; a finished run continues with more")
    batch_size: Positive = Field(256, description="rows in a step, over all processes")
    seed: int = Field(0, ge=0, lt=2**64, description="every random number follows from it")
    log_every: Positive = Field(50, description="steps between records of the training loss")
    validate_every: Positive = Field(500, description="steps between validations; the best weights are kept")
    validation_rows: Positive | None = Field(None, description="number of validation rows to use; all if not given")
    checkpoint_every: Positive = Field(500, description="steps between checkpoints")
    sample_every: Positive | None = Field(None, description="steps between pictures of samples; none if not given")
    patience: Positive | None = Field(None, description="validations without improvement before stopping early")
    on_nonfinite: Literal["stop", "skip"] = Field("stop", description="what to do if a loss is NaN or infinite")
    precision: Literal["float32", "float64", "bfloat16"] = Field(
        "float32", description="bfloat16 is for the networks only: series, log-dets and losses stay in float32"
    )
    compile: bool = Field(False, description="compile the model with torch.compile")
    threads: int | None = Field(None, ge=1, le=1024, description="CPU threads; torch's choice if not given")
    timeout: float = Field(10.0, gt=0, le=10_000, description="the most minutes that processes wait for each other")


class Config(Section):
    """The config of a whole run."""

    data: DataConfig = DataConfig()
    model: ModelConfig = DenseModelConfig()
    optim: OptimConfig = OptimConfig()
    train: TrainConfig = TrainConfig()


def load_config(source: str | Config, overrides: Sequence[str] = ()) -> Config:
    """A preset's name, a YAML or JSON file, or a config, overridden by `section.key=value`.

    Raises:
        ConfigError: with one line per problem.
    """
    try:
        from omegaconf import OmegaConf
        from omegaconf.errors import OmegaConfBaseException
        from yaml import YAMLError
    except ImportError as error:  # trained models are loaded without it
        raise ImportError("Expected omegaconf to read configs; got none. Install the extra `train`.") from error
    for override in overrides:
        key, separator, value = override.partition("=")
        if not separator or not key.strip():
            raise ConfigError(f"Expected an override key=value; got {override!r}.")
        _expect_shallow(value, f"the override of {key}")
    text, place = _read(source)
    _expect_shallow(text, place)
    try:
        try:
            given = OmegaConf.create(text)
        except AssertionError:  # a number, or another scalar instead of sections
            raise ConfigError(f"Expected a config of sections in {place}; got {text.strip():.80}.") from None
        on_top = OmegaConf.from_dotlist(list(overrides))
        if not OmegaConf.is_dict(given):
            raise ConfigError(f"Expected a config of sections in {place}; got {type(given).__name__}.")
        if OmegaConf.select(on_top, "data.name") not in (None, OmegaConf.select(given, "data.name")):
            _drop_own_data_settings(given)
        values = OmegaConf.to_container(OmegaConf.merge(given, on_top), resolve=True)
    except ConfigError:
        raise
    except (OmegaConfBaseException, YAMLError, ValueError) as error:  # a ValueError means a number with too many digits
        raise ConfigError(f"Expected a valid config in {place}; got: {_in_one_line(error):.500}.") from None
    except RecursionError:
        raise ConfigError(f"Expected a config in {place}; got sections or names within too many others.") from None
    return parse_config(values)


def _drop_own_data_settings(config: Any) -> None:
    """If the data is replaced by other data: drop the settings about the user's own files."""
    if isinstance(config.get("data"), Mapping):
        for key in ("path", "size", "crop", "channels", "skip_broken", "columns", "drop", "separator"):
            config["data"].pop(key, None)


def parse_config(values: Any) -> Config:
    """A config from plain values; raises with every problem that they have."""
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


def _read(source: str | Config) -> tuple[str, str]:
    """The text of a config, and a name for its source in messages. JSON is YAML too."""
    if isinstance(source, Config):
        return source.model_dump_json(), "the run"
    known = presets()
    if source in known:
        return known[source], f"the preset {source}"
    path = Path(source)
    if path.suffix in (".yaml", ".yml", ".json"):
        try:
            return read_text(path, LARGEST_TEXT), str(path)
        except (OSError, ValueError) as error:
            raise ConfigError(f"Expected a config in {path}; got: {error}.") from None
    hint = _nearest(source, known)
    raise ConfigError(f"Expected a preset ({', '.join(sorted(known))}) or a .yaml file; got {source!r}{hint}.")


def _expect_shallow(text: str, place: str) -> None:
    """Raise `ConfigError` if values are nested so deeply that parsing them would exhaust the stack."""
    from yaml import CollectionEndEvent, CollectionStartEvent, SafeLoader, YAMLError, parse

    depth = 0
    try:
        for event in parse(text, SafeLoader):  # parses without recursion
            depth += isinstance(event, CollectionStartEvent) - isinstance(event, CollectionEndEvent)
            if depth > DEEPEST_TEXT:
                raise ConfigError(f"Expected at most {DEEPEST_TEXT} levels of sections in {place}; got more.")
    except YAMLError:
        return  # the reader reports what is wrong


def _problem(entry: Any) -> str:
    """One problem as a line: where, what is expected, what was given."""
    where, section = _section(entry["loc"])
    place = ".".join(map(str, where))
    if entry["type"] == "extra_forbidden":
        within = _with_section(place) if len(where) == 1 else None
        return f"{place}: no such key{_hint(within) if within else _nearest(str(where[-1]), section.model_fields)}"
    if entry["type"] == "unknown_data":
        return f"{place}: {entry['msg']}, got {entry['input']!r}{_nearest(entry['input'], sources())}"
    if entry["type"] == "union_tag_invalid":
        tag = entry["ctx"]["tag"]
        return f"{place}.kind: input should be one of {', '.join(MODELS)}, got {tag!r}{_nearest(tag, MODELS)}"
    try:
        given = repr(entry["input"])
    except ValueError:  # Python refuses to write out numbers of more than 4,300 digits
        given = "a number of very many digits"
    given = given if len(given) <= 80 else f"{given[:77]}..."
    if entry["type"] == "union_tag_not_found":  # no kind is given, or there is not even a section
        if isinstance(entry["input"], Mapping):
            return f"{place}.kind: input should be one of {', '.join(MODELS)}, got {entry['input'].get('kind')!r}"
        return f"{place}: input should be a section, got {given}"
    return f"{place}: {entry['msg'][0].lower()}{entry['msg'][1:]}, got {given}"


def _section(place: Sequence[Any]) -> tuple[Sequence[Any], Any]:
    """A location without the tag of the model's kind, and the section that its last part belongs to."""
    if len(place) > 1 and place[0] == "model" and place[1] in MODELS:
        return ("model", *place[2:]), MODELS[place[1]]
    return place, Config if len(place) == 1 else Config.model_fields[place[0]].annotation


def _with_section(key: str) -> str | None:
    """The key of a setting that was written without its section."""
    sections: list[tuple[str, type[Section]]] = [("data", DataConfig), ("optim", OptimConfig), ("train", TrainConfig)]
    sections += [("model", kind) for kind in MODELS.values()]
    return next((f"{name}.{key}" for name, section in sections if key in section.model_fields), None)


def _nearest(word: str, known: Any) -> str:
    near = difflib.get_close_matches(word, list(known), n=1)
    return _hint(near[0]) if near else ""


def _hint(word: str) -> str:
    return f" (did you mean {word!r}?)"


def _in_one_line(error: Exception) -> str:
    return " ".join(str(error).split()).rstrip(".")
