"""Points in the plane."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from expmflow._validation import expect_count


def two_moons(samples: int, generator: torch.Generator, *, noise: float = 0.1) -> Tensor:
    """`(samples, 2)`: two interleaved half circles, with Gaussian noise.

    Example:
        >>> two_moons(4, torch.Generator().manual_seed(0)).shape
        torch.Size([4, 2])
    """
    expect_count(samples, "samples")
    angle = math.pi * torch.rand(samples, generator=generator)
    upper = torch.rand(samples, generator=generator) < 0.5
    outer = torch.stack([angle.cos(), angle.sin()], dim=1)
    inner = torch.stack([1 - angle.cos(), 0.5 - angle.sin()], dim=1)
    points = torch.where(upper.unsqueeze(1), outer, inner)
    return points + noise * torch.randn(samples, 2, generator=generator)
