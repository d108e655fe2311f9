"""What the paper leaves open about its graph flows, tried out on MoG-16 in short trainings of gnf-exp.

python -m benchmarks.graph_trials [--only "rate 1e-4" ...] [--threads N]

What is in results/graph-trials.json already is not trained again; the table goes to results/graph-trials.md.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from expmflow import transforms as T
from expmflow.data.graphs import MIXTURES
from expmflow.experiments.graph import Row
from expmflow.experiments.table import markdown_table
from expmflow.nn import GraphNetwork
from expmflow.training.build import build_model
from expmflow.training.files import write_json, write_text
from expmflow.training.randomness import Randomness

DATA = MIXTURES["mog-16"]
STEPS, MORE = 1_000, 250  # at the rate, and at a tenth of it
BATCH, GRAPHS = 256, 4_000
RESULTS = Path("results/graph-trials.json")


@dataclass(frozen=True)
class Trial:
    """One thing that is different from the table's rows."""

    seed: int = 0
    lr: float = 2e-4
    betas: tuple[float, float] = (0.9, 0.999)
    change: Callable[[nn.Module], None] = lambda layer: None


@torch.no_grad()
def identity(layer: nn.Module) -> None:
    """A 1×1 that starts as the identity, for which centres lie in rows and columns; the table's start at rotations."""
    if isinstance(layer, T.Conv1x1):
        layer.load_state_dict(T.Conv1x1(layer.channels, dim=layer.dim, start=torch.eye(layer.channels)).state_dict())


@torch.no_grad()
def quieter(layer: nn.Module) -> None:
    """Messages that start at a fifteenth: the mean over the neighbours in place of their sum."""
    if isinstance(layer, GraphNetwork):
        layer.message.weight /= DATA.nodes - 1
        layer.message.bias /= DATA.nodes - 1


@torch.no_grad()
def sharper(layer: nn.Module) -> None:
    """First layers that start three times as steep: a cluster is a tenth as wide as the data."""
    if isinstance(layer, GraphNetwork):
        for values in (layer.receive.weight, layer.receive.bias, layer.send.weight):
            values *= 3


@torch.no_grad()
def farther(layer: nn.Module) -> None:
    """Exponentials that start at thirty times the norm, which is near one third."""
    if isinstance(layer, T.GraphConvExp):
        layer.theta0 *= 30
        layer.theta1 *= 30


TRIALS = {
    "the table's": Trial(),
    "seed 1": Trial(seed=1),
    "seed 2": Trial(seed=2),
    "rate 1e-4": Trial(lr=1e-4),
    "rate 4e-4": Trial(lr=4e-4),
    "second moments over 100 steps": Trial(betas=(0.9, 0.99)),
    "1×1 from the identity": Trial(change=identity),
    "messages averaged": Trial(change=quieter),
    "first layers three times as steep": Trial(change=sharper),
    "exponentials thirty times as large": Trial(change=farther),
}


def run(trial: Trial) -> dict[str, float]:
    """Nats per node on graphs of its own, the same for all trials, before and after the rate falls.

    Weights and batches are those with which the row of this seed begins.
    """
    randomness, nodes = Randomness(trial.seed), DATA.nodes
    flow = build_model(Row("mog-16", "gnf-exp", trial.seed).config("paper"), (nodes, 2)).train()
    for layer in flow.modules():
        trial.change(layer)
    optimizer = torch.optim.Adam(flow.parameters(), lr=trial.lr, betas=trial.betas, fused=True)
    test = DATA.sample(GRAPHS, torch.Generator().manual_seed(0)).split(500)
    found = {}
    for key, steps in (("before", range(STEPS)), ("after", range(STEPS, STEPS + MORE))):
        for step in steps:
            loss = -flow(DATA.sample(BATCH, randomness.generator("data", step))).mean() / nodes
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        flow.eval()
        with torch.no_grad():
            found[key] = -float(torch.cat([flow(part) for part in test]).mean()) / nodes
        flow.train()
        optimizer.param_groups[0]["lr"] /= 10
    return found


def text(found: list[dict[str, Any]]) -> str:
    """The trials in their order."""
    header = ["trial", f"after {STEPS:,} steps", f"after {STEPS + MORE:,}"]
    rows = [[r["trial"], f"{r['before']:.4f}", f"{r['after']:.4f}"] for r in found]
    return (
        "# What was tried on MoG-16\n\n"
        f"`python -m benchmarks.graph_trials`: gnf-exp after {STEPS:,} steps of Adam at 2e-4, and {MORE} more at a "
        f"tenth of it; batches of {BATCH} graphs. Nats per node on {GRAPHS:,} graphs, the same for all. Each trial "
        "begins as the row mog-16-gnf-exp-0 of [graph.md](graph.md), but for what it names.\n\n"
        + markdown_table(header, rows)
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--only", nargs="+", choices=list(TRIALS), default=list(TRIALS), metavar="TRIAL")
    parser.add_argument("--threads", type=int, default=None)
    arguments = parser.parse_args()
    if arguments.threads is not None:
        torch.set_num_threads(arguments.threads)
    for name in arguments.only:
        known = {r["trial"]: r for r in _before()}
        if name not in known:
            found = run(TRIALS[name])
            known = {r["trial"]: r for r in _before()}  # another process may have run one meanwhile
            known[name] = {"trial": name, **found}
            rows = [known[trial] for trial in TRIALS if trial in known]
            write_json(RESULTS, {"rows": rows})
            write_text(RESULTS.with_suffix(".md"), text(rows))
        print(f"{name}: {known[name]['before']:.4f}, {known[name]['after']:.4f}", flush=True)


def _before() -> list[dict[str, Any]]:
    return json.loads(RESULTS.read_text())["rows"] if RESULTS.exists() else []


if __name__ == "__main__":
    main()
