"""Whole image models at the paper's size, by their mixing layers: a step of training, and samples, relative to 1×1."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from expmflow import transforms as T
from expmflow.experiments.mixing import SETTINGS
from expmflow.models import image_flow
from expmflow.training.config import OptimConfig
from expmflow.training.memory import keep_freed_memory
from expmflow.training.optimizer import build_optimizer
from timing import table, times_apart, undisturbed

BATCH = 8
EVENT = (3, 32, 32)
PLAIN = ("1x1", "64")
ROWS: dict[tuple[str, str], tuple[float | None, float | None]] = {  # mixing, growth: the paper's percentages
    PLAIN: (100.0, 100.0),
    ("1x1", "63"): (None, None),  # what the other kinds' growth costs by itself
    ("emerging", "63"): (103.2, 1223.5),
    ("woodbury", "63"): (133.2, 135.4),
    ("convexp", "63"): (104.6, 115.8),
    ("periodic", "63"): (None, None),
}
STILL = 1e-9  # a learning rate at which norms stay what they are


def relative_to_1x1(rounds: int) -> str:
    """Each model takes turns with 1×1, each in a process of its own."""
    rows = []
    for (kind, growth), paper in ROWS.items():
        row = [f"{kind}, growth {growth}"]
        for function, theirs in zip(("training", "sampling"), paper, strict=True):
            names = {"plain": PLAIN, "ours": (kind, growth)}
            times = times_apart("paper_models", function, names, max(3, rounds // 2))
            ratio, middle = (100 * f(times["ours"]) / f(times["plain"]) for f in (undisturbed, statistics.median))
            seconds = undisturbed(times["ours"]) / 1e3
            row += ["–" if theirs is None else f"{theirs:.1f}", f"**{ratio:.1f}**", f"{middle:.1f}", f"{seconds:.2f}"]
        rows.append(row)
    columns = ["paper, %", "ours, %", "of medians, %", "seconds"]
    header = ["mixing", *(f"{what}: {column}" for what in ("training", "sampling") for column in columns)]
    return table(header, rows)


def model(kind: str, growth: str) -> nn.Module:
    """As the authors' code builds it; convolution exponentials at the norm that they may have."""
    torch.manual_seed(0)
    settings: dict[str, Any] = {**SETTINGS["authors"].model, "growth": int(growth)}
    built = image_flow(EVENT, mixing=kind, **settings)
    with torch.no_grad():
        for layer in built.modules():
            if isinstance(layer, T.ConvExp):
                weight, constraint = layer.parametrizations.kernel.original, layer.parametrizations.kernel[-1]
                weight.mul_(layer.coeff / constraint.norm(weight))
    return built


def training(kind: str, growth: str) -> Callable[[], None]:
    """Forward, backward and optimizer on images of noise."""
    keep_freed_memory()
    flow = model(kind, growth)
    optimizer = build_optimizer(flow, OptimConfig(optimizer="adamax", lr=STILL))
    x = torch.randint(256, (BATCH, *EVENT), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))

    def once() -> None:
        optimizer.zero_grad()
        (-flow(x).mean()).backward()
        optimizer.step()

    return once


def sampling(kind: str, growth: str) -> Callable[[], None]:
    """Images, at the accuracy of evaluation."""
    keep_freed_memory()
    flow = model(kind, growth).eval()

    def once() -> None:
        with torch.inference_mode():
            flow.sample(BATCH)

    return once
