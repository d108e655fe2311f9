"""Three convolutions: the plainest network inside image couplings."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from expmflow._validation import expect_count
from expmflow.nn.context import check_context, offset


class ConvNet(nn.Module):
    """Convolutions 3×3, 1×1 and 3×3 with ReLU in between, and an output that starts at zero.

    Args:
        in_channels, out_channels: of `(batch, channels, h, w)`.
        hidden: channels inside.
        context_channels: channels of a context `(batch, channels, h, w)` or `(batch, channels)`; 0 for none.
    """

    def __init__(self, in_channels: int, out_channels: int, *, hidden: int = 96, context_channels: int = 0) -> None:
        super().__init__()
        for name, value in (("in_channels", in_channels), ("out_channels", out_channels), ("hidden", hidden)):
            expect_count(value, name)
        self.context_channels = context_channels
        self.first = nn.Conv2d(in_channels, hidden, 3, padding=1)
        self.context = nn.Linear(context_channels, hidden) if context_channels else None
        self.middle = nn.Conv2d(hidden, hidden, 1)
        self.last = nn.Conv2d(hidden, out_channels, 3, padding=1)
        nn.init.zeros_(self.last.weight)
        if self.last.bias is not None:
            nn.init.zeros_(self.last.bias)

    def forward(self, x: Tensor, context: Any = None) -> Tensor:
        h = self.first(x)
        if self.context is not None:
            h = h + offset(self.context, context, h.ndim)
        return self.last(F.relu(self.middle(F.relu(h))))

    def check_context(self, context: Any, x: Tensor) -> None:
        """Raise `ValueError` unless `context` fits `x`."""
        check_context(context, x, self.context_channels)
