"""A layer in the opposite order, with everything else in its place."""

from __future__ import annotations

from typing import Any, final

from torch import Tensor

from expmflow._validation import expect_type
from expmflow.transforms.base import Composite, Output, Transform


@final
class Flipped(Composite):
    """A layer with its order turned: events are reversed in front of it and back behind it, and contexts with them.

    Unlike a `Flip` between layers it leaves every entry in its place, and the layer sees at each point the context of
    that point. So it is what alternates the order of autoregressive layers on images that another network reads, or
    whose context is an image: in the posterior of a VAE with convolutions, both.

    Args:
        transform: the layer. Of a context `(batch, features, *n)` the spatial axes are reversed; one without is not.

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
    """All axes from `first` on turned around."""
    return None if x is None else x.flip(tuple(range(first, x.ndim)))
