"""Masked maps: outputs that depend only on earlier entries."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize

from expmflow._validation import expect, expect_count
from expmflow.nn.constraints import constrain, update_constraint
from expmflow.nn.spectral import SpectralConstraint

_CONV: dict[int, Callable[..., Tensor]] = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}


def hidden_degrees(features: int, hidden: int) -> Tensor:
    """For each hidden unit, how many features it may see: 0 … features − 1, evenly.

    If there are fewer units than features, their degrees are spread over the whole range.
    """
    units = torch.arange(hidden)
    return units % features if hidden >= features else units * features // hidden


class MaskedConv(nn.Module):
    """A convolution in raster order: it sees all channels of earlier points, and lower degrees of its own point.

    Args:
        in_degrees, out_degrees: one integer per channel. At the kernel's centre an output sees the inputs whose degree
            is at most its own; less than its own if `strict`.
        kernel_size: odd, the same along each of `dims` axes.
        strict: see above.
        dims: the number of spatial axes, 1 to 3.
        coeff: the largest norm of the masked kernel; None for no constraint.
        diagonal_limit: centre entries between equal degrees are tanh(·) times this; None leaves them free.
        bias: whether there is one.
    """

    weight: Tensor
    bias: Tensor  # or None, as in torch

    def __init__(
        self,
        in_degrees: Tensor,
        out_degrees: Tensor,
        kernel_size: int,
        *,
        strict: bool = False,
        dims: int = 2,
        coeff: float | None = None,
        diagonal_limit: float | None = None,
        bias: bool = True,
    ) -> None:
        super().__init__()
        expect_count(kernel_size, "kernel_size")
        expect(kernel_size % 2 == 1, "an odd kernel_size", kernel_size)
        self.dims = dims
        self.padding = kernel_size // 2
        shape = (len(out_degrees), len(in_degrees), *(kernel_size,) * dims)
        mask = raster_mask(in_degrees, out_degrees, shape[2:], strict)
        scale = mask.sum().div(len(out_degrees)).clamp_min(1).rsqrt()
        self.weight = nn.Parameter(torch.randn(shape) * scale)
        self.register_parameter("bias", nn.Parameter(torch.zeros(len(out_degrees))) if bias else None)
        parametrize.register_parametrization(self, "weight", Mask(mask))
        if diagonal_limit is not None:
            diagonal = mask - raster_mask(in_degrees, out_degrees, shape[2:], True) > 0
            parametrize.register_parametrization(self, "weight", BoundedDiagonal(diagonal, diagonal_limit))
        self.constrained = coeff is not None
        if coeff is not None:
            constrain(self, "weight", SpectralConstraint(self.weight, coeff, samples_per_degree=8))

    def forward(self, x: Tensor) -> Tensor:
        if self.training and self.constrained:
            update_constraint(self, "weight", tuple(x.shape[1:]))
        if self.padding == 0:
            return _CONV[self.dims](x, self.weight, self.bias)
        kernel = self.weight[:, :, : self.padding + 1]  # later slabs of the kernel are masked: a third less work
        return _CONV[self.dims](x, kernel, self.bias, padding=self.padding)[:, :, : x.shape[2]]


class MaskedLinear(nn.Module):
    """A linear map of the last axis whose outputs see the inputs of at most their own degree (less if `strict`)."""

    weight: Tensor
    bias: Tensor  # or None, as in torch

    def __init__(self, in_degrees: Tensor, out_degrees: Tensor, *, strict: bool = False, bias: bool = True) -> None:
        super().__init__()
        mask = raster_mask(in_degrees, out_degrees, (), strict)
        scale = mask.sum().div(len(out_degrees)).clamp_min(1).rsqrt()
        self.weight = nn.Parameter(torch.randn(len(out_degrees), len(in_degrees)) * scale)
        self.register_parameter("bias", nn.Parameter(torch.zeros(len(out_degrees))) if bias else None)
        parametrize.register_parametrization(self, "weight", Mask(mask))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class Mask(nn.Module):
    """weight ⊙ mask, as a parametrization."""

    mask: Tensor

    def __init__(self, mask: Tensor) -> None:
        super().__init__()
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, weight: Tensor) -> Tensor:
        return weight * self.mask


class BoundedDiagonal(nn.Module):
    """tanh(weight) · limit where `diagonal` is true, as a parametrization."""

    diagonal: Tensor

    def __init__(self, diagonal: Tensor, limit: float) -> None:
        super().__init__()
        self.limit = limit
        self.register_buffer("diagonal", diagonal, persistent=False)

    def forward(self, weight: Tensor) -> Tensor:
        return torch.where(self.diagonal, self.limit * torch.tanh(weight), weight)


def raster_mask(in_degrees: Tensor, out_degrees: Tensor, kernel_size: Sequence[int], strict: bool) -> Tensor:
    """1 where an output may see an input: `(out, in, *kernel_size)`."""
    size = torch.Size(kernel_size).numel()
    mask = torch.zeros(len(out_degrees), len(in_degrees), size)
    mask[:, :, : size // 2] = 1
    below = out_degrees[:, None] > in_degrees if strict else out_degrees[:, None] >= in_degrees
    mask[:, :, size // 2] = below.to(mask)
    return mask.reshape(len(out_degrees), len(in_degrees), *kernel_size)
