"""Layers with parameters of their own, or with parameters for each sample from a context, as from a VAE's encoder."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, final

from torch import Tensor, nn

from expmflow._validation import expect, expect_count, expect_type
from expmflow.numerics import ConvergenceError
from expmflow.numerics.roots import tanh_root
from expmflow.transforms.base import Chain, Composite, Inverse, Output, Transform, layer_name
from expmflow.transforms.flipped import Flipped


class Amortizable(Transform):
    """A layer that declares its parameters, and either owns them or, if `amortized`, takes them from the context.

    The context is then a tensor `(batch, params_per_sample)`: for each sample all parameters, flattened and
    concatenated in the order of `start`.

    Args:
        start: the names of the parameters, and the initial values of the layer's own.
        amortized: whether the parameters come from the context.
    """

    def __init__(self, start: Mapping[str, Tensor], *, amortized: bool) -> None:
        super().__init__()
        self.amortized = amortized
        self.shapes = {name: tuple(value.shape) for name, value in start.items()}
        if not amortized:
            for name, value in start.items():
                self.register_parameter(name, nn.Parameter(value))

    @property
    def context_channels(self) -> int:
        return self.params_per_sample

    @property
    def params_per_sample(self) -> int:
        """How many numbers the context must have for each sample; 0 if the parameters are the layer's own."""
        return sum(map(math.prod, self.shapes.values())) if self.amortized else 0

    def check_context(self, context: Any, x: Tensor) -> None:
        if self.amortized:
            check_params(context, x, self.params_per_sample)

    def _tanh_root(self, v: Tensor, gain: Tensor, slope: Tensor, offset: Tensor) -> Tensor:
        """`tanh_root`, with the layer's name in its error."""
        try:
            return tanh_root(v, gain, slope, offset)
        except ConvergenceError as error:
            raise ConvergenceError(f"{layer_name(self)}: {error}", error.solution) from None

    def params(self, context: Any) -> dict[str, Tensor]:
        """Each parameter as `(batch, *shape)`, or as `(1, *shape)` if it is the layer's own."""
        if not self.amortized:
            return {name: getattr(self, name).unsqueeze(0) for name in self.shapes}
        parts = context.split([math.prod(shape) for shape in self.shapes.values()], dim=1)
        return {
            name: part.reshape(part.shape[0], *shape)
            for (name, shape), part in zip(self.shapes.items(), parts, strict=True)
        }


def check_params(context: Any, x: Tensor, count: int, *, maps: bool = False) -> None:
    """Raise unless `context` has `count` numbers for each row of `x`; with `maps`, it may have them per point, too."""
    got = f"one of shape {tuple(context.shape)}" if isinstance(context, Tensor) else type(context).__name__
    fits = isinstance(context, Tensor) and context.ndim >= 2 and tuple(context.shape[:2]) == (x.shape[0], count)
    points = isinstance(context, Tensor) and context.shape[2:] == (x.shape[2:] if maps and context.ndim > 2 else ())
    expect(fits and points, f"a context with {count} numbers for each of {x.shape[0]} samples", got)
    expect_type(context.dtype == x.dtype, f"a context of dtype {x.dtype}, as the input", context.dtype)


@final
class Amortized(Composite):
    """A chain of layers whose parameters come from one context, such as the output of a single linear head.

    The context `(batch, params_per_sample)` is split into columns: first `context_features`, which go to every layer
    that takes an ordinary context, then those of each amortised layer, in the order of the list.

    Args:
        layers: as for `Chain`, or a chain; nested chains, also inverted or flipped ones, are flattened.
        context_features: how many columns form the ordinary context that layers share; 0 for none. For images the
            context may be `(batch, context_features, *n)`.

    Example:
        >>> flow = T.Amortized([T.Planar(4, amortized=True) for _ in range(3)])
        >>> head = torch.nn.Linear(16, flow.params_per_sample)
        >>> z, logdet = flow(torch.randn(5, 4), context=head(torch.randn(5, 16)))
    """

    def __init__(self, layers: Transform | Iterable[Transform], *, context_features: int = 0) -> None:
        super().__init__()
        expect_count(context_features, "context_features", at_least=0)
        expect_type(isinstance(layers, Transform | Iterable), "a layer or a list of layers", type(layers).__name__)
        self.layers = nn.ModuleList(_single_layers([layers] if isinstance(layers, Transform) else layers))
        self.context_features = context_features
        self.columns = [params_per_sample(layer) for layer in self.layers]

    def __iter__(self) -> Iterator[Transform]:
        return iter(self.layers)  # type: ignore[arg-type]

    @property
    def context_channels(self) -> int:
        return self.params_per_sample

    @property
    def params_per_sample(self) -> int:
        """The columns of the context: those of all layers, and those of the shared context."""
        return self.context_features + sum(self.columns)

    def check_context(self, context: Any, x: Tensor) -> None:
        if self.params_per_sample:
            check_params(context, x, self.params_per_sample, maps=not any(self.columns))

    def _forward(self, x: Tensor, context: Any) -> Output:
        total = x.new_zeros(x.shape[0])
        for layer, own in zip(self.layers, self._contexts(context), strict=True):
            x, logdet = layer(x, own)
            total = total + logdet
        return x, total

    def _inverse(self, z: Tensor, context: Any) -> Output:
        total = z.new_zeros(z.shape[0])
        for layer, own in zip(reversed(self.layers), reversed(self._contexts(context)), strict=True):
            z, logdet = layer.inverse(z, own)  # type: ignore[operator]
            total = total + logdet
        return z, total

    def _contexts(self, context: Any) -> list[Any]:
        """Each layer's own columns, or the shared ones."""
        if not self.params_per_sample:
            return [context] * len(self.layers)
        shared, *parts = context.split([self.context_features, *self.columns], dim=1)
        if not self.context_features:
            shared = None
        return [part if width else shared for part, width in zip(parts, self.columns, strict=True)]


def params_per_sample(layer: nn.Module) -> int:
    """How many numbers a layer takes from each sample's context."""
    if isinstance(layer, Inverse | Flipped):
        return params_per_sample(layer.transform)
    return int(getattr(layer, "params_per_sample", 0))


def _single_layers(layers: Iterable[Transform]) -> Iterator[Transform]:
    for layer in layers:
        expect_type(isinstance(layer, Transform), "layers", type(layer).__name__)
        if isinstance(layer, Chain):
            yield from _single_layers(layer)
        elif isinstance(layer, Inverse | Flipped) and _holds_chain(layer):
            parts = list(_single_layers([layer.transform]))
            yield from map(Inverse, reversed(parts)) if isinstance(layer, Inverse) else map(Flipped, parts)
        else:
            yield layer


def _holds_chain(layer: Transform) -> bool:
    """Whether a chain is inverted or flipped, however often."""
    while isinstance(layer, Inverse | Flipped):
        layer = layer.transform
    return isinstance(layer, Chain)
