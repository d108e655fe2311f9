"""Densities of tables: columns in their own units, whole numbers among them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Self, final

import torch
from torch import Tensor

from expmflow._validation import expect
from expmflow.distributions.flow import Flow
from expmflow.distributions.protocol import Density, Draw, Noise, given_noise


@final
class StandardizedFlow(Density):
    """p(x) = flow((x − mean) / scale) / Π scale, with the mean and the scale of the training rows.

    They are measured once, before training, and belong to the model. The subtraction is done in float64 whatever the
    dtype of the flow is, so that times in seconds, or other large numbers that lie close together, stay apart.

    Columns of whole numbers have probabilities, not densities: noise u in [0, 1) fills the gap to the next one, and
    log P(x) ≥ E log p(x + u). Without it, a flow finds that whole numbers lie on a lattice, and its likelihood grows
    without bound. Samples of these columns are whole numbers.

    Args:
        flow: the density of standardised vectors.
        integers: the places of the columns of whole numbers; with any, the likelihood is a bound.

    Example:
        >>> flow = ef.Flow(T.Chain([]), ef.distributions.StandardNormal((2,)))
        >>> density = StandardizedFlow(flow)
        >>> density.start_from(1e9 + 1e-3 * torch.randn(1000, 2, dtype=torch.float64))
        >>> density.sample(3).dtype
        torch.float64
    """

    mean: Tensor
    scale: Tensor

    def __init__(self, flow: Flow, integers: Sequence[int] = ()) -> None:
        super().__init__()
        (features,) = flow.event_shape
        known = len(set(integers)) == len(integers) and all(0 <= k < features for k in integers)
        expect(known, f"places of columns below {features}, each once", tuple(integers))
        self.flow = flow
        self.integers = tuple(integers)
        self.is_bound = bool(integers)
        self.takes_double = True
        self.register_buffer("mean", torch.zeros(features, dtype=torch.float64))
        self.register_buffer("scale", torch.ones(features, dtype=torch.float64))

    @property
    def event_shape(self) -> tuple[int, ...]:
        return self.flow.event_shape

    @property
    def draws(self) -> tuple[Draw, ...]:
        return (Draw("uniform", (len(self.integers),)),) if self.integers else ()

    @property
    def sample_draws(self) -> tuple[Draw, ...]:
        return self.flow.sample_draws

    @torch.no_grad()
    def start_from(self, rows: Tensor) -> None:
        x = rows.to(self.mean, copy=True)  # the caller's rows stay what they are
        x[:, list(self.integers)] += 0.5  # the mean of the noise
        spread = x.std(0, correction=0)
        self.mean.copy_(x.mean(0))
        self.scale.copy_(torch.where(spread > 0, spread, 1.0))

    def forward(self, x: Tensor, context: Any = None, *, noise: Noise = None) -> Tensor:
        """log p(x), or with whole numbers one sample of the lower bound on it, `(batch,)`."""
        z = self._standard(x, noise)
        return self.flow.log_prob(z, context) - self.scale.log().sum().to(z.dtype)

    def log_prob(self, x: Tensor, context: Any = None) -> Tensor:
        """log p(x), `(batch,)`; of a table without whole numbers."""
        expect(not self.is_bound, "a table without whole numbers for an exact likelihood", f"columns {self.integers}")
        return self(x, context)

    @torch.no_grad()
    def sample(self, n: int, context: Any = None, *, temperature: float = 1.0, noise: Noise = None) -> Tensor:
        """`(n, columns)` in float64."""
        x = self.flow.sample(n, context, temperature=temperature, noise=noise).double() * self.scale + self.mean
        whole = list(self.integers)
        x[:, whole] = x[:, whole].floor()
        return x

    @torch.no_grad()
    def round_trip_error(self, x: Tensor, context: Any = None) -> Tensor:
        """The largest |x − x'| of each row, in the columns' own units."""
        z = self._standard(x, x.new_full((len(x), len(self.integers)), 0.5) if self.integers else None)
        back = self.flow.decode(self.flow.encode(z, context), context)
        return ((back - z).abs() * self.scale).amax(1)

    def description(self) -> str:
        """The layers of the flow, and which columns are whole numbers."""
        whole = f"; columns of whole numbers: {len(self.integers)}" if self.integers else ""
        return f"{self.flow.description()}\nof columns standardised by the training rows{whole}"

    def _standard(self, x: Tensor, noise: Noise) -> Tensor:
        exact = x.to(self.mean.dtype)
        if self.integers:
            (u,) = given_noise(self.draws, noise, len(x), exact)
            exact = exact.index_add(1, torch.tensor(self.integers, device=x.device), u.to(exact))
        elif noise is not None:
            expect(len(noise) == 0, "no noise for columns that are no whole numbers", "some")
        return ((exact - self.mean) / self.scale).to(self._dtype)

    @property
    def _dtype(self) -> torch.dtype:
        return self.flow.base._like.dtype  # type: ignore[return-value]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """To another device, but not to another dtype: the mean stays exact."""
        mean, scale = self.mean, self.scale
        super()._apply(fn, recurse)
        device = self.mean.device
        self.mean, self.scale = mean.to(device), scale.to(device)
        return self
