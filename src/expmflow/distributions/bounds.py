"""Lower bounds on a log-likelihood, and bits per dimension."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from expmflow._validation import expect, expect_count


def bits_per_dim(log_prob: Tensor, event_shape: Sequence[int]) -> Tensor:
    """−log₂ p / d for a `log_prob` in nats of discrete data, with d the number of entries of an event.

    Example:
        >>> bits_per_dim(torch.tensor(-8.0) * math.log(2), (2, 2))
        tensor(2.)
    """
    size = torch.Size(event_shape).numel()
    expect(size > 0, "an event with at least one entry", tuple(event_shape))
    return -log_prob / (size * math.log(2))


def elbo(log_weights: Tensor) -> Tensor:
    """The evidence lower bound: the mean over samples of the log weights log p(x, u) − log q(u | x)."""
    _check(log_weights)
    return log_weights.mean(0)


def importance_weighted(log_weights: Tensor) -> Tensor:
    """The logarithm of the mean weight: tighter than the ELBO, and tighter with more samples (Burda et al., 2016)."""
    _check(log_weights)
    return torch.logsumexp(log_weights, 0) - math.log(log_weights.shape[0])


def estimate_log_weights(sample: Callable[[int], Tensor], samples: int, *, chunk: int = 16) -> Tensor:
    """`(samples, batch)` log weights, computed at most `chunk` samples at a time, without gradients.

    Args:
        sample: given k, returns k independent log weights for each row, `(k, batch)`.
        samples: the total number.
        chunk: the number at a time.
    """
    expect_count(samples, "samples")
    expect_count(chunk, "chunk")
    with torch.no_grad():
        return torch.cat([sample(min(chunk, samples - done)) for done in range(0, samples, chunk)])


def _check(log_weights: Tensor) -> None:
    fits = log_weights.ndim == 2 and log_weights.shape[0] > 0
    expect(fits, "log weights of shape (samples, batch)", tuple(log_weights.shape))
