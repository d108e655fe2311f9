"""Densities are densities: they integrate to one, and are what closed forms say."""

from __future__ import annotations

import math

import pytest
import torch

import expmflow as ef
from expmflow import distributions as D
from expmflow import nn
from expmflow import transforms as T
from transform_registry import draw, randomise, settle

F64 = torch.float64


def coupling(context: int = 0) -> T.AffineCoupling:
    return T.AffineCoupling(nn.MLP(1, 2, hidden=(8,), activation="elu", context_features=context), 2)


LAYERS = {
    "actnorm": lambda: [T.ActNorm(2)],
    "linear-exp": lambda: [T.LinearExp(2)],
    "dense-sylvester": lambda: [T.DenseSylvester(2, 8)],
    "coupling": lambda: [coupling(), T.Flip(), coupling()],
    "inverse": lambda: [T.Inverse(T.DenseSylvester(2, 8)), T.Conv1x1(2)],
    "all": lambda: [T.ActNorm(2), T.LinearExp(2), T.DenseSylvester(2, 8), T.Flip(), coupling()],
    "context": lambda: [T.DenseSylvester(2, 8, context_features=3), coupling(3)],
}
BASES = {"standard": D.StandardNormal, "diagonal": D.DiagonalGaussian}


def flow(layers: str, base: str) -> ef.Flow:
    torch.manual_seed(0)
    made = ef.Flow(T.Chain(LAYERS[layers]()), BASES[base]((2,))).double()
    randomise(made)
    settle(made.transform, draw("warm-up", 16, 2), draw("warm-up context", 16, 3))
    return made.eval()


def context(layers: str, rows: int) -> torch.Tensor | None:
    """The same for all rows, for layers that take one."""
    return draw("one context", 1, 3).expand(rows, 3) if layers == "context" else None


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("layers", LAYERS)
def test_integrates_to_one(layers, base):
    """On a grid, where the trapezoidal rule of a smooth density that has died out at the edges is as good as exact."""
    made = flow(layers, base)
    with torch.no_grad():
        noise = torch.cartesian_prod(*[torch.linspace(-8, 8, 61, dtype=F64)] * 2)
        latents = made.base.rsample(len(noise), noise=noise)
        reach = made.decode(latents, context(layers, len(latents))).abs().amax(0)
        axes = [torch.linspace(-float(r), float(r), 601, dtype=F64) for r in reach]
        grid = torch.cartesian_prod(*axes)
        density = made.log_prob(grid, context(layers, len(grid))).exp()
    cell = float(axes[0][1] - axes[0][0]) * float(axes[1][1] - axes[1][0])
    assert float(density.sum()) * cell == pytest.approx(1, abs=1e-4)


def test_a_logistic_density_is_the_slope_of_its_distribution_function():
    z = torch.linspace(-9, 9, 19, dtype=F64, requires_grad=True)
    (slope,) = torch.autograd.grad(torch.sigmoid(z / 0.7).sum(), z)
    torch.testing.assert_close(D.Logistic((1,), 0.7).log_prob(z[:, None]), slope.log())


def test_a_logistic_can_be_drawn_in_half_precision():
    noise = torch.linspace(-3, 3, 7)[:, None]
    base, wide = (D.Logistic((1,)).to(dtype).rsample(7, noise=noise.to(dtype)) for dtype in (torch.bfloat16, F64))
    assert base.dtype == torch.bfloat16
    torch.testing.assert_close(base.double(), wide, rtol=0.01, atol=0)


def test_a_linear_flow_is_a_gaussian():
    """z = exp(M)x ~ N(0, I) means x ~ N(0, exp(−M) exp(−M)ᵀ)."""
    made = flow("linear-exp", "standard")
    back = torch.matrix_exp(-made.transform.layers[0].weight.detach())
    gaussian = torch.distributions.MultivariateNormal(torch.zeros(2, dtype=F64), back @ back.T)
    x = draw("x", 20, 2)
    torch.testing.assert_close(made.log_prob(x).detach(), gaussian.log_prob(x), rtol=0, atol=1e-12)


def test_bases_are_gaussians():
    z = draw("z", 6, 2, 3)
    normal = torch.distributions.Normal(torch.zeros(2, 3, dtype=F64), 1.0)
    torch.testing.assert_close(D.StandardNormal((2, 3)).log_prob(z), normal.log_prob(z).sum((1, 2)))
    base = D.DiagonalGaussian((2, 3)).double()
    randomise(base)
    normal = torch.distributions.Normal(base.mean, base.log_std.exp())
    torch.testing.assert_close(base.log_prob(z), normal.log_prob(z).sum((1, 2)))
    torch.testing.assert_close(base.rsample(6, noise=z), base.mean + base.log_std.exp() * z)
    torch.testing.assert_close(base.rsample(6, noise=z, temperature=0.5), base.mean + 0.5 * base.log_std.exp() * z)


@pytest.mark.parametrize("layers", LAYERS)
def test_samples_have_the_density(layers):
    """E[1/p] over samples inside a box is the box's area, whatever the density."""
    made = flow(layers, "standard")
    torch.manual_seed(3)
    n = 40_000
    with torch.no_grad():
        x, log_prob = made.sample_and_log_prob(n, context(layers, n))
        centre, half = x.mean(0), 0.5 * x.std(0)
        inside = ((x - centre).abs() < half).all(1)
    estimates = torch.where(inside, (-log_prob).exp(), 0.0)
    area = float(4 * half.prod())
    error = float(estimates.std()) / math.sqrt(n)
    assert float(estimates.mean()) == pytest.approx(area, abs=4.5 * error)
    assert error < 0.05 * area


def test_shapes_that_do_not_fit_the_base_are_refused():
    """A base of two entries would otherwise be stretched over one."""
    made = ef.Flow(T.Flip(), D.DiagonalGaussian((2,)))
    with pytest.raises(ValueError, match=r"Expected latents of shape \(batch, \*\(2,\)\); got events \(1,\)"):
        made.log_prob(torch.zeros(3, 1))
