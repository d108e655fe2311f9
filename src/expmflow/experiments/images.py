"""The paper's tables of image flows on CIFAR-10: each table has one base model, and each row changes one layer of
it."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from expmflow._validation import expect
from expmflow.distributions import bits_per_dim
from expmflow.distributions.describe import count_parameters
from expmflow.experiments.curves import draw_curves
from expmflow.experiments.experiment import Comparison, Experiment, Result, median_step, step_seconds
from expmflow.experiments.image_text import table_text
from expmflow.experiments.values import Values, likelihood_comparisons, paired_differences
from expmflow.runs.evaluation import open_run
from expmflow.runs.importance import importance_estimates, results_file
from expmflow.runs.pretrained import save_pretrained
from expmflow.training.config import Config, parse_config
from expmflow.training.job import OnStep
from expmflow.training.loop import train
from expmflow.training.run import RunFolder
from expmflow.training.validation import TrainingError

NATS_PER_BIT = 3 * 32 * 32 * math.log(2)
"""Nats in one bit per dimension of CIFAR-10: the authors clip and regularise losses in bits, ours are in nats."""


CHOSEN = " at the rate that was chosen"
"""Appended to the name of a row with its own rate: the same row of the main preset."""


@dataclass(frozen=True)
class Cell:
    """A row of the paper's table: how it differs from the others.

    Args:
        name: the name of the row.
        model: its own settings of the model, in every preset.
        paper: −ELBO and NLL in bits per dimension, with their error bars if there are any.
        against: the cells to compare it with, which are subtracted from it; the first of the table if empty.
        weighed: whether to compute an importance-weighted NLL; not if log-determinants are random estimates.
        matched: whether the row has as many parameters as the others.
        shared: the table that trains the very same row.
        label: its name in the table; `name` if empty.
    """

    name: str
    model: Mapping[str, Any]
    paper: Mapping[str, float] = field(default_factory=dict)
    against: tuple[str, ...] = ()
    weighed: bool = True
    matched: bool = True
    shared: str | None = None
    label: str = ""


@dataclass(frozen=True)
class Setting:
    """The size and schedule of a preset: what its rows have in common, and the sizes in which they differ.

    Args:
        about: a short description.
        model: the base model.
        sizes: by the name of the cell, settings that bring it to the common number of parameters.
        data, optim, train: of the config.
        rates: learning rates, of which the best is chosen for each row, by its validation after `rate_steps` steps.
        rate_of: by the name of a row, a fixed rate instead; if there are any, only these rows are run.
        seeds: the number of trainings of each row.
        images: the number of test images for the −ELBO; all if None.
        weighed_images, samples: the number of images for the NLL, and of importance samples for each.
        choices: sentences about details that the paper leaves open, or that its code does differently.
    """

    about: str
    model: Mapping[str, Any]
    sizes: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    data: Mapping[str, Any] = field(default_factory=dict)
    optim: Mapping[str, Any] = field(default_factory=dict)
    train: Mapping[str, Any] = field(default_factory=dict)
    rates: tuple[float, ...] = ()
    rate_steps: int = 0
    rate_of: Mapping[str, float] = field(default_factory=dict)
    seeds: tuple[int, ...] = (0,)
    images: int | None = None
    weighed_images: int = 10_000
    samples: int = 1000
    choices: str = ""


def at_higher_rates(setting: Setting, rate_of: Mapping[str, float]) -> Setting:
    """The same setting for some rows with fixed rates: a rate that is good in the end may be too high at first."""
    return replace(
        setting,
        about="rows for which the short training chose one of the lower rates, at the next higher one",
        rates=(),
        rate_steps=0,
        rate_of=rate_of,
    )


@dataclass(frozen=True)
class ImageRow:
    """A cell with a seed."""

    cell: Cell
    seed: int
    settings: Mapping[str, Setting]

    @property
    def name(self) -> str:
        return f"{self.cell.name}-{self.seed}"

    def config(self, preset: str, threads: int | None = None) -> Config:
        setting = self.settings[preset]
        sizes = setting.sizes.get(self.cell.name, {})
        rate = {"lr": setting.rate_of[self.name]} if self.name in setting.rate_of else {}
        return parse_config(
            {
                "data": {"name": "cifar10", **setting.data},
                "model": {"kind": "image", **setting.model, **self.cell.model, **sizes},
                "optim": {**setting.optim, **rate},
                "train": {**setting.train, "seed": self.seed, "threads": threads},
            }
        )


class ImageTable(Experiment[ImageRow]):
    """A table of image flows.

    Args:
        name: the name of the table.
        of_paper: its name in the paper.
        title: its heading.
        about: a description of what its rows have in common.
        cells: its rows.
        settings: its presets.
        weights: rows whose weights are stored beside the table.
    """

    def __init__(
        self,
        name: str,
        of_paper: str,
        title: str,
        about: str,
        cells: Sequence[Cell],
        settings: Mapping[str, Setting],
        weights: Sequence[str] = (),
    ) -> None:
        self.name = name
        self.of_paper = of_paper
        self.title = title
        self.about = about
        self.cells = tuple(cells)
        self.labels = {cell.name: cell.label or cell.name for cell in cells}
        self.settings = settings
        self.weights = tuple(weights)
        self.presets = {preset: setting.about for preset, setting in settings.items()}
        self.main = "laptop"

    def rows(self, preset: str) -> list[ImageRow]:
        """All cells with the first seed, then with the next."""
        setting = self.settings[preset]
        rows = [ImageRow(cell, seed, self.settings) for seed in setting.seeds for cell in self.cells]
        return [row for row in rows if not setting.rate_of or row.name in setting.rate_of]

    def row_name(self, result: Result) -> str:
        return f"{result['model']}-{result['seed']}"

    def steps(self, row: ImageRow, preset: str) -> int:
        setting = self.settings[preset]
        return len(setting.rates) * setting.rate_steps + row.config(preset).train.steps

    def run_folder(self, row: ImageRow, runs: Path) -> Path:
        """Below the folder of its table and preset, or of the table that trains the same row."""
        shared = row.cell.shared
        return (runs if shared is None else runs.parents[1] / shared / runs.name) / row.name

    def train(
        self,
        row: ImageRow,
        preset: str,
        runs: Path,
        *,
        threads: int | None = None,
        device: str = "cpu",
        on_step: OnStep,
    ) -> None:
        config, run = row.config(preset, threads), self.run_folder(row, runs)
        tried = self._try_rates(row, preset, run, config, on_step, device)
        config = with_rate(config, min(tried, key=tried.__getitem__)) if tried else config
        done = len(tried) * self.settings[preset].rate_steps
        train(config, run, device=device, on_step=lambda step: on_step(done + step))

    def _try_rates(
        self, row: ImageRow, preset: str, run: Path, config: Config, on_step: OnStep, device: str
    ) -> dict[float, float]:
        """The validation nll after a short training at each of the rates."""
        setting = self.settings[preset]
        short = config.train.model_copy(update={"steps": setting.rate_steps, "on_nonfinite": "skip"})
        for k, rate in enumerate(setting.rates):
            done = k * setting.rate_steps
            try:
                train(
                    with_rate(config, rate).model_copy(update={"train": short}),
                    _trial(run, rate),
                    device=device,
                    on_step=lambda step, done=done: on_step(done + step),  # type: ignore[misc]
                )
            except TrainingError:  # no validation was finite, so it is not the best
                continue
        tried = tried_rates(run, setting)
        best = min(tried.values(), default=0.0)
        expect(math.isfinite(best), f"a learning rate that {row.name} can be trained at", "none among those tried")
        return tried

    def measure(self, row: ImageRow, preset: str, runs: Path, folder: Path, *, device: str = "cpu") -> Result:
        setting, run = self.settings[preset], self.run_folder(row, runs)
        started = time.perf_counter()
        trained = open_run(run, device)
        test = trained.data().test[: setting.images]
        shape = trained.event_shape
        values = Values(bits_per_dim(trained.log_likelihoods(test), shape), None)
        if row.cell.weighed:
            place = results_file(trained, "test", setting.samples)
            weighed = importance_estimates(trained, test[: setting.weighed_images], setting.samples, kept_in=place)
            values = Values(values.elbo, bits_per_dim(weighed.log_prob, shape))
        values.save(folder, row.name)
        if row.cell.name in self.weights:
            save_pretrained(run, folder / row.name)
        records = RunFolder(run).read_metrics()
        seconds = sum(step_seconds(records))
        return {
            "model": row.cell.name,
            "seed": row.seed,
            **values.measures(),
            "importance_samples": setting.samples if row.cell.weighed else None,
            "paper": dict(row.cell.paper),
            "parameters": count_parameters(trained.model),
            "lr": trained.config.optim.lr,
            "tried": {f"{rate:g}": _bits(nll, shape) for rate, nll in tried_rates(run, setting).items()},
            "steps": trained.config.train.steps,
            "batch_size": trained.config.train.batch_size,
            "seconds_per_step": round(seconds / trained.config.train.steps, 4),
            "training_seconds": round(seconds),
            "test_seconds": round(time.perf_counter() - started),
            "threads": torch.get_num_threads(),
            "curve": [[r["step"], _bits(r["validation_nll"], shape)] for r in records if "validation_nll" in r],
            "command": self.command(row, preset),
        }

    def step_time(self, row: ImageRow, preset: str, *, threads: int | None = None, device: str = "cpu") -> float:
        """The median of the first few steps."""
        return median_step(row.config(preset, threads), device)

    def more(self, found: Sequence[Result], folder: Path, preset: str) -> dict[str, Any]:
        """Differences between rows of the same seed on the same test images.

        A row with a rate of its own is compared with finished rows of the main preset: with itself, and with every row
        that it is compared with there, in either direction.
        """
        names = [(r["model"], r["seed"]) for r in found]
        values = {(model, seed): Values.load(folder, f"{model}-{seed}") for model, seed in names}
        against = {cell.name: cell.against or (self.cells[0].name,) for cell in self.cells}
        if self.settings[preset].rate_of:
            chosen = self.results_file(folder.parent, self.main).with_suffix("")
            there = [(r["model"], r["seed"]) for r in self.load(chosen.with_suffix(".json"))]
            values |= {(model + CHOSEN, seed): Values.load(chosen, f"{model}-{seed}") for model, seed in there}
            related = {a: [b for b in against if b in against[a] or a in against[b]] for a in against}
            against = {a: tuple(b + CHOSEN for b in dict.fromkeys([a, *related[a]])) for a in against}
            against |= {a + CHOSEN: () for a in related}
        return {"differences": paired_differences(values, against)}

    def text(self, table: Mapping[str, Any], preset: str) -> str:
        labels = self.labels | {name + CHOSEN: label + CHOSEN for name, label in self.labels.items()}
        papers = {name: cell.paper for cell in self.cells for name in (cell.name, cell.name + CHOSEN)}
        setting = self.settings[preset]
        row = self.rows(preset)[0]
        about = f"{self.about} {setting.choices}".strip()
        figure = self.results_file(Path(), preset).with_suffix(".svg").name
        return table_text(
            table,
            title=self.title,
            about=about,
            labels=labels,
            papers=papers,
            config=row.config(preset),
            figure=figure,
        )

    def comparisons(self, table: Mapping[str, Any]) -> list[Comparison]:
        return likelihood_comparisons(table["rows"], self.labels)

    def draw(self, table: Mapping[str, Any], path: Path) -> None:
        draw_curves(table["rows"], self.labels, path.with_suffix(".svg"))

    def summary(self, result: Result) -> str:
        paper = result["paper"].get("elbo")
        nll = "" if result["nll"] is None else f", NLL {result['nll']:.4f}"
        beside = "" if paper is None else f" (paper {paper:.3f})"
        return f"−ELBO {result['elbo']:.4f}{nll} bits per dimension{beside}"


def with_rate(config: Config, rate: float) -> Config:
    """The config with another learning rate."""
    return config.model_copy(update={"optim": config.optim.model_copy(update={"lr": rate})})


def tried_rates(run: Path, setting: Setting) -> dict[float, float]:
    """The validation nll for each rate; infinite if none was finite."""
    best_nll = {}
    for rate in setting.rates:
        records = RunFolder(_trial(run, rate)).read_metrics()
        values = [r["validation_nll"] for r in records if "validation_nll" in r]
        best_nll[rate] = min((v for v in values if math.isfinite(v)), default=math.inf)
    return best_nll


def _trial(run: Path, rate: float) -> Path:
    return run.with_name(f"{run.name}-lr-{rate:g}")


def _bits(nll: float, shape: Sequence[int]) -> float | None:
    """In bits per dimension; None if it is not finite, which JSON cannot express."""
    return round(float(bits_per_dim(-torch.tensor(nll, dtype=torch.float64), shape)), 5) if math.isfinite(nll) else None
