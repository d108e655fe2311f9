"""The paper's graph table: three models on four mixtures of Gaussians, in nats per node."""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch

from expmflow.data.graphs import MIXTURES
from expmflow.experiments.experiment import Comparison, Experiment, Result, step_seconds
from expmflow.experiments.table import markdown_table
from expmflow.runs.evaluation import open_run
from expmflow.runs.pretrained import save_pretrained
from expmflow.training.config import Config, parse_config
from expmflow.training.job import OnStep
from expmflow.training.loop import train
from expmflow.training.run import RunFolder

MODELS = ("coupling", "gnf", "gnf-exp")
PAPER = {  # nats per node, and ±, of which the paper does not say what it is
    "mog-4": {"coupling": (3.89, 0.012), "gnf": (3.69, 0.016), "gnf-exp": (3.68, 0.017)},
    "mog-9": {"coupling": (6.14, 0.012), "gnf": (4.60, 0.067), "gnf-exp": (4.52, 0.047)},
    "mog-16": {"coupling": (7.20, 0.021), "gnf": (5.38, 0.048), "gnf-exp": (5.26, 0.047)},
    "mog-ring": {"coupling": (4.35, 0.023), "gnf": (4.22, 0.025), "gnf-exp": (4.19, 0.036)},
}
PAPER_ENTROPY = {"mog-4": (3.63, 0.0), "mog-9": (4.26, 0.013), "mog-ring": (4.05, 0.001)}  # an upper bound of the last
CHOICES = (
    "The paper names no optimizer and prints a learning rate of 2^-4; its graph couplings are those of Liu et al. "
    "(2019), which move both halves of the features in turn; in gnf-exp an exponential precedes each of the two."
)
REPEATED = [("mog-4", model) for model in MODELS] + [("mog-16", "gnf-exp")]  # with two more seeds
BEST = "sorted"
PRESETS = {
    "paper": {"steps": 35_000, "decay_every": 15_000, "test": 1_280_000},
    "laptop": {"steps": 2_000, "decay_every": 850, "test": 20_000},
    "best": {"steps": 6_000, "decay_every": 1_500, "test": 1_280_000},
    "clipped": {"steps": 35_000, "decay_every": 15_000, "test": 1_280_000},
}
CLIP = 5_000.0  # about the norm that gradients of most batches have on MoG-16


@dataclass(frozen=True)
class Row:
    """One cell of the table, and one run."""

    data: str
    model: str
    seed: int

    @property
    def name(self) -> str:
        return f"{self.data}-{self.model}-{self.seed}"

    def config(self, preset: str, threads: int | None = None) -> Config:
        """Adam at 2e-4: the paper names no optimizer, and prints 2^-4, at which Adam diverges."""
        settings, best = PRESETS[preset], self.model == BEST
        return parse_config(
            {
                "data": {"name": self.data, "samples": settings["test"]},
                "model": {
                    "kind": "graph",
                    "network": self.model,
                    "subflows": 6 if best else 3,
                    "hidden": 128 if best else 64,
                },
                "optim": {
                    "optimizer": "adam",
                    "lr": 2e-3 if best else 2e-4,
                    "decay": 0.3 if best else 0.1,
                    "decay_every": settings["decay_every"],
                    "clip": CLIP if preset == "clipped" else None,
                },
                "train": {
                    "steps": settings["steps"],
                    "batch_size": 256,
                    "seed": self.seed,
                    "log_every": 250,
                    "validate_every": 1000,
                    "checkpoint_every": 1000,
                    "threads": threads,
                },
            }
        )


def table_rows(preset: str) -> list[Row]:
    """The twelve cells, then the additional seeds; or the best model on each data set; or MoG-16 with clipping."""
    if preset == "clipped":
        return [Row("mog-16", model, 0) for model in ("gnf", "gnf-exp")]
    models = (BEST,) if preset == "best" else MODELS
    rows = [Row(data, model, 0) for data in ("mog-4", "mog-ring", "mog-9", "mog-16") for model in models]
    if preset == "paper":
        rows += [Row(data, model, seed) for seed in (1, 2) for data, model in REPEATED]
    return rows


@functools.cache
def entropies() -> dict[str, float]:
    """The entropies of the four data sets, in nats per node."""
    return {name: mixture.entropy() for name, mixture in MIXTURES.items()}


def _over_seeds(found: list[dict[str, Any]]) -> Iterator[tuple[str, str, str, list[float]]]:
    """The cells with several seeds: the paper's numbers, and ours."""
    for data, model in dict.fromkeys((r["data"], r["model"]) for r in found):
        cell = [r for r in found if (r["data"], r["model"]) == (data, model)]
        if len(cell) > 1:
            yield data, model, _as_in_the_paper(cell[0]), [r["nats_per_node"] for r in cell]


def _as_in_the_paper(row: dict[str, Any]) -> str:
    return f"{row['paper']:.2f} ± {row['paper_error']:.3f}"


def results_text(found: list[dict[str, Any]], preset: str) -> str:
    """The table as Markdown."""
    header = ["data", "model", "seed", "entropy", "paper", "ours", "above entropy", "steps", "seconds", "command"]
    rows = [
        [
            r["data"],
            r["model"],
            str(r["seed"]),
            f"{entropies()[r['data']]:.3f}",
            _as_in_the_paper(r),
            f"{r['nats_per_node']:.4f} ± {r['standard_error']:.4f}",
            f"{r['nats_per_node'] - entropies()[r['data']]:.3f}",
            f"{r['steps']:,}",
            f"{r['training_seconds']:,}",
            f"`{r['command']}`",
        ]
        for r in found
    ]
    for data, model, paper, nats in _over_seeds(found):
        ours = [f"**{mean(nats):.4f}** ± {stdev(nats):.4f}", f"{mean(nats) - entropies()[data]:.3f}"]
        rows.append([data, model, f"{len(nats)} seeds", f"{entropies()[data]:.3f}", paper, *ours, "", "", ""])
    threads = " or ".join(str(count) for count in sorted({r["threads"] for r in found})) or "1"
    optim = table_rows(preset)[0].config(preset).optim
    choice = {
        "best": "The paper's numbers are those of its best model, gnf-exp.",
        "clipped": f"{CHOICES} Gradients are scaled down to a norm of {CLIP:,.0f}, where they exceed it.",
    }.get(preset, CHOICES)
    return (
        "# Graph flows: negative log-likelihood in nats per node\n\n"
        f"Batches of 256 new graphs; Adam at {optim.lr:g}, times {optim.decay:g} every {optim.decay_every:,} steps; "
        "the test is on graphs of its own, and our ± is its standard error, of several seeds the standard deviation "
        "over them; the paper does not say what its ± is. "
        f"{choice} Seconds are those of training, with threads: {threads}; beside other work.\n\n"
        + markdown_table(header, rows)
    )


class GraphTable(Experiment[Row]):
    """`expmflow reproduce graph`."""

    def __init__(self) -> None:
        self.name = "graph"
        self.of_paper = "Table 4"
        self.presets = {
            "laptop": "short",
            "paper": "the paper's length",
            "best": "our best model",
            "clipped": "MoG-16 with clipped gradients",
        }

    def rows(self, preset: str) -> list[Row]:
        return table_rows(preset)

    def row_name(self, result: Result) -> str:
        return Row(result["data"], result["model"], result["seed"]).name

    def steps(self, row: Row, preset: str) -> int:
        return PRESETS[preset]["steps"]

    def train(
        self, row: Row, preset: str, runs: Path, *, threads: int | None = None, device: str = "cpu", on_step: OnStep
    ) -> None:
        train(row.config(preset, threads), runs / row.name, device=device, on_step=on_step)

    def measure(self, row: Row, preset: str, runs: Path, folder: Path, *, device: str = "cpu") -> Result:
        """Measure on the test graphs; also writes the best weights to `folder`."""
        run, weights = runs / row.name, folder / row.name
        started = time.perf_counter()
        save_pretrained(run, weights)
        trained = open_run(weights, device)
        nodes = MIXTURES[row.data].nodes
        nll = -trained.log_likelihoods(trained.data().test) / nodes
        paper, paper_error = PAPER[row.data]["gnf-exp" if row.model == BEST else row.model]  # ours against their best
        return {
            "data": row.data,
            "model": row.model,
            "seed": row.seed,
            "nats_per_node": float(nll.mean()),
            "standard_error": float(nll.std()) / len(nll) ** 0.5,
            "test_graphs": len(nll),
            "paper": paper,
            "paper_error": paper_error,
            "training_seconds": round(sum(step_seconds(RunFolder(run).read_metrics()))),
            "test_seconds": round(time.perf_counter() - started),
            "steps": PRESETS[preset]["steps"],
            "threads": torch.get_num_threads(),
            "command": self.command(row, preset),
        }

    def more(self, found: Sequence[Result], folder: Path, preset: str) -> dict[str, Any]:
        return {"entropy": {name: round(value, 4) for name, value in entropies().items()}}

    def text(self, table: Mapping[str, Any], preset: str) -> str:
        return results_text(table["rows"], preset)

    def comparisons(self, table: Mapping[str, Any]) -> list[Comparison]:
        """The entropy of the data, then the models."""
        comparisons = []
        for data in dict.fromkeys(r["data"] for r in table["rows"]):
            paper, paper_error = PAPER_ENTROPY.get(data, (None, None))
            comparisons.append(
                Comparison(f"{data}, the data", "entropy, nats per node", paper, table["entropy"][data], paper_error)
            )
        for data, model in dict.fromkeys((r["data"], r["model"]) for r in table["rows"]):
            cell = [r for r in table["rows"] if (r["data"], r["model"]) == (data, model)]
            nats = [r["nats_per_node"] for r in cell]
            error = stdev(nats) if len(nats) > 1 else cell[0]["standard_error"]
            paper, paper_error = cell[0]["paper"], cell[0]["paper_error"]
            comparisons.append(Comparison(f"{data}, {model}", "nats per node", paper, mean(nats), paper_error, error))
        return comparisons

    def summary(self, result: Result) -> str:
        return f"{result['nats_per_node']:.4f} nats per node (paper {result['paper']:.2f})"
