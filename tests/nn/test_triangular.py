"""f(u) = R̃ tanh(R u + b): what it is as matrices, and that its diagonal stays within ±1."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from expmflow import nn
from expmflow import transforms as T
from expmflow.distributions.describe import count_parameters
from residual_cases import CASES
from transform_registry import draw, points

F64 = torch.float64
TRIANGULAR = [name for name in CASES if "triangular" in name]


def matrix(layer: nn.MaskedConv, channels: int, size: int) -> torch.Tensor:
    """The convolution as one matrix, rows and columns ordered by point, then by channel."""
    units = torch.eye(channels * size**2, dtype=F64).reshape(-1, size, size, channels).permute(0, 3, 1, 2)
    out = F.conv2d(units, layer.weight, padding=layer.padding)
    return out.permute(0, 2, 3, 1).flatten(1).T


@pytest.mark.parametrize("name", TRIANGULAR)
def test_jacobian_is_triangular_with_the_diagonal_it_declares(name):
    case = CASES.ready(name)
    case.layer.check_inner(points(name, case)[:1], None if case.context is None else case.context[:1])


def test_matrices_are_triangular():
    """Lower in the order of points and channels; with one unit per channel, in the plain sense."""
    inner = nn.TriangularConvInner(2, width=1).double()
    for layer in (inner.first, inner.last):
        dense = matrix(layer, 2, 3)
        assert torch.equal(dense, dense.tril())
        assert (dense.diagonal() != 0).all()


@pytest.mark.parametrize("width", [1, 3])
def test_is_the_formula(width):
    torch.manual_seed(0)
    inner = nn.TriangularConvInner(2, width=width).double()
    with torch.no_grad():
        inner.last.parametrizations.weight.original.normal_()
        inner.first.bias.normal_()
    u = draw("u", 3, 2, 4, 4)
    value, _ = inner(u)
    points = u.permute(0, 2, 3, 1).flatten(1)
    bias = inner.first.bias.repeat(16)
    expected = torch.tanh(points @ matrix(inner.first, 2, 4).T + bias) @ matrix(inner.last, 2 * width, 4).T
    torch.testing.assert_close(value.permute(0, 2, 3, 1).flatten(1), expected)


@pytest.mark.parametrize("width", [1, 2, 7])
@pytest.mark.parametrize("sign", [1, -1])
def test_diagonal_stays_within_one(width, sign):
    """Whatever the weights: here all of them as far out as they go, and tanh where it is steepest."""
    inner = nn.TriangularConvInner(2, width=width, lipschitz=None).double()
    with torch.no_grad():
        inner.first.parametrizations.weight.original.fill_(50.0)
        inner.last.parametrizations.weight.original.fill_(50.0 * sign)
    _, diagonal = inner(torch.zeros(1, 2, 3, 3, dtype=F64))
    torch.testing.assert_close(diagonal, torch.full_like(diagonal, sign * 0.99))


def test_width_matches_the_parameters_of_the_autoregressive_function():
    """So that the ablation can be run at equal size: within 2 %, at the paper's channels and hidden units."""
    for channels in (12, 24):
        target = count_parameters(T.ConvSylvester(channels, 528))
        one, two = (count_parameters(T.TriangularConvSylvester(channels, width)) for width in (1, 2))
        width = 1 + round((target - one) / (two - one))
        found = count_parameters(T.TriangularConvSylvester(channels, width))
        assert abs(found / target - 1) < 0.02


def test_starts_near_the_identity_and_learns_from_there():
    torch.manual_seed(0)
    layer = T.TriangularConvSylvester(3, 2)
    x = torch.randn(4, 3, 4, 4)
    z, logdet = layer(x)
    assert (z - x).abs().max() < 0.2
    (z.square().sum() / 2 - logdet.sum()).backward()
    for name, parameter in layer.named_parameters():
        assert parameter.grad.abs().max() > 0, name


@pytest.mark.parametrize("name", TRIANGULAR)
def test_rows_of_an_image_are_parts_of_the_whole(name):
    """What the inverse solves row by row: handed the true rows one by one, each part gives what f gives there."""
    case = CASES.ready(name)
    u, inner = points(name, case), case.layer.inner
    if inner.first.padding != 1:
        assert inner.raster_stack is None
        return
    stack = inner.raster_stack(case.context)
    value, diagonal = inner(u, case.context)
    torch.testing.assert_close(stack(u), (value, diagonal), rtol=0, atol=1e-13)

    def check(slab, target, i):
        torch.testing.assert_close(slab(target), (value.select(2, i), diagonal.select(2, i)), rtol=0, atol=1e-13)
        return target

    assert torch.equal(torch.stack(list(stack.substitute(u, check)), dim=2), u)


@pytest.mark.parametrize("size", [1.0, 3.0])
def test_inverse_needs_no_norm_constraint(size):
    """At a size where a contraction is out of the question."""
    torch.manual_seed(0)
    layer = T.TriangularConvSylvester(4, 8).double().eval()
    with torch.no_grad():
        for conv in (layer.inner.first, layer.inner.last):
            conv.parametrizations.weight.original.normal_(std=size * conv.weight[0].numel() ** -0.5)
        x = draw("x", 3, 4, 8, 8)
        back, _ = layer.inverse(layer(x)[0])
    torch.testing.assert_close(back, x, rtol=0, atol=1e-9)
