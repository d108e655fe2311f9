"""Layers as `torch.distributions` transforms, for `TransformedDistribution`, zuko and other libraries that use them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

import torch
from torch import Tensor
from torch.distributions import constraints

from expmflow._validation import expect, expect_count, expect_type
from expmflow.transforms import Transform


@final
class TransformAdapter(torch.distributions.Transform):
    """A layer with a fixed context; it stores a log-determinant until it is asked for, so each pair is computed once.

    Nothing else is cached between calls, unlike in torch's own cache: the weights may have changed.
    """

    bijective = True

    def __init__(self, transform: Transform, context: Any, event_dim: int) -> None:
        super().__init__(cache_size=0)
        self.transform = transform
        self.context = context
        self._event_dim = event_dim
        self._last: tuple[Tensor, Tensor, Tensor, tuple[int, ...]] | None = None

    @property
    def domain(self) -> constraints.Constraint:  # type: ignore[override]
        return constraints.independent(constraints.real, self._event_dim)

    @property
    def codomain(self) -> constraints.Constraint:  # type: ignore[override]
        return constraints.independent(constraints.real, self._event_dim)

    def forward_shape(self, shape: Sequence[int]) -> torch.Size:
        """The shape of the output, batch axes included."""
        batch, event = self._parts(shape)
        return torch.Size((*batch, *self.transform.output_shape(event)))

    def inverse_shape(self, shape: Sequence[int]) -> torch.Size:
        """The shape of the input, batch axes included."""
        batch, event = self._parts(shape)
        return torch.Size((*batch, *self.transform.input_shape(event)))

    def __getstate__(self) -> dict[str, Any]:
        """Without the pair of the last call: it may belong to an autograd graph, which cannot be copied."""
        return {**super().__getstate__(), "_last": None}

    def _call(self, x: Tensor) -> Tensor:
        z, logdet = self._batched(self.transform, x)
        self._last = (x, z, logdet, self._state())
        return z

    def _inverse(self, y: Tensor) -> Tensor:
        x, logdet = self._batched(self.transform.inverse, y)
        self._last = (x, y, -logdet, self._state())
        return x

    def log_abs_det_jacobian(self, x: Tensor, y: Tensor) -> Tensor:
        last, self._last = self._last, None
        if last is None or last[0] is not x or last[1] is not y or last[3] != self._state():
            return self._batched(self.transform, x)[1]
        return last[2]

    def with_cache(self, cache_size: int = 1) -> TransformAdapter:
        """Returns itself; see the class."""
        return self

    def _state(self) -> tuple[int, ...]:
        """What the log-determinant depends on besides the pair: the weights, and whether a gradient is recorded."""
        tensors = (*self.transform.parameters(), *self.transform.buffers())
        return (torch.is_grad_enabled(), *(0 if t.is_inference() else t._version for t in tensors))

    def call_and_ladj(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The output and its log-determinant together, as zuko asks for them."""
        return self._batched(self.transform, x)

    def _batched(self, run: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        """Apply a layer, which takes one batch axis, to any number of them."""
        batch, event = self._parts(x.shape)
        out, logdet = run(x.reshape(-1, *event), self.context)
        return out.reshape(*batch, *out.shape[1:]), logdet.reshape(batch)

    def _parts(self, shape: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        axes = len(shape) - self._event_dim
        expect(axes >= 0, f"events of {self._event_dim} axes", f"shape {tuple(shape)}")
        return tuple(shape[:axes]), tuple(shape[axes:])


def as_transform(transform: Transform, *, context: Any = None, event_dim: int = 1) -> TransformAdapter:
    """A layer as a `torch.distributions.Transform`.

    Args:
        transform: the layer; its `forward` becomes the call.
        context: passed to the layer at every call.
        event_dim: the number of trailing axes that form one event: 1 for vectors, 3 for images.

    Example:
        >>> base = torch.distributions.Independent(torch.distributions.Normal(torch.zeros(2), torch.ones(2)), 1)
        >>> layer = expmflow.interop.as_transform(T.Inverse(T.LinearExp(2)))
        >>> torch.distributions.TransformedDistribution(base, [layer]).sample((5,)).shape
        torch.Size([5, 2])
    """
    expect_type(isinstance(transform, Transform), "a Transform", type(transform).__name__)
    expect_count(event_dim, "event_dim")
    return TransformAdapter(transform, context, event_dim)
