"""Whitening: an affine map of vectors, initialised so that the first batch comes out uncorrelated."""

from __future__ import annotations

from typing import Any, final

import torch
from torch import Tensor, nn

from expmflow._validation import expect_count
from expmflow.transforms.base import Output, expanded
from expmflow.transforms.data_start import DataStart, centred, sum_over_processes
from expmflow.transforms.shapes import expect_vectors

LEAST_VARIANCE = 1e-6  # relative to that of the largest feature
NO_VARIANCE = 1e-24  # a mean variance below which the data counts as constant, and the scale keeps its value


@final
class Whiten(DataStart):
    """z = L (x − shift), L lower triangular with a positive diagonal: ActNorm for correlated features.

    The first batch in training sets both, so a flow starts at least as good as a Gaussian; with several processes, from
    the moments of the whole batch. The covariance is shrunk towards the identity, by an amount that follows from the
    number of rows (oracle approximating shrinkage, Chen et al., 2010). A layer that has seen no data is the identity.
    The logdet costs O(d), and either direction O(d²) a row.

    Args:
        features: d of vectors `(batch, d)`.

    Example:
        >>> x = torch.randn(4096, 2) @ torch.tensor([[2.0, 1.0], [0.0, 0.5]])
        >>> z, logdet = T.Whiten(2)(x)
        >>> bool((torch.cov(z.T) - torch.eye(2)).abs().max() < 0.02)  # what shrinking leaves
        True
    """

    def __init__(self, features: int) -> None:
        super().__init__()
        expect_count(features, "features")
        self.features = features
        self.shift = nn.Parameter(torch.zeros(features))
        self.log_diagonal = nn.Parameter(torch.zeros(features))
        self.below = nn.Parameter(torch.zeros(features, features))

    def check_event_shape(self, event_shape: tuple[int, ...]) -> None:
        expect_vectors(event_shape, self.features)

    def _forward(self, x: Tensor, context: Any) -> Output:
        if self._waits_for_data():
            self._initialise(x)
        return (x - self.shift) @ self._factor().T, expanded(self.log_diagonal.sum(), x)

    def _inverse(self, z: Tensor, context: Any) -> Output:
        x = torch.linalg.solve_triangular(self._factor(), z.T, upper=False).T + self.shift
        return x, expanded(-self.log_diagonal.sum(), z)

    def _factor(self) -> Tensor:
        return self.below.tril(-1) + torch.diag(self.log_diagonal.exp())

    @torch.no_grad()
    def _initialise(self, x: Tensor) -> None:
        rows, mean, count = centred(x)
        if count < 2:
            return
        covariance = sum_over_processes(rows.T @ rows) / count
        factor = torch.linalg.inv(torch.linalg.cholesky(shrunk(covariance, count)))
        self.shift.copy_(mean)
        self.log_diagonal.copy_(factor.diagonal().log())
        self.below.copy_(factor.tril(-1))
        self._has_started()


def shrunk(covariance: Tensor, count: float) -> Tensor:
    """(1 − ρ) S + ρ tr(S)/d · I, ρ by Chen et al. (2010): positive definite for any `count` rows behind S."""
    d = len(covariance)
    mean = covariance.diagonal().mean()
    square, size = float(covariance.square().mean()), float(mean.square())
    spread = (count + 1) * (square - size / d)
    share = min(1.0, (square + size) / spread) if spread > 0 else 1.0
    target = torch.where(mean > NO_VARIANCE, mean, 1.0) * torch.eye(d).to(covariance)
    result = (1 - share) * covariance + share * target
    return result + LEAST_VARIANCE * result.diagonal().max() * torch.eye(d).to(covariance)
