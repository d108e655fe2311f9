"""Periodic convolutions: exact at every frequency, on odd and even sizes, without jitter."""

from __future__ import annotations

import math

import pytest
import torch

import expmflow as ef
from expmflow import transforms as T
from transform_registry import draw, randomise

SIZES = [(1, 1), (1, 4), (2, 2), (3, 4), (4, 3), (5, 5), (6, 2)]


def ready(channels: int, kernel_size: int = 3) -> T.PeriodicConv:
    torch.manual_seed(0)
    layer = T.PeriodicConv(channels, kernel_size).double()
    randomise(layer)
    return layer


@pytest.mark.parametrize("kernel_size", [1, 3, 5])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_it_is_the_circular_convolution(size, kernel_size):
    """The dense matrix, its determinant and its inverse; kernels that go around the torus more than once included."""
    layer, event = ready(2, kernel_size), (2, *size)
    matrix = ef.ConvOperator(layer.kernel.detach(), padding="circular").dense(event)
    x = draw("x", 3, *event)
    z, logdet = layer(x)
    torch.testing.assert_close(z.flatten(1), x.flatten(1) @ matrix.T)
    torch.testing.assert_close(logdet, torch.linalg.slogdet(matrix)[1].expand(3))
    back, _ = layer.inverse(x)
    torch.testing.assert_close(back.flatten(1), x.flatten(1) @ torch.linalg.inv(matrix).T)


@pytest.mark.parametrize("direction", ["forward", "inverse"])
def test_it_commutes_with_shifts(direction):
    run, x = getattr(ready(3), direction), draw("x", 2, 3, 5, 4)
    shifted = run(x.roll((2, -1), (2, 3)))[0]
    torch.testing.assert_close(shifted, run(x)[0].roll((2, -1), (2, 3)))


def test_no_jitter():
    """However small a kernel is, its log-determinant moves by the logarithm of the factor."""
    layer, x = ready(2), draw("x", 1, 2, 4, 4)
    before = layer(x)[1]
    with torch.no_grad():
        layer.kernel.mul_(1e-9)
    torch.testing.assert_close(layer(x)[1], before + 32 * math.log(1e-9))
    torch.testing.assert_close(layer.inverse(layer(x)[0])[0], x)


@torch.no_grad()
@pytest.mark.parametrize("direction", ["forward", "inverse"])
def test_a_kernel_that_loses_a_frequency_is_refused(direction):
    """Differences of neighbours know nothing of the average."""
    layer = T.PeriodicConv(2).double()
    layer.kernel.zero_()
    layer.kernel[:, :, 1, 1] = torch.eye(2)
    layer.kernel[:, :, 1, 2] = -torch.eye(2)
    message = r"^PeriodicConv: Expected a kernel that can be inverted at every frequency; got one that cannot\.$"
    with pytest.raises(ValueError, match=message):
        getattr(layer, direction)(draw("x", 1, 2, 4, 4))


@torch.no_grad()
@pytest.mark.parametrize("channels", [1, 3, 24, 96])
def test_it_starts_near_a_rotation_of_the_channels(channels):
    torch.manual_seed(0)
    layer, x = T.PeriodicConv(channels), torch.randn(4, channels, 4, 4)
    z, logdet = layer(x)
    torch.testing.assert_close(z.norm(), x.norm(), rtol=0.05, atol=0)
    assert (logdet.abs() < 0.05 * x[0].numel()).all()
