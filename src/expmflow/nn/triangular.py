"""The inner function of the original Sylvester flow, with convolutions: f(u) = R̃ tanh(R u + b)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from expmflow._validation import expect_count
from expmflow.nn.autoregressive import INITIAL_SCALE
from expmflow.nn.context import check_context, offset
from expmflow.nn.masked import MaskedConv
from expmflow.nn.raster import RasterStack

LARGEST_DIAGONAL = 0.99  # below one by more than rounding, because a tanh may reach its limit


class TriangularConvInner(nn.Module):
    """f(u) = R̃ tanh(R u + b), with triangular convolutions in raster order.

    R has `width` outputs for each channel and R̃ as many inputs. In that order both are block-triangular, and so is the
    Jacobian of f, whose diagonal is Σ_j R̃_cj tanh′(·)_j R_jc over the `width` units j of a channel c. Those entries
    of R and R̃ are tanh(·) √(0.99/width), so the diagonal stays within ±0.99. The paper's ablation has width 1; a
    larger width matches the number of parameters of f_AR.

    Args:
        channels: C of the input `(batch, C, *n)`.
        kernel_size: of both convolutions, odd.
        width: hidden units per channel.
        lipschitz: the largest norm of each convolution; None for no constraint, as in the paper.
        context_channels: channels of a context `(batch, channels, *n)`, or `(batch, channels)`, added to b; 0 for none.
        dims: the number of spatial axes.

    Example:
        >>> value, diagonal = expmflow.nn.TriangularConvInner(3, width=4)(torch.randn(2, 3, 8, 8))
    """

    def __init__(
        self,
        channels: int,
        *,
        kernel_size: int = 3,
        width: int = 1,
        lipschitz: float | None = None,
        context_channels: int = 0,
        dims: int = 2,
    ) -> None:
        super().__init__()
        expect_count(channels, "channels")
        expect_count(width, "width")
        self.channels, self.width = channels, width
        self.context_channels = context_channels
        own, inside = torch.arange(channels), torch.arange(channels).repeat(width)
        limit = (LARGEST_DIAGONAL / width) ** 0.5
        self.first = MaskedConv(own, inside, kernel_size, dims=dims, coeff=lipschitz, diagonal_limit=limit)
        self.last = MaskedConv(inside, own, kernel_size, dims=dims, coeff=lipschitz, diagonal_limit=limit, bias=False)
        self.context = nn.Linear(context_channels, channels * width) if context_channels else None
        with torch.no_grad():  # near the identity, but not at it, where R would get no gradient
            self.last.parametrizations.weight.original.mul_(INITIAL_SCALE)  # type: ignore[union-attr, operator]

    def forward(self, u: Tensor, context: Any = None) -> tuple[Tensor, Tensor]:
        h = self.first(u)
        if self.context is not None:
            h = h + offset(self.context, context, h.ndim)
        a = torch.tanh(h)
        return self.last(a), _diagonal(a, self._products())

    @property
    def raster_stack(self) -> Callable[[Any], RasterStack] | None:
        """f in the form that the inverse solves row by row; None for kernels that are not three wide."""
        return self._raster_stack if self.first.padding == 1 else None

    def _raster_stack(self, context: Any = None) -> RasterStack:
        axes, products = self.first.weight.ndim, self._products()
        first = self.first.bias.reshape(1, -1, *(1,) * (axes - 2))
        if self.context is not None:
            first = first + offset(self.context, context, axes)
        last = first.new_zeros(1, self.channels, *(1,) * (axes - 2))
        return RasterStack(
            self.first.weight,
            None,
            self.last.weight,
            first,
            None,
            last,
            activation=torch.tanh,
            diagonal=lambda a: _diagonal(a, products),
        )

    def _products(self) -> Tensor:
        """`(width, channels)`: R̃_cj R_jc at the kernel's centre, for the units j of each channel c."""
        shape = (self.width, self.channels, self.channels)
        first = _centre(self.first.weight).reshape(shape)  # unit, channel
        last = _centre(self.last.weight).T.reshape(shape)
        return (first * last).diagonal(dim1=1, dim2=2)

    def check_context(self, context: Any, x: Tensor) -> None:
        """Raise `ValueError` unless `context` fits `x`."""
        check_context(context, x, self.context_channels)


def _diagonal(a: Tensor, products: Tensor) -> Tensor:
    """Σ_j R̃_cj (1 − a_j²) R_jc over the units j of each channel c."""
    return torch.einsum("bmc...,mc->bc...", (1 - a * a).unflatten(1, products.shape), products)


def _centre(kernel: Tensor) -> Tensor:
    """The matrix at the middle tap."""
    taps = kernel.flatten(2)
    return taps[:, :, taps.shape[2] // 2]
