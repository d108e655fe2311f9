"""A layer applied in the opposite order, with every entry kept in its place."""

from __future__ import annotations

from typing import Any, final

from torch import Tensor

from expmflow._validation import expect_type
from expmflow.transforms.base import Composite, Output, Transform


@final
class Flipped(Composite):
    """A layer in reversed order: events and contexts are reversed before it, and events are reversed back after it.

    Unlike a `Flip` between layers, it leaves every entry in its place, and at each point the layer sees the context of
    that point. Use it to alternate the order of autoregressive layers on images if another network reads the images or
    if the context is an image. In the posterior of a convolutional VAE both hold.

    Args:
        transform: the layer. The spatial axes of a context `(batch, features, *n)` are reversed; other contexts are
            not.

    Example:
        >>> layers = [T.ConvSylvester(2, 8), T.Flipped(T.ConvSylvester(2, 8))]
        >>> T.Chain(layers)(torch.randn(1, 2, 4, 4))[0].shape
        torch.Size([1, 2, 4, 4])
    """

    def __init__(self, transform: Transform) -> None:
        super().__init__()
        self.transform = transform

    def output_shape(self, event_shape: tuple[int, ...]) -> tuple[int, ...]:
        return self.transform.output_shape(event_shape)

    def input_shape(self, event_shape: tuple[int, ...]) -> tuple[int, ...]:
        return self.transform.input_shape(event_shape)

    def check_context(self, context: Any, x: Tensor) -> None:
        known = context is None or isinstance(context, Tensor)
        expect_type(known, "a tensor for the context, or none", type(context).__name__)

    def _forward(self, x: Tensor, context: Any) -> Output:
        z, logdet = self.transform(_reversed(x, 1), _reversed(context, 2))
        return _reversed(z, 1), logdet

    def _inverse(self, z: Tensor, context: Any) -> Output:
        x, logdet = self.transform.inverse(_reversed(z, 1), _reversed(context, 2))
        return _reversed(x, 1), logdet


def _reversed(x: Any, first: int) -> Any:
    """All axes from `first` on reversed."""
    return None if x is None else x.flip(tuple(range(first, x.ndim)))
