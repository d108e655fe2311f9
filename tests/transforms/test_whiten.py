"""Whitening starts at the data's own covariance."""

from __future__ import annotations

import pytest
import torch
from sklearn.covariance import oas

from expmflow import transforms as T
from expmflow.transforms.whiten import LEAST_VARIANCE, shrunk
from transform_registry import draw


def correlated(rows: int, features: int) -> torch.Tensor:
    return draw("rows", rows, features) @ draw("mixed", features, features) + draw("mean", features)


def test_first_batch_comes_out_uncorrelated():
    x = correlated(5000, 4)
    layer = T.Whiten(4).double()
    z, logdet = layer(x)
    covariance = shrunk(torch.cov(x.T, correction=0), 5000)
    factor = layer._factor()
    torch.testing.assert_close(factor @ covariance @ factor.T, torch.eye(4, dtype=x.dtype), rtol=0, atol=1e-8)
    assert z.mean(0).abs().max() < 1e-10
    torch.testing.assert_close(logdet, -0.5 * torch.logdet(covariance).expand(5000))
    again, _ = layer(x + 1)  # only the first batch counts
    assert torch.allclose(again - z, layer._factor().sum(1).expand_as(z))


@pytest.mark.parametrize("rows", [3, 20, 1000])
def test_shrinkage_is_that_of_scikit_learn(rows):
    x = correlated(rows, 5)
    covariance = torch.cov(x.T, correction=0)
    expected = torch.from_numpy(oas(x.numpy())[0])
    floor = LEAST_VARIANCE * expected.diagonal().max() * torch.eye(5)
    assert torch.allclose(shrunk(covariance, rows), expected + floor, rtol=1e-10)


@pytest.mark.parametrize("x", [torch.zeros(8, 3), torch.ones(8, 1) * torch.arange(8.0)[:, None].expand(8, 3)])
def test_constant_and_equal_columns_keep_it_finite(x):
    layer = T.Whiten(3).double()
    z, logdet = layer(x.double())
    assert z.isfinite().all()
    assert logdet.isfinite().all()
    back, _ = layer.inverse(z)
    assert torch.allclose(back, x.double(), atol=1e-6)


def test_rows_that_never_change_keep_it_finite_in_single_precision():
    z, logdet = T.Whiten(3)(torch.full((8, 3), 7.0))
    assert torch.equal(z, torch.zeros(8, 3))
    assert logdet.abs().max() < 1e-5  # of a scale that is left alone


@pytest.mark.parametrize("far", [1e6, 1e9])
def test_features_far_from_zero_are_whitened_by_their_spread(far):
    x = correlated(400, 3)
    near, there = T.Whiten(3).double(), T.Whiten(3).double()
    expected, _ = near(x)
    z, _ = there(x + far)
    torch.testing.assert_close(z, expected, rtol=0, atol=1e-14 * far)


def test_one_row_is_no_start():
    layer = T.Whiten(2)
    z, _ = layer(torch.tensor([[5.0, 7.0]]))
    assert torch.equal(z, torch.tensor([[5.0, 7.0]]))
    assert not layer.initialised
