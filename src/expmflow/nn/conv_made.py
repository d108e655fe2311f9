"""The masked network for images."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from expmflow._validation import expect_count
from expmflow.nn.context import offset
from expmflow.nn.masked import MaskedConv, hidden_degrees


class ConvMADE(nn.Module):
    """A masked network for images, 3×3, 1×1, 3×3, whose output at a point and channel depends only on earlier entries.

    Earlier are all channels of earlier points, in raster order, and the lower channels at the same point.

    Args:
        channels: C of the input `(batch, C, *n)`.
        hidden: channels inside.
        outputs: outputs per entry, stacked in blocks of C along axis 1.
        context_features: channels of a context `(batch, channels, *n)` or `(batch, channels)`; 0 for none.
        dims: the number of spatial axes.
    """

    def __init__(self, channels: int, hidden: int, outputs: int, *, context_features: int = 0, dims: int = 2) -> None:
        super().__init__()
        expect_count(channels, "channels")
        expect_count(hidden, "hidden")
        own, inside = torch.arange(channels), hidden_degrees(channels, hidden)
        self.first = MaskedConv(own, inside, 3, strict=True, dims=dims)
        self.middle = MaskedConv(inside, inside, 1, dims=dims)
        self.last = MaskedConv(inside, own.repeat(outputs), 3, dims=dims)
        self.context = nn.Linear(context_features, hidden) if context_features else None

    def forward(self, x: Tensor, context: Any = None) -> Tensor:
        h = self.first(x)
        if self.context is not None:
            h = h + offset(self.context, context, h.ndim)
        return self.last(F.elu(self.middle(F.elu(h))))
