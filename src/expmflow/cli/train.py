"""`expmflow train`."""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable
from contextlib import suppress
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from torch import Tensor

from expmflow._validation import expect
from expmflow.cli.console import Device, progress, reading, result, say, speaks
from expmflow.cli.device import device_named
from expmflow.cli.dry_run import DryRun, dry_run_text
from expmflow.cli.errors import INTERRUPTED
from expmflow.cli.watching import watching
from expmflow.data import DataError, Dataset
from expmflow.data.drawing.grids import class_columns
from expmflow.data.kinds import KINDS, NATS, Layout
from expmflow.data.paths import expand_home
from expmflow.distributions import NonFiniteError
from expmflow.models.mixing import MIXINGS
from expmflow.models.subflows import SUBFLOWS
from expmflow.numerics import ConvergenceError
from expmflow.runs.evaluation import open_run
from expmflow.runs.reference import keep, measure, measured_count
from expmflow.runs.shipped import find_run
from expmflow.training.build import build_data, resolve
from expmflow.training.checkpoint import CheckpointError, newest_step
from expmflow.training.config import Config, ConfigError, load_config, presets
from expmflow.training.files import write_whole
from expmflow.training.loop import train as train_run
from expmflow.training.randomness import Randomness
from expmflow.training.run import RunFolder

LAYERS = f"model.subflow= {', '.join(SUBFLOWS)}; model.mixing= {', '.join(MIXINGS)}"


class OnNonfinite(StrEnum):
    """What to do if a loss is NaN or infinite."""

    stop = "stop"
    skip = "skip"


def train(
    source: Annotated[
        str | None,
        typer.Argument(metavar="PRESET|CONFIG.yaml", help=f"{', '.join(sorted(presets()))}; or a config file."),
    ] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="KEY=VALUE...", help=f"Settings to change, such as train.steps=500; for images: {LAYERS}."
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="The run's folder; runs/NAME if not given.")] = None,
    resume: Annotated[
        Path | None, typer.Option(metavar="RUN", help="Resume a run; its folder has everything it needs.")
    ] = None,
    device: Device = None,
    init_from: Annotated[Path | None, typer.Option(help="A run with the initial weights.")] = None,
    on_nonfinite: Annotated[
        OnNonfinite | None, typer.Option(help="Stop at a loss that is not finite, or skip the step.")
    ] = None,
    dry_run: DryRun = False,
) -> None:
    """Train a model, or resume an interrupted run. Writes only to the run's folder.

    An existing run in the folder is resumed if its config is the same. Ctrl-C saves a checkpoint; continue with
    --resume RUN. With many processes: torchrun --standalone --nproc-per-node 2 -m expmflow train moons.
    """
    skipping = [] if on_nonfinite is None else [f"train.on_nonfinite={on_nonfinite.value}"]
    config, folder = _config_and_folder(source, [*(overrides or []), *skipping], out, resume)
    device = device_named(device)
    if dry_run:
        result(dry_run_text(config, folder, device))
        return
    run = RunFolder(folder)
    with reading() as loading:
        data = build_data(config.data, Randomness(config.train.seed), loading)
    config = resolve(config, data)
    before = newest_step(run.checkpoints)
    say(f"{'Resuming the run in' if before else 'Writing to'} {folder}")
    try:
        with watching(config, run, before, KINDS[data.kind].unit(data.event_shape)) as (report, on_step):
            train_run(
                config,
                folder,
                device=device,
                init_from=None if init_from is None else find_run(init_from),
                report=report,
                on_samples=_drawing(config, data, run),
                on_step=on_step,
                data=data,
            )
        if speaks():
            _conclude(run, data)
    except KeyboardInterrupt:
        step = newest_step(run.checkpoints)
        on = f"saved at step {step} in {folder}. To go on: expmflow train --resume {shlex.quote(str(folder))}"
        say(f"Interrupted: {on}" if step else "Interrupted: nothing to save yet.")
        raise typer.Exit(INTERRUPTED) from None


def _config_and_folder(
    source: str | None, overrides: list[str], out: Path | None, resume: Path | None
) -> tuple[Config, Path]:
    """The config, and the folder of the run."""
    if resume is not None:
        expect(out is None, "--out or --resume, one of them", "both")
        run = RunFolder(resume)
        if not run.config.is_file():
            raise CheckpointError(f"Expected a run in {resume}; got no {run.config.name} in it.")
        words = overrides if source is None else [source, *overrides]
        config = _with_whole_paths(load_config(run.read_config()[0], words))
        path = config.data.path
        if path is not None and not path.exists():
            raise DataError(f"Expected the run's data in {path}; got none. Say where it is now: data.path=….")
        return config, resume
    if source is None:
        raise ConfigError("Expected a preset, a config file or --resume RUN; got none. See expmflow train --help.")
    folder = out or Path("runs") / (source if source in presets() else Path(source).stem)
    expect(not folder.exists() or folder.is_dir(), "--out to be a folder", f"the file {folder}")
    if speaks():  # other processes may come when the first has begun to write
        strange = folder.exists() and not RunFolder(folder).config.is_file()
        others = strange and any(not path.name.startswith(".") for path in folder.iterdir())
        expect(not others, "--out to be a new folder, or that of a run", f"{folder}, which holds other files")
    return _with_whole_paths(load_config(source, overrides)), folder


def _with_whole_paths(config: Config) -> Config:
    """Make paths absolute, so that the run finds its data from any folder."""
    given = {"path": config.data.path, "dir": config.data.dir}
    whole = {name: expand_home(path).absolute() for name, path in given.items() if path is not None}
    return config.model_copy(update={"data": config.data.model_copy(update=whole)})


def _draw(path: Path, samples: Tensor, data: Dataset, config: Config) -> None:
    """A picture of samples, beside as many rows of the data; for a conditional model, with a column for each class."""
    columns = class_columns(data.classes if getattr(config.model, "conditional", False) else None, len(samples))
    layout = Layout(data.event_shape, data.names, data.class_names, data.levels)
    picture = KINDS[data.kind].draw(samples, layout, data=data.train[: len(samples)], columns=columns)
    write_whole(path, picture.write)


def _drawing(config: Config, data: Dataset, run: RunFolder) -> Callable[[int, Tensor], None]:
    """Pictures of the samples during training, if matplotlib is there to draw them."""

    def draw(step: int, samples: Tensor) -> None:
        with suppress(ImportError):
            _draw(run.path / "samples" / f"step-{step:08d}.png", samples, data, config)

    return draw


def _conclude(run: RunFolder, data: Dataset) -> None:
    """Print the best validation and what to do next, and draw a picture if matplotlib is there."""
    records = run.read_metrics()
    trained = open_run(run.path)
    try:
        samples = trained.sample(min(trained.kind.shown_samples, len(data.train)))
        with suppress(ImportError):  # matplotlib belongs to another extra
            _draw(run.path / "samples.png", samples, data, trained.config)
    except (NonFiniteError, ConvergenceError) as error:
        say(f"No picture of samples: {error}")
    values = [r.get("validation_nll", math.nan) for r in records]
    best = min((value for value in values if math.isfinite(value)), default=math.nan)
    step = max((r["step"] for r in records), default=newest_step(run.checkpoints))
    skipped, lost = (max((r.get(k, 0) for r in records), default=0) for k in ("skipped", "nonfinite_validations"))
    patience = trained.config.train.patience
    early = step < trained.config.train.steps and patience is not None
    if early:
        say(f"Stopped early: no better validation in {patience}, after step {_best_step(records)}.")
    note = f" {skipped} steps were skipped." if skipped else ""
    note += f" {lost} validations were not finite." if lost else ""
    with progress("measuring", measured_count(trained, data)) as advance:
        known = measure(trained, data, advance)
    keep(trained, known)
    unit = trained.unit
    other = "" if unit == NATS else f" ({best * unit.per_nat:.4f} {unit.name})"
    say(f"Done at step {step}: best validation nll {best:.4f} nats{other}.{note}")
    tested = float(known.nll[known.tested].mean())
    held_out = known.counts["validation"] + known.counts["test"]
    rows = f"{known.tested} rows" if held_out else "the training rows (none are held out)"
    for name, nll in known.baselines.items():
        verdict = "" if tested < nll else " The model does not beat it: simpler ones, or more rows, may be better."
        say(f"On {rows} the nll is {tested:.4f} nats; that of {name} is {nll:.4f}.{verdict}")
    place = shlex.quote(str(run.path))
    evaluation = f"expmflow evaluate {place}; " if known.counts["test"] else ""
    say(f"Next: {evaluation}expmflow report {place}")


def _best_step(records: list[dict[str, Any]]) -> int:
    return max((r["step"] for r in records if r.get("best")), default=0)
