"""Typicality scores of rows, and how well scores separate rows."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from expmflow._validation import expect


@dataclass(frozen=True)
class Typicality:
    """The distance of a row's likelihood from those of held-out rows: |nll − mean| / std.

    Rows that are too likely are as unusual as rows that are too unlikely, so the distance counts in both directions.
    """

    mean: float
    std: float
    threshold: float

    @classmethod
    def of(cls, nll: Tensor, *, quantile: float = 0.99, threshold: float | None = None) -> Typicality:
        """Calibrated on rows that were not trained on, because a model is more certain of its training rows.

        Rows above `threshold` are flagged. By default, the threshold is the ⌈quantile · (n + 1)⌉-th of the n scores, or
        the
        largest if n is too small: then at most 1 − `quantile` of new rows of the same kind lie above it on average.
        Rows with an infinite likelihood do not count.
        """
        expect(0 < quantile < 1, "a quantile between 0 and 1", quantile)
        nll = nll[nll.isfinite()].double()
        expect(len(nll) > 1, "at least two rows with finite likelihoods to measure scores by", len(nll))
        mean, std = float(nll.mean()), max(float(nll.std()), torch.finfo(nll.dtype).tiny)
        scores = ((nll - mean).abs() / std).sort().values
        at = min(len(scores), math.ceil(quantile * (len(scores) + 1))) - 1
        return cls(mean, std, float(scores[at]) if threshold is None else threshold)

    def score(self, nll: Tensor) -> Tensor:
        """One number per row; about one for rows like the held-out ones."""
        return (nll - self.mean).abs() / self.std


def auroc(scores: Tensor, reference: Tensor) -> float:
    """How often a score is above one of the reference, ties counting half: 1 is perfect separation, ½ is chance.

    Example:
        >>> auroc(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([0.0, 2.0]))
        0.75
    """
    expect(len(scores) > 0 and len(reference) > 0, "at least one row on either side of an AUROC", "none")
    ordered = reference.contiguous().sort().values
    below = [torch.searchsorted(ordered, scores.contiguous(), right=right) for right in (False, True)]
    return float((below[0] + below[1]).double().mean()) / (2 * len(ordered))
