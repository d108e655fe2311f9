"""Densities of tables, with columns in their own units, some of which may hold whole numbers."""

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

    Mean and scale are measured once, before training, and belong to the model. The mean is subtracted in float64
    whatever the dtype of the flow, so that large numbers that lie close together, such as times in seconds, stay apart.

    Columns of whole numbers have probabilities, not densities: noise u in [0, 1) fills the gap to the next number, and
    log P(x) ≥ E log p(x + u). Without noise, a flow would learn that the numbers lie on a lattice, and its likelihood
    would grow without bound. Samples of these columns are whole numbers.

    Columns in which one value repeats (no rain on most days, ratings in halves) have no density at that value. Such a
    value is treated as known up to a cell. Noise fills the cell, and E log p(x + width · u) bounds the logarithm of the
    mean density in it, which no single value can make larger than 1 / width. Samples lie whole cells from the most
    frequent value.

    Args:
        flow: the density of standardised vectors.
        integers: the indices of the columns of whole numbers; with any, the likelihood is a bound.
        cells: the indices of other columns with repeated values, and the widths of their cells; also a bound.

    Example:
        >>> flow = ef.Flow(T.Chain([]), ef.distributions.StandardNormal((2,)))
        >>> density = StandardizedFlow(flow)
        >>> density.start_from(1e9 + 1e-3 * torch.randn(1000, 2, dtype=torch.float64))
        >>> density.sample(3).dtype
        torch.float64
    """

    mean: Tensor
    scale: Tensor
    origin: Tensor  # of the cells: the most frequent value

    def __init__(self, flow: Flow, integers: Sequence[int] = (), cells: Sequence[tuple[int, float]] = ()) -> None:
        super().__init__()
        (features,) = flow.event_shape
        places = [*integers, *(place for place, _ in cells)]
        known = len(set(places)) == len(places) and all(0 <= k < features for k in places)
        expect(known, f"places of columns below {features}, each once", tuple(places))
        expect(all(width > 0 for _, width in cells), "cells of positive width", tuple(cells))
        self.flow = flow
        self.integers = tuple(integers)
        self.cells = tuple((int(place), float(width)) for place, width in cells)
        self.is_bound = bool(places)
        self.takes_double = True
        self._places = places
        self._widths = [1.0] * len(self.integers) + [width for _, width in self.cells]
        self.register_buffer("mean", torch.zeros(features, dtype=torch.float64))
        self.register_buffer("scale", torch.ones(features, dtype=torch.float64))
        if cells:
            self.register_buffer("origin", torch.zeros(len(cells), dtype=torch.float64))

    @property
    def event_shape(self) -> tuple[int, ...]:
        return self.flow.event_shape

    @property
    def draws(self) -> tuple[Draw, ...]:
        return (Draw("uniform", (len(self._places),)),) if self._places else ()

    @property
    def sample_draws(self) -> tuple[Draw, ...]:
        return self.flow.sample_draws

    @torch.no_grad()
    def start_from(self, rows: Tensor) -> None:
        x = rows.to(self.mean, copy=True)  # do not change the caller's rows
        if self.cells:
            self.origin.copy_(x[:, self._places[len(self.integers) :]].mode(0).values)
        x[:, self._places] += x.new_tensor(self._widths) / 2  # the mean of the noise
        spread = x.std(0, correction=0)
        self.mean.copy_(x.mean(0))
        self.scale.copy_(torch.where(spread > 0, spread, 1.0))

    def forward(self, x: Tensor, context: Any = None, *, noise: Noise = None) -> Tensor:
        """log p(x), or, if there are cells or whole numbers, one sample of the lower bound on it, `(batch,)`."""
        z = self._standard(x, noise)
        return self.flow.log_prob(z, context) - self.scale.log().sum().to(z.dtype)

    def log_prob(self, x: Tensor, context: Any = None) -> Tensor:
        """log p(x), `(batch,)`, for a table without whole numbers or cells."""
        got = f"columns {tuple(self._places)}"
        expect(not self.is_bound, "a table without whole numbers or repeated values for an exact likelihood", got)
        return self(x, context)

    @torch.no_grad()
    def sample(self, n: int, context: Any = None, *, temperature: float = 1.0, noise: Noise = None) -> Tensor:
        """`(n, columns)` in float64."""
        x = self.flow.sample(n, context, temperature=temperature, noise=noise).double() * self.scale + self.mean
        width = x.new_tensor(self._widths)
        origin = torch.cat([x.new_zeros(len(self.integers)), *([self.origin] if self.cells else [])])
        x[:, self._places] = origin + ((x[:, self._places] - origin) / width).floor() * width
        return x

    @torch.no_grad()
    def round_trip_error(self, x: Tensor, context: Any = None) -> Tensor:
        """The largest |x − x'| of each row, in the columns' own units."""
        z = self._standard(x, x.new_full((len(x), len(self._places)), 0.5) if self._places else None)
        back = self.flow.decode(self.flow.encode(z, context), context)
        return ((back - z).abs() * self.scale).amax(1)

    def description(self) -> str:
        """The layers of the flow, and how many columns are whole numbers or known up to cells."""
        whole = f"; columns of whole numbers: {len(self.integers)}" if self.integers else ""
        cells = f"; columns of values that repeat: {len(self.cells)}" if self.cells else ""
        return f"{self.flow.description()}\nof columns standardised by the training rows{whole}{cells}"

    def _standard(self, x: Tensor, noise: Noise) -> Tensor:
        exact = x.to(self.mean.dtype)
        if self._places:
            (u,) = given_noise(self.draws, noise, x.shape[0], exact)
            added = u.to(exact) * exact.new_tensor(self._widths)
            exact = exact.index_add(1, torch.tensor(self._places, device=x.device), added)
        elif noise is not None:
            expect(len(noise) == 0, "no noise for columns whose values do not repeat", "some")
        return ((exact - self.mean) / self.scale).to(self._dtype)

    @property
    def _dtype(self) -> torch.dtype:
        return self.flow.base._like.dtype  # type: ignore[return-value]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Moves to another device, but keeps the dtype, so that the mean stays exact."""
        exact = dict(self._buffers)
        super()._apply(fn, recurse)
        device = self.mean.device
        self._buffers.update({name: None if held is None else held.to(device) for name, held in exact.items()})
        return self
