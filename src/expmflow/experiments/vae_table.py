"""A table of VAEs with different posteriors: rows, their training, and their measurements."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from expmflow._validation import expect_type
from expmflow.distributions.describe import count_parameters
from expmflow.experiments.experiment import Comparison, Experiment, Result, median_step, step_seconds
from expmflow.experiments.vae_text import MAIN, vae_text
from expmflow.experiments.values import Values, likelihood_comparisons, paired_differences
from expmflow.models.vae import VAE
from expmflow.runs.evaluation import Trained, open_run
from expmflow.runs.importance import importance_estimates, results_file
from expmflow.training.config import Config, parse_config
from expmflow.training.job import OnStep
from expmflow.training.loop import train
from expmflow.training.run import RunFolder

Paper = Mapping[str, Mapping[str, tuple[float, float, float, float]]]
MEASURES = (("−ELBO", "elbo"), ("NLL", "nll"))
KL_ROWS = 500  # test images from which the latents in use are counted
BEFORE = {  # flows with networks, in the paper's order
    "householder": ("iaf",),
    "sylvester": ("iaf", "householder"),
    "conv-sylvester": ("conv-iaf",),
}
SOURCES = {"mnist": "binarized-mnist", "cifar10": "cifar10"}


@dataclass(frozen=True)
class Setting:
    """The settings of a preset for one set of images.

    Args:
        rows: posteriors, and the seeds to train each with.
        model: of all rows; `vectors` and `maps` are additional settings for latents that are vectors or images.
        optim, train: of the config.
        weighed_images, samples: the number of images for the NLL, and of importance samples for each.
    """

    rows: Mapping[str, tuple[int, ...]]
    model: Mapping[str, Any]
    vectors: Mapping[str, Any]
    maps: Mapping[str, Any]
    optim: Mapping[str, Any]
    train: Mapping[str, Any]
    weighed_images: int = 10_000
    samples: int = 1000


@dataclass(frozen=True)
class Preset:
    """A setting for each set of images.

    Args:
        about: for `--help`.
        settings: by the name of the images.
        choices: what the text of the table says about them.
        varies_main: whether its rows are those of the main preset but for one setting, and are compared with them.
    """

    about: str
    settings: Mapping[str, Setting]
    choices: str = ""
    varies_main: bool = False


@dataclass(frozen=True)
class VAERow:
    """A set of images, a posterior and a seed."""

    images: str
    posterior: str
    seed: int
    presets: Mapping[str, Preset] = field(repr=False)

    @property
    def model(self) -> str:
        return f"{self.images}-{self.posterior}"

    @property
    def name(self) -> str:
        return f"{self.model}-{self.seed}"

    def config(self, preset: str, threads: int | None = None) -> Config:
        setting = self.presets[preset].settings[self.images]
        latents = setting.maps if self.posterior.startswith("conv-") else setting.vectors
        return parse_config(
            {
                "data": {"name": SOURCES[self.images]},
                "model": {"kind": "vae", "posterior": self.posterior, **setting.model, **latents},
                "optim": dict(setting.optim),
                "train": {**setting.train, "seed": self.seed, "threads": threads},
            }
        )


class VAETable(Experiment[VAERow]):
    """Posteriors of one VAE on black-and-white MNIST, in nats, and on CIFAR-10, in bits per dimension.

    Args:
        presets: the presets by name.
        labels: the paper's names of the posteriors.
        paper: for each set of images and each posterior: −ELBO, its spread, NLL, its spread.
    """

    name = "vae"
    of_paper = "The VAE table of the appendix"
    main = "laptop"

    def __init__(self, presets: Mapping[str, Preset], labels: Mapping[str, str], paper: Paper) -> None:
        self.of_presets = dict(presets)
        self.labels = labels
        self.paper = paper
        self.presets = {name: preset.about for name, preset in presets.items()}

    def rows(self, preset: str) -> list[VAERow]:
        """MNIST before CIFAR-10; for each, all posteriors with their first seed, then with the next."""
        table_rows = []
        for images, setting in self.of_presets[preset].settings.items():
            for turn in range(max(map(len, setting.rows.values()))):
                table_rows += [
                    VAERow(images, posterior, seeds[turn], self.of_presets)
                    for posterior, seeds in setting.rows.items()
                    if turn < len(seeds)
                ]
        return table_rows

    def row_name(self, result: Result) -> str:
        return f"{result['model']}-{result['seed']}"

    def steps(self, row: VAERow, preset: str) -> int:
        return row.config(preset).train.steps

    def train(
        self, row: VAERow, preset: str, runs: Path, *, threads: int | None = None, device: str = "cpu", on_step: OnStep
    ) -> None:
        train(row.config(preset, threads), self.run_folder(row, runs), device=device, on_step=on_step)

    def measure(self, row: VAERow, preset: str, runs: Path, folder: Path, *, device: str = "cpu") -> Result:
        setting = self.of_presets[preset].settings[row.images]
        started = time.perf_counter()
        trained = open_run(runs / row.name, device)
        test, unit = trained.data().test, trained.unit
        place = results_file(trained, "test", setting.samples)
        weighed = importance_estimates(trained, test[: setting.weighed_images], setting.samples, kept_in=place)
        values = Values(-trained.log_likelihoods(test) * unit.per_nat, -weighed.log_prob * unit.per_nat)
        values.save(folder, row.name)
        records = RunFolder(runs / row.name).read_metrics()
        last = max(record["step"] for record in records)
        seconds = sum(step_seconds(records))
        elbo, elbo_error, nll, nll_error = self.paper[row.images][row.posterior]
        return {
            "model": row.model,
            "images": row.images,
            "posterior": row.posterior,
            "seed": row.seed,
            "unit": unit.name,
            **values.measures(),
            "importance_samples": setting.samples,
            "paper": {"elbo": elbo, "elbo_error": elbo_error, "nll": nll, "nll_error": nll_error},
            "parameters": count_parameters(trained.model),
            "flow_parameters": flow_parameters(trained.model),  # type: ignore[arg-type]
            **_latents(trained, test),
            "steps": last,
            "batch_size": trained.config.train.batch_size,
            "seconds_per_step": round(seconds / last, 4),
            "training_seconds": round(seconds),
            "test_seconds": round(time.perf_counter() - started),
            "threads": torch.get_num_threads(),
            "curve": [
                [r["step"], round(r["validation_nll"] * unit.per_nat, 4)] for r in records if "validation_nll" in r
            ],
            "command": self.command(row, preset),
        }

    def step_time(self, row: VAERow, preset: str, *, threads: int | None = None, device: str = "cpu") -> float:
        """The median of the first few steps."""
        return median_step(row.config(preset, threads), device)

    def more(self, found: Sequence[Result], folder: Path, preset: str) -> dict[str, Any]:
        """Differences between rows of the same seed on the same test images.

        Rows that vary the main preset are also compared with its finished rows: themselves, and those before them.
        """
        values = {(r["model"], r["seed"]): Values.load(folder, self.row_name(r)) for r in found}
        against = {r["model"]: references(r["model"]) for r in found}
        if self.of_presets[preset].varies_main:
            main = self.results_file(folder.parent, self.main)
            for r in self.load(main):
                values[r["model"] + MAIN, r["seed"]] = Values.load(main.with_suffix(""), self.row_name(r))
            against = {a: [*before, *(b + MAIN for b in (a, *before))] for a, before in against.items()}
            against |= {model: [] for model, _ in values if model.endswith(MAIN)}
        return {"differences": paired_differences(values, against)}

    def text(self, table: Mapping[str, Any], preset: str) -> str:
        return vae_text(
            table,
            labels=self.labels,
            paper={f"{images}-{name}": cell for images, cells in self.paper.items() for name, cell in cells.items()},
            configs={row.images: row.config(preset) for row in self.rows(preset)},
            choices=self.of_presets[preset].choices,
        )

    def comparisons(self, table: Mapping[str, Any]) -> list[Comparison]:
        labels = {r["model"]: f"{r['images']}, {self.labels[r['posterior']]}" for r in table["rows"]}
        return likelihood_comparisons(table["rows"], labels)

    def summary(self, result: Result) -> str:
        paper = result["paper"]
        numbers = (f"{label} {result[key]:.3f} (paper {paper[key]:.2f})" for label, key in MEASURES)
        return f"{', '.join(numbers)}, {result['unit']}"


def references(model: str) -> list[str]:
    """The models that a model is compared with.

    They are the Gaussian on the same latents, the flows before it in the paper's order, and its vector counterpart.
    """
    images, _, posterior = model.partition("-")
    vectors = posterior.removeprefix("conv-")
    prefix = f"{images}-{posterior.removesuffix(vectors)}"
    found = [f"{prefix}gaussian", *(f"{images}-{before}" for before in BEFORE.get(posterior, ()))]
    return [*found, f"{images}-{vectors}"] if vectors != posterior else found


def flow_parameters(model: VAE) -> int:
    """The parameters of the flow itself, and of the part of the encoder's head that gives its parameters or context."""
    expect_type(isinstance(model, VAE), "a VAE", type(model).__name__)
    head = list(model.encoder.children())[-1]
    each = sum(parameter[0].numel() for parameter in head.parameters())
    return count_parameters(model.posterior.transform) + each * model.posterior.transform.params_per_sample


def _latents(trained: Trained, test: torch.Tensor) -> dict[str, int]:
    found = trained.model.latents(trained.rows(test[:KL_ROWS]))
    return {} if found is None else {"latents": len(found.kl), "latents_in_use": int((found.kl > 0.01).sum())}
