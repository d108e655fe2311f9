"""The multi-scale split: half of the channels become latents early."""

from __future__ import annotations

from typing import Any, final

import torch
from torch import Tensor

from expmflow._validation import expect
from expmflow.transforms.base import Composite, Output, Transform


@final
class Split(Composite):
    """The first half of the channels continues through `rest`; `prior` maps the second half to noise.

    `prior` is a conditional density in the form of a layer, an `AffineCoupling` over all channels: it turns the second
    half into noise, given the first. Both halves stay in the output, which has the shape of the input. So nothing is
    lost, and a flow with splits is a layer like any other. `rest` must preserve shapes: what it squeezes it has to
    unsqueeze (`Inverse(Squeeze())`).

    Args:
        rest: the deeper levels, on C/2 channels.
        prior: a coupling on C channels; None leaves the second half unchanged.

    Example:
        >>> level = T.Chain([T.Squeeze(), T.Split(T.ActNorm(6), None), T.Inverse(T.Squeeze())])
        >>> level(torch.randn(2, 3, 8, 8))[0].shape
        torch.Size([2, 3, 8, 8])
    """

    def __init__(self, rest: Transform, prior: Transform | None) -> None:
        super().__init__()
        self.rest = rest
        self.prior = prior

    def check_event_shape(self, event_shape: tuple[int, ...]) -> None:
        expect(event_shape[0] % 2 == 0, "an even number of channels", event_shape[0])

    def _forward(self, x: Tensor, context: Any) -> Output:
        logdet = x.new_zeros(x.shape[0])
        if self.prior is not None:
            x, logdet = self.prior(x, context)
        staying, leaving = x.chunk(2, dim=1)
        z, more = self.rest(staying, context)
        self._expect(z.shape == staying.shape, "a rest that keeps the shape", tuple(z.shape[1:]))
        return torch.cat([z, leaving], dim=1), logdet + more

    def _inverse(self, z: Tensor, context: Any) -> Output:
        staying, leaving = z.chunk(2, dim=1)
        x, logdet = self.rest.inverse(staying, context)
        x = torch.cat([x, leaving], dim=1)
        if self.prior is None:
            return x, logdet
        x, more = self.prior.inverse(x, context)
        return x, logdet + more
