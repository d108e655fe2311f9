"""Woodbury transformations: the identities of Woodbury and Sylvester, and cores that are singular."""

from __future__ import annotations

import pytest
import torch

from expmflow import transforms as T
from transform_registry import draw, randomise

F64 = torch.float64
SHAPES = [((2, 3, 4), 1, 3), ((4, 2, 2), 2, 0), ((3, 2, 3), 0, 4), ((2, 2, 2), 5, 9)]


def ready(event, channel_rank, spatial_rank) -> T.Woodbury:
    torch.manual_seed(0)
    layer = T.Woodbury(*event, channel_rank, spatial_rank).double()
    randomise(layer)
    return layer


def dense(part, size) -> torch.Tensor:
    identity = torch.eye(size, dtype=F64)
    return identity if part is None else identity + part.u.detach() @ part.v.detach()


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize(("event", "channel_rank", "spatial_rank"), SHAPES)
def test_it_is_a_product_of_two_matrices(event, channel_rank, spatial_rank, layout):
    """log |det| of the Kronecker product by Sylvester's identity, its inverse by Woodbury's."""
    layer, x = ready(event, channel_rank, spatial_rank), draw("x", 3, *event)
    channels, points = event[0], event[1] * event[2]
    over_channels, over_points = dense(layer.over_channels, channels), dense(layer.over_points, points)
    matrix = torch.kron(over_channels, over_points)
    z, logdet = layer(x.contiguous(memory_format=layout))
    torch.testing.assert_close(z.flatten(1), x.flatten(1) @ matrix.T)
    torch.testing.assert_close(logdet, torch.linalg.slogdet(matrix)[1].expand(3))
    back, _ = layer.inverse(x.contiguous(memory_format=layout))
    torch.testing.assert_close(back.flatten(1), x.flatten(1) @ torch.linalg.inv(matrix).T)


@torch.no_grad()
@pytest.mark.parametrize("direction", ["forward", "inverse"])
@pytest.mark.parametrize("part", ["over_channels", "over_points"])
@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_a_singular_core_is_refused(part, direction, dtype):
    """I + U V maps the first column of U to zero: exactly, and but for rounding."""
    layer = ready((3, 2, 2), 2, 2).to(dtype)
    low_rank, x = getattr(layer, part), draw("x", 2, 3, 2, 2).to(dtype)
    size = low_rank.u.shape[0]
    for number in range(20):
        column = torch.eye(size)[0] if number == 0 else draw(f"column {number}", size)
        column = column.to(dtype)
        low_rank.u[:, 0] = column
        low_rank.v[0] = -column / column.square().sum()
        low_rank.v[1] -= (low_rank.v[1] @ column) * column / column.square().sum()
        with pytest.raises(ValueError, match=r"^Woodbury: Expected a core I \+ V U .*; got a singular one\.$"):
            getattr(layer, direction)(x)


@torch.no_grad()
def test_a_core_that_is_only_small_is_not_refused():
    layer = T.Woodbury(2, 1, 2, 2, 0).double()
    layer.over_channels.u.copy_(torch.diag(torch.tensor([-1 + 1e-9, 1e3], dtype=F64)))
    layer.over_channels.v.copy_(torch.eye(2))
    x = draw("x", 3, 2, 1, 2)
    z, logdet = layer(x)
    torch.testing.assert_close(logdet, 2 * torch.tensor(1e-9 * 1001, dtype=F64).log().expand(3))
    torch.testing.assert_close(layer.inverse(z)[0], x, rtol=0, atol=1e-6)


@torch.no_grad()
@pytest.mark.parametrize(("channel_rank", "spatial_rank"), [(0, 24), (0, 16), (12, 0), (24, 0)])
def test_full_ranks_keep_the_digits_of_the_matrix(channel_rank, spatial_rank):
    """By the identities, weights this large would leave three digits, or be refused as singular."""
    torch.manual_seed(0)
    layer = T.Woodbury(12, 4, 4, channel_rank, spatial_rank)
    for parameter in layer.parameters():
        parameter.copy_(30 * torch.randn_like(parameter))
    part = layer.over_channels or layer.over_points
    matrix = torch.eye(len(part.u), dtype=F64) + part.u.double() @ part.v.double()
    x = torch.randn(2, 12, 4, 4)
    z, logdet = layer(x)
    copies = x[0].numel() / len(matrix)
    torch.testing.assert_close(logdet.double(), copies * torch.linalg.slogdet(matrix)[1].expand(2), rtol=1e-5, atol=0)
    rounding = 1e-6 * float(torch.linalg.cond(matrix))
    torch.testing.assert_close(layer.inverse(z)[0], x, rtol=0, atol=rounding)


@pytest.mark.parametrize(("event", "expected"), [((12, 16, 16), 12_288), ((24, 8, 8), 3_072)])
def test_parameters_of_the_comparison(event, expected):
    assert sum(p.numel() for p in T.Woodbury(*event, 0, 24).parameters()) == expected


@torch.no_grad()
@pytest.mark.parametrize("event", [(1, 1, 1), (3, 2, 2), (12, 16, 16), (96, 4, 4)], ids=str)
def test_it_starts_near_the_identity(event):
    torch.manual_seed(0)
    layer, x = T.Woodbury(*event, 24, 24), torch.randn(4, *event)
    z, logdet = layer(x)
    assert 0 < (z - x).norm() < 0.1 * x.norm()
    assert (logdet.abs() < 0.01 * x[0].numel()).all()
