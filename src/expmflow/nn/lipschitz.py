"""Networks with a known Lipschitz constant, for residual blocks."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize

from expmflow._validation import expect, expect_count
from expmflow.nn.constraints import constrain
from expmflow.nn.context import check_context, offset
from expmflow.nn.spectral import SpectralConstraint
from expmflow.nn.swish import lip_swish

CONVOLUTIONS: dict[int, Callable[..., nn.Module]] = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
WEIGHTED = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Linear)
MOVING = (nn.Flatten, nn.Unflatten, nn.PixelShuffle, nn.PixelUnshuffle)
NOT_EXPANDING = (nn.Identity, nn.ReLU, nn.Tanh, nn.Sigmoid, nn.Softplus, *MOVING)


class LipSwish(nn.Module):
    """x · σ(βx) / 1.1, whose slope stays within ±1 for every β > 0 (Chen et al., 2019).

    β = softplus of a parameter that starts at 0.5.

    Example:
        >>> expmflow.nn.LipSwish()(torch.zeros(2))
        tensor([0., 0.], grad_fn=...)
    """

    def __init__(self) -> None:
        super().__init__()
        self.sharpness = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        least = torch.finfo(x.dtype).tiny ** 0.5  # below this the function is x / 2.2; β = 0 would give 0 / 0
        return lip_swish(x, F.softplus(self.sharpness).clamp_min(least))

    def lipschitz_bound(self) -> float:
        return 1.0


class LipschitzConvNet(nn.Module):
    """The paper's network inside residual blocks: convolutions 3×3, 1×1, 3×3 with LipSwish between them.

    The block around it (`T.ResidualBlock`) constrains its norms.

    Args:
        channels: C of the input and output `(batch, C, *n)`.
        hidden: channels inside.
        kernel_sizes: of the convolutions, odd.
        context_channels: channels of a context `(batch, channels, *n)`, or `(batch, channels)`; 0 for none. It is added
            after the first convolution, and does not change the Lipschitz constant in x.
        dims: the number of spatial axes.

    Example:
        >>> expmflow.nn.LipschitzConvNet(4, hidden=16)(torch.randn(2, 4, 8, 8)).shape
        torch.Size([2, 4, 8, 8])
    """

    def __init__(
        self,
        channels: int,
        hidden: int,
        *,
        kernel_sizes: Sequence[int] = (3, 1, 3),
        context_channels: int = 0,
        dims: int = 2,
    ) -> None:
        super().__init__()
        expect_count(channels, "channels")
        expect_count(hidden, "hidden")
        expect(len(kernel_sizes) > 1, "at least two convolutions", len(kernel_sizes))
        for size in kernel_sizes:
            expect(size % 2 == 1, "odd kernel_sizes", tuple(kernel_sizes))
        widths = [channels, *(hidden,) * (len(kernel_sizes) - 1), channels]
        self.chain = _alternating(
            CONVOLUTIONS[dims](a, b, size, padding=size // 2)
            for (a, b), size in zip(itertools.pairwise(widths), kernel_sizes, strict=True)
        )
        self.context_channels = context_channels
        self.context = nn.Linear(context_channels, hidden) if context_channels else None

    def forward(self, x: Tensor, context: Any = None) -> Tensor:
        return _through(self.chain, x, self.context, context)

    def check_context(self, context: Any, x: Tensor) -> None:
        """Raise `ValueError` unless `context` fits `x`."""
        check_context(context, x, self.context_channels)


class LipschitzMLP(nn.Module):
    """Linear maps with LipSwish between them, for residual blocks on vectors `(batch, features)`.

    Args:
        features: of the input and output.
        hidden: the widths of the hidden layers.
        context_features: features of a context `(batch, features)`; 0 for none.

    Example:
        >>> expmflow.nn.LipschitzMLP(3, hidden=(16, 16))(torch.randn(5, 3)).shape
        torch.Size([5, 3])
    """

    def __init__(self, features: int, hidden: Sequence[int] = (64, 64), *, context_features: int = 0) -> None:
        super().__init__()
        expect_count(features, "features")
        expect(len(hidden) > 0, "at least one hidden layer", "none")
        for width in hidden:
            expect_count(width, "hidden")
        self.chain = _alternating(nn.Linear(a, b) for a, b in itertools.pairwise([features, *hidden, features]))
        self.context_channels = context_features
        self.context = nn.Linear(context_features, hidden[0]) if context_features else None

    def forward(self, x: Tensor, context: Any = None) -> Tensor:
        return _through(self.chain, x, self.context, context)

    def check_context(self, context: Any, x: Tensor) -> None:
        """Raise `ValueError` unless `context` fits `x`."""
        check_context(context, x, self.context_channels)


def _alternating(layers: Iterator[nn.Module]) -> nn.Sequential:
    """The layers with activations in between."""
    first, *rest = layers
    return nn.Sequential(first, *(part for layer in rest for part in (LipSwish(), layer)))


def _through(chain: nn.Sequential, x: Tensor, linear: nn.Linear | None, context: Any) -> Tensor:
    x = chain[0](x)
    if linear is not None:
        x = x + offset(linear, context, x.ndim)
    for layer in list(chain)[1:]:
        x = layer(x)
    return x


def constrain_lipschitz(net: nn.Module, coeff: float) -> list[nn.Module]:
    """Constrain the weights of `net` so that its Lipschitz constant is at most `coeff`; returns the layers with
    weights.

    The parts of `net` must be applied in sequence: an `nn.Sequential`, or the parts that the network lists in `chain`.
    Convolutions and linear maps get a `SpectralConstraint` each, all with the same norm, whose product is `coeff`.
    Every other part must be an activation with a Lipschitz constant of at most one (ReLU, ELU, LeakyReLU, Tanh,
    Sigmoid, Softplus, LipSwish), or only move entries, or state a constant that holds for all weights in a method
    `lipschitz_bound()`.
    """
    expect(0 < coeff < 1, "coeff between 0 and 1", coeff)
    parts = list(_parts(net))
    weighted: list[nn.Module] = [part for part in parts if isinstance(part, WEIGHTED)]
    rest = math.prod(_stated_bound(part) for part in parts if not isinstance(part, WEIGHTED))
    if not weighted:
        expect(rest <= coeff, f"a network with a Lipschitz constant of at most {coeff:g}", f"{rest:g}")
    for part in weighted:
        new = not parametrize.is_parametrized(part, "weight")
        expect(new, "a network whose weights are not constrained yet", f"{part} in another block")
        _check_convolution(part)
        limit = (coeff / rest) ** (1 / len(weighted))
        constrain(part, "weight", SpectralConstraint(part.weight, limit, groups=getattr(part, "groups", 1)))  # type: ignore[arg-type]
    return weighted


@torch.no_grad()
def lipschitz_bound(net: nn.Module) -> float:
    """A certified bound on the Lipschitz constant of a network that `constrain_lipschitz` accepts.

    The product of the largest singular values of its weights over all frequencies, and of the constants that the other
    parts state. Costs an eigenvalue problem per frequency: for checks, not for training.
    """
    bounds = []
    for part in _parts(net):
        if isinstance(part, WEIGHTED):
            *_, constraint = part.parametrizations["weight"]  # type: ignore[index]
            bounds.append(constraint.norm_bound(part.weight))
        else:
            bounds.append(_stated_bound(part))
    return math.prod(bounds)


def shape_at_weights(net: nn.Module, event_shape: tuple[int, ...]) -> tuple[int, ...] | None:
    """The shape of an event at the first layer with weights; None if an earlier part does not state its output."""
    shape = event_shape
    for part in _parts(net):
        if isinstance(part, WEIGHTED):
            return shape
        if isinstance(part, MOVING):
            try:
                shape = tuple(part(torch.empty(1, *shape, device="meta")).shape[1:])
            except RuntimeError:
                expect(False, f"events that {part} can move", shape)
        elif not isinstance(part, (*NOT_EXPANDING, nn.LeakyReLU, nn.ELU, LipSwish)):
            return None
    return None


def _parts(net: nn.Module) -> Iterator[nn.Module]:
    """The parts of the network, in the order in which they are applied."""
    chain = getattr(net, "chain", net)
    if isinstance(chain, nn.Sequential):
        for part in chain:
            yield from _parts(part)
    else:
        yield chain


def _stated_bound(part: nn.Module) -> float:
    if isinstance(part, NOT_EXPANDING):
        return 1.0
    if isinstance(part, nn.LeakyReLU):
        return max(1.0, abs(part.negative_slope))
    if isinstance(part, nn.ELU):
        return max(1.0, abs(part.alpha))
    stated = getattr(part, "lipschitz_bound", None)
    expect(
        callable(stated),
        "a network of convolutions, linear maps, activations that do not expand, and parts with a lipschitz_bound()",
        type(part).__name__,
    )
    return float(stated())  # type: ignore[misc]


def _check_convolution(part: nn.Module) -> None:
    """Refuse padding that repeats entries, which would make the norm larger than that of the kernel."""
    if isinstance(part, nn.Conv1d | nn.Conv2d | nn.Conv3d):
        plain = part.padding_mode in ("zeros", "circular")
        expect(plain, "convolutions with padding_mode zeros or circular", part.padding_mode)
        if part.padding_mode == "circular" and not isinstance(part.padding, str):
            axes = zip(part.padding, part.dilation, part.kernel_size, strict=True)
            once = all(2 * padding <= dilation * (size - 1) for padding, dilation, size in axes)
            expect(once, "circular padding that keeps the size of images at most", part.padding)
