"""The inner functions of Sylvester flows: f(u) = γ s₂ ⊙ tanh(u ⊙ s₁ + t₁) + t₂, strictly autoregressive in s and t.

An inner function is a module whose `forward(u, context)` returns `(f(u), diagonal)`: the value, and the diagonal of its
Jacobian, which must be triangular in some order of the variables and greater than −1.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from expmflow._validation import expect, expect_count, expect_one_of
from expmflow.nn.activations import activation_named
from expmflow.nn.context import check_context, offset
from expmflow.nn.masked import MaskedConv, MaskedLinear, hidden_degrees
from expmflow.nn.precision import network_precision
from expmflow.nn.raster import Activation, RasterStack

HEADS = 4
INITIAL_SCALE = 1e-2
ACTIVATIONS: dict[str, Activation] = {"elu": F.elu, "relu": F.relu}


def gated_tanh(u: Tensor, heads: Tensor, gamma: float, *, dim: int = 1) -> tuple[Tensor, Tensor]:
    """f(u) and its diagonal γ s₂ s₁ (1 − tanh²), from the four heads stacked along the axis `dim`."""
    s1, s2, t1, t2 = heads.chunk(HEADS, dim=dim)
    s1, s2 = torch.tanh(s1), torch.tanh(s2)
    a = torch.tanh(u * s1 + t1)
    return gamma * s2 * a + t2, gamma * s1 * s2 * (1 - a * a)


class ConvInner(nn.Module):
    """The paper's inner function for images: masked convolutions 3×3, 1×1, 3×3 in raster order.

    Args:
        channels: C of the input `(batch, C, *n)`.
        hidden: channels inside.
        gamma: the bound γ of the diagonal.
        lipschitz: the largest norm of each convolution; 1.5 in the paper, None for no constraint.
        activation: between the convolutions, `"elu"`, or `"relu"` as in the paper.
        context_channels: channels of a context `(batch, channels, *n)`, or `(batch, channels)`; 0 for none.
        dims: the number of spatial axes.
    """

    def __init__(
        self,
        channels: int,
        hidden: int,
        *,
        gamma: float = 0.5,
        lipschitz: float | None = None,
        activation: str = "elu",
        context_channels: int = 0,
        dims: int = 2,
    ) -> None:
        super().__init__()
        expect_count(channels, "channels")
        expect_count(hidden, "hidden")
        check_gamma(gamma)
        expect_one_of(activation, ACTIVATIONS, "activation")
        self.gamma = gamma
        self.activation = ACTIVATIONS[activation]
        self.context_channels = context_channels
        own, inside = torch.arange(channels), hidden_degrees(channels, hidden)
        self.first = MaskedConv(own, inside, 3, strict=True, dims=dims, coeff=lipschitz)
        self.middle = MaskedConv(inside, inside, 1, dims=dims, coeff=lipschitz)
        self.last = MaskedConv(inside, own.repeat(HEADS), 3, dims=dims, coeff=lipschitz)
        self.context = nn.Linear(context_channels, hidden) if context_channels else None
        start_near_identity(self.last, channels)

    def forward(self, u: Tensor, context: Any = None) -> tuple[Tensor, Tensor]:
        with network_precision(u.device.type):
            h = self.first(u)
            if self.context is not None:
                h = h + offset(self.context, context, h.ndim)
            h = self.middle(self.activation(h))
            heads = self.last(self.activation(h))
        return gated_tanh(u, heads.to(u.dtype), self.gamma)

    def raster_stack(self, context: Any = None) -> RasterStack:
        """f in the form that the inverse solves row by row: a row depends only on itself and the rows above."""
        axes = self.first.weight.ndim
        layers = self.first, self.middle, self.last
        first, middle, last = (layer.bias.reshape(1, -1, *(1,) * (axes - 2)) for layer in layers)
        if self.context is not None:
            first = first + offset(self.context, context, axes)
        return RasterStack(
            self.first.weight,
            self.middle.weight,
            self.last.weight,
            first,
            middle,
            last,
            activation=self.activation,
            gate=lambda u, heads: gated_tanh(u, heads, self.gamma),
        )

    def check_context(self, context: Any, x: Tensor) -> None:
        """Raise `ValueError` unless `context` fits `x`."""
        check_context(context, x, self.context_channels)


class MADE(nn.Module):
    """A masked network on vectors whose output k sees the features before k (Germain et al., 2015).

    Args:
        features: d.
        hidden: the widths of the hidden layers.
        outputs: outputs per feature, stacked in blocks of d along axis 1.
        context_features: features of a context `(batch, features)`; 0 for none.
        activation: `"elu"`, `"leaky_relu"`, or `"relu"`, which follows sharp edges better.
    """

    def __init__(
        self,
        features: int,
        hidden: Sequence[int],
        outputs: int,
        *,
        context_features: int = 0,
        activation: str = "elu",
    ) -> None:
        super().__init__()
        expect_count(features, "features")
        self.activation = activation_named(activation)
        for width in hidden:
            expect_count(width, "hidden")
        expect(len(hidden) > 0, "at least one hidden layer", "none")
        degrees = [torch.arange(features), *(hidden_degrees(features, width) for width in hidden)]
        self.layers = nn.ModuleList(
            MaskedLinear(before, after, strict=i == 0) for i, (before, after) in enumerate(itertools.pairwise(degrees))
        )
        self.last = MaskedLinear(degrees[-1], degrees[0].repeat(outputs))
        self.context = nn.Linear(context_features, hidden[0]) if context_features else None

    def forward(self, x: Tensor, context: Any = None) -> Tensor:
        for i, layer in enumerate(self.layers):
            x = layer(x)
            if i == 0 and self.context is not None:
                x = x + self.context(context)
            x = self.activation(x)
        return self.last(x)


class DenseInner(nn.Module):
    """The inner function for vectors, by a MADE.

    Args:
        features: d.
        hidden: the width of two hidden layers, or a list of all widths.
        gamma: the bound γ of the diagonal.
        context_features: features of a context `(batch, features)`; 0 for none.
    """

    def __init__(
        self, features: int, hidden: int | Sequence[int], *, gamma: float = 0.5, context_features: int = 0
    ) -> None:
        super().__init__()
        check_gamma(gamma)
        self.gamma = gamma
        self.context_channels = context_features
        widths = (hidden, hidden) if isinstance(hidden, int) else tuple(hidden)
        self.net = MADE(features, widths, HEADS, context_features=context_features)
        start_near_identity(self.net.last, features)

    def forward(self, u: Tensor, context: Any = None) -> tuple[Tensor, Tensor]:
        with network_precision(u.device.type):
            heads = self.net(u, context)
        return gated_tanh(u, heads.to(u.dtype), self.gamma)

    def check_context(self, context: Any, x: Tensor) -> None:
        """Raise `ValueError` unless `context` fits `x`."""
        check_context(context, x, self.context_channels)


def start_near_identity(last: nn.Module, width: int) -> None:
    """Make the heads small, except s₁: with s₁ and s₂ both zero, neither would get a gradient."""
    with torch.no_grad():
        last.parametrizations.weight.original.mul_(INITIAL_SCALE)  # type: ignore[union-attr, operator]
        last.bias[:width].fill_(1.0)  # type: ignore[index]


def check_gamma(gamma: float) -> None:
    expect(0 < gamma < 1, "gamma between 0 and 1", gamma)
