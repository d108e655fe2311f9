"""Graphs whose nodes lie at distinct centres in the plane, in random order: the paper's mixtures of Gaussians."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from expmflow._validation import expect, expect_count

LOG_2PI = math.log(2 * math.pi)
ANGLES = 32  # quadrature points over a quarter turn: exact to rounding for a periodic integrand three of them wide


@dataclass(frozen=True)
class Mixture:
    """N nodes, each a unit Gaussian around its own centre, with all orders of the centres equally likely.

    Args:
        centres: `(N, 2)`.
        turned: whether the whole graph is rotated around the origin by a uniform random angle.

    Example:
        >>> graphs = MIXTURES["mog-4"]
        >>> graphs.sample(3, torch.Generator().manual_seed(0)).shape
        torch.Size([3, 4, 2])
        >>> round(graphs.entropy(), 3)
        3.632
    """

    centres: tuple[tuple[float, float], ...]
    turned: bool = False

    def __post_init__(self) -> None:
        quarter = {(-b, a) for a, b in self.centres}
        expect(
            not self.turned or quarter == set(self.centres), "centres that a quarter turn leaves in place", self.centres
        )

    @property
    def nodes(self) -> int:
        """N."""
        return len(self.centres)

    def sample(self, n: int, generator: torch.Generator) -> Tensor:
        """`(n, N, 2)` in float32."""
        expect_count(n, "the number of graphs", at_least=0)
        order = torch.rand(n, self.nodes, generator=generator).argsort(1)
        means = torch.tensor(self.centres)[order]
        if self.turned:
            means = means @ _rotation(2 * math.pi * torch.rand(n, generator=generator))
        return means + torch.randn(n, self.nodes, 2, generator=generator)

    def log_prob(self, x: Tensor) -> Tensor:
        """`(batch,)`: the exact density, a sum over all orders, and for rotated graphs also an integral over the
        angle."""
        expect(self.nodes <= 6, "at most 6 nodes, for a sum over all orders", self.nodes)
        shape = (self.nodes, 2)
        expect(x.ndim == 3 and x.shape[1:] == shape, f"graphs of shape (batch, {self.nodes}, 2)", tuple(x.shape))
        centres = torch.tensor(self.centres, dtype=x.dtype)
        if self.turned:  # a quarter turn maps the centres to themselves, so one quarter is enough
            angles = torch.arange(ANGLES, dtype=x.dtype) * (math.pi / 2 / ANGLES)
            centres = centres @ _rotation(angles)
        apart = x[:, None, :, None, :] - centres.reshape(1, -1, 1, self.nodes, 2)
        squares = apart.square().sum(-1).permute(2, 3, 0, 1).contiguous()  # node, centre, row, angle
        orders = itertools.permutations(range(self.nodes))
        exponents = -0.5 * torch.cat(
            [torch.stack([squares[i, j] for i, j in enumerate(order)]).sum(0) for order in orders], dim=1
        )
        return exponents.logsumexp(1) - math.log(exponents.shape[1]) - self.nodes * LOG_2PI

    def entropy(self, samples: int = 20_000) -> float:
        """Nats per node. The centres are so far apart that orders do not mix; over the angle, a mean over samples.

        The density does not depend on the order and the angle of a sample, so one of each is enough. The contribution
        of
        the noise, except along the rotation, has a known mean and is removed: the standard error is about 2e-4 at
        20,000 samples.
        """
        if not self.turned:
            return 1 + LOG_2PI + math.lgamma(self.nodes + 1) / self.nodes
        noise = torch.randn(samples, self.nodes, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        centres = torch.tensor(self.centres, dtype=torch.float64)
        turn = centres @ torch.tensor([[0.0, 1.0], [-1.0, 0.0]], dtype=torch.float64)
        along = (noise * turn).sum((1, 2)) / torch.linalg.vector_norm(turn)
        surprise = -torch.cat([self.log_prob(part) for part in (centres + noise).split(1000)])
        known = (noise.square().sum((1, 2)) - along.square()) / 2  # of mean N − ½
        return float((surprise - known).mean() + self.nodes - 0.5) / self.nodes


def _grid(values: tuple[float, ...]) -> tuple[tuple[float, float], ...]:
    return tuple(itertools.product(values, values))


def _rotation(angles: Tensor) -> Tensor:
    """`(n, 2, 2)`, for points as rows."""
    cos, sin = angles.cos(), angles.sin()
    return torch.stack([cos, sin, -sin, cos], dim=-1).reshape(-1, 2, 2)


MIXTURES = {
    "mog-4": Mixture(_grid((-5.0, 5.0))),
    "mog-9": Mixture(_grid((-5.0, 5.0, 15.0))),
    "mog-16": Mixture(_grid((-5.0, 5.0, 15.0, 25.0))),
    "mog-ring": Mixture(_grid((-5.0, 5.0)), turned=True),
}
"""The paper's four data sets, by name."""
