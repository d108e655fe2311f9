"""Loading and saving of trained models."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from expmflow._validation import expect
from expmflow.distributions import Density
from expmflow.runs.composed import is_composed, load_composed
from expmflow.runs.shipped import find_run
from expmflow.training.build import build_model
from expmflow.training.config import Config, ConfigError
from expmflow.training.run import RunFolder, save_config
from expmflow.training.weights import CHECKSUM, load_weights, read_metadata, read_tensors, save_weights


def load(folder: str | Path) -> Density:
    """The trained model of a run, or of a folder that `save` or `save_pretrained` wrote, in evaluation mode.

    Args:
        folder: holds `config.json`, or `flow.json`, and `model.safetensors`; nothing in it is ever unpickled. If there
            is no such folder, the name of a model that ships with the package, such as `"digits"`.

    Raises:
        CheckpointError: if there is no such model, or it was altered.

    Example:
        >>> import tempfile
        >>> from expmflow.models import dense_flow
        >>> from expmflow.training.config import Config
        >>> flow = dense_flow(2)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     ef.save_pretrained((flow, Config(), (2,)), folder)
        ...     model = ef.load(folder)
        >>> model.sample(3).shape
        torch.Size([3, 2])
    """
    run = RunFolder(find_run(folder))
    if is_composed(run.path):
        return load_composed(run.path)
    config, event_shape = run.read_config()
    model = build_model(config, event_shape)
    load_weights(model, run.weights)
    return model.eval()


def save_pretrained(source: str | Path | tuple[Density, Config, Sequence[int]], folder: str | Path) -> None:
    """Write only what `load` needs: `config.json` and `model.safetensors`.

    If a run stores the likelihoods that its scores are calibrated on, they are written too, so that the copy can score
    without the data.

    Args:
        source: a run, whose best weights are taken, or a model with its config and event shape.
        folder: created if necessary.
    """
    known: dict[str, Any] = {}
    kept: Path | None = None
    if isinstance(source, tuple):
        model, config, event_shape = source
        config = _describing(model, config, tuple(event_shape))
    else:
        model, run = load(source), RunFolder(find_run(source))
        config, event_shape = run.read_config()
        known = run.read_known()
        own = run.reference.is_file() and read_metadata(run.reference).get("weights")
        kept = run.reference if own and own == read_metadata(run.weights).get(CHECKSUM) else None
    target = RunFolder(Path(folder))
    expect(not is_composed(target.path), "a folder without a flow that `save` wrote", target.path)
    target.path.mkdir(parents=True, exist_ok=True)
    save_config(target.config, config, tuple(event_shape), known)
    target.save_weights(model.state_dict())
    if kept is not None:
        metadata = {name: value for name, value in read_metadata(kept).items() if name != CHECKSUM}
        weights = read_metadata(target.weights)[CHECKSUM]
        save_weights(target.reference, read_tensors(kept), {**metadata, "weights": weights})


def _describing(model: Density, config: Config, event_shape: tuple[int, ...]) -> Config:
    """The config with the grey levels of the model; raises `ConfigError` if it describes another model."""
    if model.levels is not None and "grey_levels" in type(config.model).model_fields:
        if getattr(config.model, "grey_levels", None) not in (None, model.levels):
            raise ConfigError(f"Expected model.grey_levels={model.levels}, as the model has; got another number.")
        config = config.model_copy(update={"model": config.model.model_copy(update={"grey_levels": model.levels})})
    shapes, described = (
        {name: tuple(value.shape) for name, value in each.state_dict().items()}
        for each in (model, build_model(config, event_shape))
    )
    if shapes != described:
        others = sorted(name for name in shapes.keys() | described.keys() if shapes.get(name) != described.get(name))
        raise ConfigError(f"Expected a config that describes the model; got one of another, first in {others[0]}.")
    return config
