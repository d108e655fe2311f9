"""The model of tables against zuko's neural spline flow: the same rows, steps, schedule and grid of learning rates."""

from __future__ import annotations

import copy
import math
import statistics
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import product
from multiprocessing import get_context

import torch
import zuko
from sklearn import datasets
from torch import Tensor, nn

from expmflow.data import two_moons
from expmflow.data.kinds.vectors import jittered
from expmflow.models import table_flow
from expmflow.training.config import OptimConfig
from expmflow.training.defaults import default_components, default_hidden, default_jitter, default_weight_decay
from expmflow.training.optimizer import build_optimizer
from timing import medians, table

STEPS, BATCH, EVERY, WARM_UP, CLIP = 1_500, 256, 50, 50, 5.0
RATES = (1e-3, 3e-3, 1e-2)
SEEDS = (0, 1, 2)


@dataclass
class Parts:
    """Rows, standardised by the training rows; `offset` turns their nll into that of the rows as they were."""

    train: Tensor
    validation: Tensor
    test: Tensor
    offset: float


@dataclass
class Candidate:
    """A density, and how it is regularised."""

    build: Callable[[int, int], nn.Module]
    jitter: Callable[[int], float]
    weight_decay: Callable[[int], float]


def checkerboard(rows: int, generator: torch.Generator) -> Tensor:
    """Uniform on every other square of four by four."""
    x = 4 * torch.rand(rows, generator=generator) - 2
    y = torch.rand(rows, generator=generator) - 2 * torch.randint(2, (rows,), generator=generator)
    return 2 * torch.stack([x, y + x.floor() % 2], 1)


def digits(generator: torch.Generator) -> Tensor:
    """The 64 grey levels of scikit-learn's digits, dequantized."""
    rows = torch.from_numpy(datasets.load_digits().data).float()
    return rows + torch.rand(rows.shape, generator=generator)


DATA: dict[str, Callable[[torch.Generator], Tensor]] = {
    "two moons": lambda generator: two_moons(14_000, generator),
    "checkerboard": lambda generator: checkerboard(14_000, generator),
    "digits": digits,
    "breast cancer": lambda generator: torch.from_numpy(datasets.load_breast_cancer().data).float(),
    "wine": lambda generator: torch.from_numpy(datasets.load_wine().data).float(),
}


class NSF(nn.Module):
    """zuko's, as a module whose call is log p."""

    def __init__(self, features: int, rows: int) -> None:
        super().__init__()
        self.flow = zuko.flows.NSF(features, transforms=3, hidden_features=(64, 64))

    def forward(self, x: Tensor) -> Tensor:
        return self.flow().log_prob(x)


def ours(features: int, rows: int) -> nn.Module:
    return table_flow(features, hidden=default_hidden(rows), components=default_components(rows, features))


CANDIDATES = {
    "NSF": Candidate(NSF, lambda rows: 0.0, lambda rows: 0.0),
    "ours": Candidate(ours, default_jitter, default_weight_decay),
}


def load(name: str) -> Parts:
    """Rows in a random order: 70 % for training, 15 % for validation, 15 % for the test."""
    generator = torch.Generator().manual_seed(0)
    rows = DATA[name](generator)
    rows = rows[torch.randperm(len(rows), generator=generator)]
    counts = [round(0.7 * len(rows)), round(0.15 * len(rows))]
    parts = rows.split([*counts, len(rows) - sum(counts)])
    mean, std = parts[0].mean(0), parts[0].std(0).clamp_min(1e-3)
    return Parts(*((part - mean) / std for part in parts), offset=float(std.log().sum()))


def fit(candidate: Candidate, parts: Parts, rate: float, seed: int) -> tuple[float, float]:
    """The nll of validation and test rows at the step where that of the validation rows is smallest."""
    torch.manual_seed(seed)
    train, rows = parts.train, len(parts.train)
    model = candidate.build(train.shape[1], rows)
    config = OptimConfig(lr=rate, weight_decay=candidate.weight_decay(rows))
    optimizer, generator = build_optimizer(model, config), torch.Generator().manual_seed(seed)
    best = (math.inf, math.inf)
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = rate * min(1, (step + 1) / WARM_UP) * (1 + math.cos(math.pi * step / STEPS)) / 2
        x = train[torch.randint(rows, (min(BATCH, rows),), generator=generator)]
        x = jittered(x, torch.rand(len(x), 2, generator=generator), candidate.jitter(rows), train)
        optimizer.zero_grad()
        (-model(x).mean()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        if (step + 1) % EVERY == 0:
            with torch.no_grad():
                looked_at = copy.deepcopy(model).eval()
                validation, test = (float(-looked_at(part).mean()) for part in (parts.validation, parts.test))
            best = min(best, (validation, test))
    return best[0] + parts.offset, best[1] + parts.offset


def gaussian(parts: Parts) -> float:
    """The test nll of a Gaussian with the covariance of the training rows."""
    jitter = 1e-6 * torch.eye(parts.train.shape[1])
    density = torch.distributions.MultivariateNormal(parts.train.mean(0), torch.cov(parts.train.T) + jitter)
    return float(-density.log_prob(parts.test).mean()) + parts.offset


def training_step(candidate: Candidate, parts: Parts) -> Callable[[], None]:
    """One step on one batch, without what both do alike."""
    rows = len(parts.train)
    model = candidate.build(parts.train.shape[1], rows)
    optimizer = build_optimizer(model, OptimConfig(weight_decay=candidate.weight_decay(rows)))
    x = parts.train[:BATCH]
    uniform = torch.rand(len(x), 2)

    def once() -> None:
        moved = jittered(x, uniform, candidate.jitter(rows), parts.train)
        optimizer.zero_grad()
        (-model(moved).mean()).backward()
        optimizer.step()

    return once


def run(name: str, key: str, rate: float, seed: int) -> tuple[float, float]:
    """`fit` by names, in a process of its own with one thread."""
    torch.set_num_threads(1)
    return fit(CANDIDATES[key], load(name), rate, seed)


def against_nsf(rounds: int) -> str:
    """The mean of the seeds at the learning rate that is best on validation rows. Not timed: other work may go on."""
    runs = [(name, key, rate, seed) for name in DATA for key in CANDIDATES for rate in RATES for seed in SEEDS]
    with ProcessPoolExecutor(torch.get_num_threads(), get_context("spawn")) as pool:
        found = dict(zip(runs, pool.map(run, *zip(*runs, strict=True)), strict=True))
    lines = []
    for name, key in product(DATA, CANDIDATES):
        by_rate = {rate: [found[name, key, rate, seed] for seed in SEEDS] for rate in RATES}
        rate = min(by_rate, key=lambda rate: statistics.mean(validation for validation, _ in by_rate[rate]))
        tests = [test for _, test in by_rate[rate]]
        spread = f"{statistics.mean(tests):.3f} ± {statistics.stdev(tests):.3f}"
        lines.append([name, key, f"{gaussian(load(name)):.3f}", spread, f"{rate:g}"])
    return table(["data", "model", "Gaussian", "test nll", "rate"], lines)


def steps_of_nsf(rounds: int) -> str:
    """What both cost: parameters, and the time of a training step by one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    lines = []
    for name in DATA:
        parts = load(name)
        rows, features = parts.train.shape
        ms = medians({key: training_step(candidate, parts) for key, candidate in CANDIDATES.items()}, rounds)
        for key, candidate in CANDIDATES.items():
            count = sum(p.numel() for p in candidate.build(features, rows).parameters() if p.requires_grad)
            lines.append([name, key, f"{rows:,} × {features}", f"{count:,}", f"{ms[key]:.1f}"])
    torch.set_num_threads(threads)
    return table(["data", "model", "training rows", "parameters", "ms a step"], lines)
