"""Woodbury transformations: channels and points mixed by the identity plus a matrix of low rank."""

from __future__ import annotations

from typing import Any, final

import torch
from torch import Tensor, nn

from expmflow._transformed import transformed
from expmflow._validation import expect, expect_count
from expmflow.numerics.regular import is_regular
from expmflow.transforms.base import Output, Transform, expanded
from expmflow.transforms.conv1x1 import mix

INITIAL_NORM = 0.1  # approximate norm of each initial factor


@final
class Woodbury(Transform):
    """z = (I + U_c V_c) x (I + U_s V_s)ᵀ for images as `(C, h·w)` matrices (Lu and Huang, 2020).

    The log-determinant is h·w·log |det(I + V_c U_c)| + C·log |det(I + V_s U_s)|, by Sylvester's identity. The inverse
    of each factor is I − U (I + V U)⁻¹ V, by Woodbury's. So determinants and inverses are of matrices of the size of
    the rank, or of I + U V itself where that is no larger. Both directions take 2·rank products per entry for the
    points; no matrix of (h·w)² entries is formed unless the rank is at least h·w. The image size is part of the layer,
    since every point has weights of its own.

    The paper's comparison with the convolution exponential has a 1×1 instead of the first factor: `Conv1x1(channels)`
    followed by `Woodbury(channels, height, width, channel_rank=0, spatial_rank=24)`.

    Args:
        channels: C.
        height, width: of the images.
        channel_rank: the rank of U_c V_c; 0 for no mixing of channels.
        spatial_rank: the rank of U_s V_s; 0 for no mixing of points.

    Example:
        >>> layer = T.Woodbury(3, 8, 8, channel_rank=2, spatial_rank=4)
        >>> z, logdet = layer(torch.randn(2, 3, 8, 8))
        >>> x, _ = layer.inverse(z)
    """

    def __init__(self, channels: int, height: int, width: int, channel_rank: int, spatial_rank: int) -> None:
        super().__init__()
        for name, value in (("channels", channels), ("height", height), ("width", width)):
            expect_count(value, name)
        expect_count(channel_rank, "channel_rank", at_least=0)
        expect_count(spatial_rank, "spatial_rank", at_least=0)
        expect(channel_rank + spatial_rank > 0, "a channel_rank or a spatial_rank of at least 1", "0 for both")
        self.event_shape = (channels, height, width)
        self.over_channels = LowRank(channels, channel_rank) if channel_rank else None
        self.over_points = LowRank(height * width, spatial_rank) if spatial_rank else None

    def check_event_shape(self, event_shape: tuple[int, ...]) -> None:
        expect(event_shape == self.event_shape, f"events of shape {self.event_shape}", event_shape)

    def _forward(self, x: Tensor, context: Any) -> Output:
        z, logdet = x, x.new_zeros(())
        if self.over_channels is not None:
            u, v = self.over_channels.u, self.over_channels.v
            logdet = logdet + self._log_abs_det(u, v) * x.shape[2:].numel()
            z = mix(z, _factor(u, v), 1)
        if self.over_points is not None:
            u, v = self.over_points.u, self.over_points.v
            logdet = logdet + self._log_abs_det(u, v) * x.shape[1]
            z = _mix_points(z, u, v)
        return z, expanded(logdet, x)

    def _inverse(self, z: Tensor, context: Any) -> Output:
        x, logdet = z, z.new_zeros(())
        if self.over_points is not None:
            u, v = self.over_points.u, self.over_points.v
            logdet = logdet - self._log_abs_det(u, v) * z.shape[1]
            x = _mix_points(x, -u, _solve_core(u, v)) if _is_low(u) else _each_row(x, torch.linalg.inv(_factor(u, v)))
        if self.over_channels is not None:
            u, v = self.over_channels.u, self.over_channels.v
            logdet = logdet - self._log_abs_det(u, v) * z.shape[2:].numel()
            x = mix(x, _factor(-u, _solve_core(u, v)) if _is_low(u) else torch.linalg.inv(_factor(u, v)), 1)
        return x, expanded(logdet, z)

    def _log_abs_det(self, u: Tensor, v: Tensor) -> Tensor:
        """log |det(I + U V)|."""
        left, right = (v, u) if _is_low(u) else (u, v)  # either order has the same determinant
        core = _factor(left, right)
        scale = 1 + (left.detach().abs() @ right.detach().abs()).sum(1)
        self._expect(is_regular(core, scale), "a core I + V U that can be inverted", "a singular one")
        return torch.linalg.slogdet(core)[1]


@final
class LowRank(nn.Module):
    """U `(size, rank)` and V `(rank, size)`, initialised with a small product."""

    def __init__(self, size: int, rank: int) -> None:
        super().__init__()
        std = INITIAL_NORM / (size**0.5 + rank**0.5)
        self.u = nn.Parameter(torch.randn(size, rank) * std)
        self.v = nn.Parameter(torch.randn(rank, size) * std)


def _is_low(u: Tensor) -> bool:
    """Whether I + V U is smaller than I + U V; if not, the identities would only cost work and digits."""
    return u.shape[1] < u.shape[0]


def _factor(u: Tensor, v: Tensor) -> Tensor:
    """I + U V."""
    return u @ v + torch.eye(u.shape[0], dtype=u.dtype, device=u.device)


def _solve_core(u: Tensor, v: Tensor) -> Tensor:
    """(I + V U)⁻¹ V."""
    return torch.linalg.solve(_factor(v, u), v)


def _each_row(x: Tensor, matrix: Tensor) -> Tensor:
    """A matrix applied to the points of each channel."""
    return (x.flatten(2) @ matrix.T).reshape(x.shape)


def _mix_points(x: Tensor, u: Tensor, v: Tensor) -> Tensor:
    """x (I + U V)ᵀ over the points of `(batch, channels, height, width)`, for any memory layout."""
    if not transformed(x) and x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous():
        points = x.permute(0, 2, 3, 1).flatten(1, 2)
        z = points + u @ (v @ points)
        return z.unflatten(1, x.shape[2:]).permute(0, 3, 1, 2)
    rows = x.flatten(2).flatten(0, 1)
    return torch.addmm(rows, rows @ v.T, u.T).reshape(x.shape)
