"""Samples of a model that are reproducible by seed."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from expmflow.distributions import Density
from expmflow.training.randomness import Randomness

LARGEST_SAMPLE = 1024  # the number of rows drawn at a time


def draw(
    model: Density,
    n: int,
    randomness: Randomness,
    *,
    context: Tensor | None = None,
    temperature: float = 1.0,
    advance: Callable[[int], None] = lambda done: None,
) -> Tensor:
    """`(n, *event)` on the CPU, with a row of the context for each; a larger `n` begins with the same samples."""
    like, drawn = next(model.parameters()), []
    for k, start in enumerate(range(0, n, LARGEST_SAMPLE)):
        count = min(LARGEST_SAMPLE, n - start)
        noise = [part[:count].to(like) for part in randomness.draws(model.sample_draws, LARGEST_SAMPLE, "sample", k)]
        rows = None if context is None else context[start : start + count]
        drawn.append(model.sample(count, rows, temperature=temperature, noise=noise).cpu())
        advance(count)
    return torch.cat(drawn)
