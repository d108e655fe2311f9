"""ActNorm: an affine map per channel, initialised so that the first batch comes out standardised."""

from __future__ import annotations

from typing import Any, final

import torch
from torch import Tensor, nn

from expmflow._validation import expect, expect_count
from expmflow.nn.graph import check_graph, node_mask
from expmflow.transforms.base import Output, keep_padding, real_points
from expmflow.transforms.data_start import DataStart, centred, sum_over_processes
from expmflow.transforms.shapes import expect_channels

LEAST_SPREAD = 1e-12  # a standard deviation below which a channel counts as constant


@final
class ActNorm(DataStart):
    """z = (x − shift) · e^{log_scale}, per channel.

    The first batch in training sets both; with several processes, from the moments of the whole batch. A channel that
    is constant in it, as every channel is in a batch of one row, is shifted and keeps its scale. All state is in the
    state dict, so a loaded layer is not initialised again, and a layer that has seen no data is the identity.

    On graphs whose context has a node mask, padding is left unchanged and does not count.

    Args:
        channels: C.
        dim: the axis of the channels: 1 for images and vectors, −1 for graphs.

    Example:
        >>> z, logdet = T.ActNorm(3)(5 + 2 * torch.randn(64, 3, 8, 8))
        >>> round(z.std().item(), 2)
        1.0
    """

    def __init__(self, channels: int, *, dim: int = 1) -> None:
        super().__init__()
        expect_count(channels, "channels")
        expect(dim in (1, -1), "the channels on axis 1 or -1", dim)
        self.channels = channels
        self.dim = dim
        self.shift = nn.Parameter(torch.zeros(channels))
        self.log_scale = nn.Parameter(torch.zeros(channels))

    def check_event_shape(self, event_shape: tuple[int, ...]) -> None:
        expect_channels(event_shape, self.channels, self.dim)

    def check_context(self, context: Any, x: Tensor) -> None:
        if self.dim == -1:
            check_graph(None, node_mask(context), x)

    def _forward(self, x: Tensor, context: Any) -> Output:
        mask = node_mask(context) if self.dim == -1 else None
        if self._waits_for_data():
            self._initialise(x.movedim(self.dim, -1) if mask is None else x[mask])
        z = (x - self._per_channel(self.shift, x)) * self._per_channel(self.log_scale, x).exp()
        return keep_padding(z, x, mask), real_points(x, self.channels, mask) * self.log_scale.sum()

    def _inverse(self, z: Tensor, context: Any) -> Output:
        mask = node_mask(context) if self.dim == -1 else None
        x = z * (-self._per_channel(self.log_scale, z)).exp() + self._per_channel(self.shift, z)
        return keep_padding(x, z, mask), -real_points(z, self.channels, mask) * self.log_scale.sum()

    def _per_channel(self, values: Tensor, x: Tensor) -> Tensor:
        return values if self.dim == -1 else values.reshape(-1, *(1,) * (x.ndim - 2))

    @torch.no_grad()
    def _initialise(self, x: Tensor) -> None:
        values, mean, count = centred(x.reshape(-1, self.channels))
        if count == 0:
            return
        variance = sum_over_processes(values.square().sum(0)) / count
        rounding = torch.finfo(x.dtype).eps * mean.abs()  # the rounding error of a constant channel
        varies = (variance.sqrt() > 4 * rounding.clamp_min(LEAST_SPREAD)) & (count > 1)
        self.shift.copy_(mean)
        self.log_scale.copy_(torch.where(varies, -0.5 * variance.clamp_min(1e-30).log(), 0.0))
        self._has_started()
