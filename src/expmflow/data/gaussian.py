"""The Gaussian density of a table, as a baseline that every model has to beat."""

from __future__ import annotations

import math

import torch
from torch import Tensor

SMALLEST = 1e-6  # of a standard deviation, relative to that of its column, for directions that hardly vary


def gaussian_nll(train: Tensor, rows: Tensor) -> float:
    """The mean negative log-likelihood of `rows` under the Gaussian with the mean and covariance of `train`.

    In directions in which the columns hardly vary, the standard deviation is at least 1e-6 of the columns'.

    Example:
        >>> x = torch.randn(10_000, 2, generator=torch.Generator().manual_seed(0))
        >>> abs(gaussian_nll(x, x) - (1 + math.log(2 * math.pi))) < 0.02
        True
    """
    train, rows = train.double(), rows.double()
    mean, scale = train.mean(0), train.std(0, correction=0)
    scale = torch.where(scale > 0, scale, 1.0)
    standard = (train - mean) / scale
    values, vectors = torch.linalg.eigh(standard.T @ standard / len(train))
    deviations = values.clamp_min(0).sqrt().clamp_min(SMALLEST)
    along = ((rows - mean) / scale) @ vectors / deviations
    constant = 0.5 * rows.shape[1] * math.log(2 * math.pi) + float(deviations.log().sum() + scale.log().sum())
    return constant + 0.5 * float(along.square().sum(1).mean())
