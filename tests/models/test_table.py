"""The model of tables: a density that starts as good as a Gaussian."""

from __future__ import annotations

import pytest
import torch

from expmflow.distributions import Logistic
from expmflow.models import table_flow
from transform_registry import draw

F64 = torch.float64


def test_starts_near_the_gaussian_of_the_rows():
    """Before a single step of training: within a tenth of a nat per column, where independent columns are far off."""
    torch.manual_seed(0)
    x = draw("rows", 4000, 4) @ torch.linalg.cholesky(torch.full((4, 4), 0.95, dtype=F64) + 0.05 * torch.eye(4)).T
    flow = table_flow(4, hidden=16).double().train()
    flow.log_prob(x)
    nll = -flow.log_prob(x).mean()
    gaussian = torch.distributions.MultivariateNormal(x.mean(0), torch.cov(x.T))
    independent = torch.distributions.Normal(x.mean(0), x.std(0))
    assert nll < -gaussian.log_prob(x).mean() + 0.4
    assert nll < -independent.log_prob(x).sum(1).mean() - 1


@pytest.mark.parametrize("features", [1, 2, 5])
def test_samples_have_their_own_density(features):
    torch.manual_seed(0)
    flow = table_flow(features, blocks=2, hidden=8, components=4).double().train()
    flow.log_prob(draw("rows", 64, features))
    flow.eval()
    x, log_prob = flow.sample_and_log_prob(7)
    assert torch.allclose(flow.log_prob(x), log_prob, atol=1e-9)
    assert torch.allclose(flow.decode(flow.encode(x)), x, atol=1e-9)


def test_logistic_noise_has_the_quantiles_of_logistics():
    noise = torch.linspace(-30, 30, 13, dtype=F64)[:, None]
    z = Logistic((1,), 2.0).double().transform_noise(noise, 1.0) / 2
    assert torch.allclose(torch.nn.functional.logsigmoid(z), torch.special.log_ndtr(noise), rtol=1e-12)
