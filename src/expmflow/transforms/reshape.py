"""Maps that only move entries; logdet 0."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

import torch
import torch.nn.functional as F
from torch import Tensor

from expmflow._validation import expect, expect_count
from expmflow.transforms.base import Output, Transform
from expmflow.transforms.shapes import expect_channels


def _channels_last(x: Tensor) -> Tensor:
    return x.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)


def _still(x: Tensor) -> Tensor:
    return x.new_zeros(x.shape[0])


@final
class Squeeze(Transform):
    """Blocks of `factor` × `factor` points become channels: `(C, h, w)` to `(C·f², h/f, w/f)`.

    The output has channels last in memory, the layout in which convolutions are fastest; its entries are copied anyway.

    Example:
        >>> T.Squeeze()(torch.randn(1, 3, 8, 8))[0].shape
        torch.Size([1, 12, 4, 4])
    """

    def __init__(self, factor: int = 2) -> None:
        super().__init__()
        expect_count(factor, "factor")
        self.factor = factor

    def check_event_shape(self, event_shape: tuple[int, ...]) -> None:
        expect(len(event_shape) == 3, "an input of shape (batch, C, h, w)", f"events {event_shape}")

    def output_shape(self, event_shape: tuple[int, ...]) -> tuple[int, ...]:
        self.check_event_shape(event_shape)
        (channels, height, width), f = event_shape, self.factor
        fits = height % f == 0 and width % f == 0
        self._expect(fits, f"a height and width that {f} divides", (height, width))
        return channels * f**2, height // f, width // f

    def input_shape(self, event_shape: tuple[int, ...]) -> tuple[int, ...]:
        self.check_event_shape(event_shape)
        (channels, height, width), f = event_shape, self.factor
        self._expect(channels % f**2 == 0, f"channels that {f**2} divides", channels)
        return channels // f**2, height * f, width * f

    def _forward(self, x: Tensor, context: Any) -> Output:
        shape = (x.shape[0], *self.output_shape(tuple(x.shape[1:])))  # torch cannot infer the shape of an empty batch
        return _channels_last(F.pixel_unshuffle(x, self.factor).reshape(shape)), _still(x)

    def _inverse(self, z: Tensor, context: Any) -> Output:
        self.input_shape(tuple(z.shape[1:]))
        return _channels_last(F.pixel_shuffle(z, self.factor)), _still(z)


@final
class Flip(Transform):
    """Reverses axes of the event (all of them if None), so that an autoregressive order alternates.

    Args:
        dims: axes of the batched tensor, 1 and up.

    Example:
        >>> T.Flip()(torch.tensor([[1.0, 2.0]]))[0]
        tensor([[2., 1.]])
    """

    def __init__(self, dims: Sequence[int] | None = None) -> None:
        super().__init__()
        if dims is not None:
            expect(all(dim > 0 for dim in dims), "axes of the event (1 and up)", tuple(dims))
        self.dims = None if dims is None else tuple(dims)

    def check_event_shape(self, event_shape: tuple[int, ...]) -> None:
        axes = max(self.dims or (0,))
        expect(len(event_shape) >= axes, f"events of at least {axes} axes", f"events {event_shape}")

    def _flip(self, x: Tensor) -> Tensor:
        return x.flip(tuple(range(1, x.ndim)) if self.dims is None else self.dims)

    def _forward(self, x: Tensor, context: Any) -> Output:
        return self._flip(x), _still(x)

    def _inverse(self, z: Tensor, context: Any) -> Output:
        return self._flip(z), _still(z)


@final
class Permute(Transform):
    """Reorders the channels.

    Args:
        permutation: channel k of the output is channel `permutation[k]` of the input; or a number of channels, for a
            random order that is drawn once and stored in the state dict.
        dim: the axis of the channels: 1 for images and vectors, −1 for graphs.

    Example:
        >>> T.Permute([2, 0, 1])(torch.tensor([[1.0, 2.0, 3.0]]))[0]
        tensor([[3., 1., 2.]])
    """

    permutation: Tensor

    def __init__(self, permutation: int | Sequence[int], *, dim: int = 1) -> None:
        super().__init__()
        expect(dim in (1, -1), "the channels on axis 1 or -1", dim)
        order = torch.randperm(permutation) if isinstance(permutation, int) else torch.as_tensor(permutation).clone()
        complete = torch.equal(order.sort().values, torch.arange(len(order)))
        expect(complete, "a permutation of 0, 1, …", permutation)
        self.dim = dim
        self.register_buffer("permutation", order)

    def check_event_shape(self, event_shape: tuple[int, ...]) -> None:
        expect_channels(event_shape, len(self.permutation), self.dim)

    def _forward(self, x: Tensor, context: Any) -> Output:
        return x.index_select(self.dim, self.permutation), _still(x)

    def _inverse(self, z: Tensor, context: Any) -> Output:
        return z.index_select(self.dim, self.permutation.argsort()), _still(z)
