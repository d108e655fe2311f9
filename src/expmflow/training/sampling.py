"""Samples of a model that are the same for the same seed."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from expmflow.distributions import DequantizedFlow, Flow
from expmflow.training.randomness import Randomness

LARGEST_SAMPLE = 1024  # rows that are drawn at a time


def draw(
    model: nn.Module,
    n: int,
    randomness: Randomness,
    *,
    context: Tensor | None = None,
    temperature: float = 1.0,
    advance: Callable[[int], None] = lambda done: None,
) -> Tensor:
    """`(n, *event)` on the CPU, with a row of the context for each; asking for more begins with the same ones."""
    flow = model.flow if isinstance(model, DequantizedFlow) else model
    if not isinstance(flow, Flow):
        raise ValueError(f"Expected a model that can be sampled; got {type(model).__name__}.")
    like, drawn = next(flow.parameters()), []
    for k, start in enumerate(range(0, n, LARGEST_SAMPLE)):
        count = min(LARGEST_SAMPLE, n - start)
        noise = randomness.noise("normal", (LARGEST_SAMPLE, *flow.base.noise_shape(None)), "sample", k)[:count].to(like)
        told = None if context is None else context[start : start + count]
        part = flow.sample(count, told, temperature=temperature, noise=noise)
        if isinstance(model, DequantizedFlow):
            part = ((part + 0.5) * model.levels).floor().clamp(0, model.levels - 1).to(torch.int64)
        drawn.append(part.cpu())
        advance(count)
    return torch.cat(drawn)
