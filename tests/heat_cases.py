"""Graphs with weights, and their heat kernels as dense matrices in extended precision."""

from __future__ import annotations

import math

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

KINDS = ["sym", "rw", "comb"]
DTYPES = [torch.float64, torch.float32]


def laplacian(adjacency: Tensor, kind: str) -> np.ndarray:
    """L in extended precision; a row without weights is zero."""
    a = adjacency.detach().double().numpy().astype(np.longdouble)
    degree = a.sum(1)
    if kind == "comb":
        return np.diag(degree) - a
    divisor = np.where(degree == 0, 1, degree)
    scaled = a / divisor[:, None] if kind == "rw" else a / np.sqrt(divisor)[:, None] / np.sqrt(divisor)
    return np.diag((degree > 0).astype(np.longdouble)) - scaled


def dense_kernel(adjacency: Tensor, kind: str, t: float) -> np.ndarray:
    """exp(−tL) by scaling and squaring with a long series, 19 digits."""
    matrix = -np.longdouble(t) * laplacian(adjacency, kind)
    halvings = max(0, math.ceil(math.log2(max(float(np.abs(matrix).sum(1).max()), 1e-9)))) + 1
    total = term = np.eye(len(matrix), dtype=np.longdouble)
    for i in range(1, 25):
        term = term @ matrix / (i * np.longdouble(2) ** halvings)
        total = total + term
    for _ in range(halvings):
        total = total @ total
    return total


def sparse_kernel(edges: Tensor, x: Tensor, kind: str, t: float) -> np.ndarray:
    """exp(−tL) x on a large graph without weights or isolated nodes, 19 digits: e^{τ(M−1)} as a mean of powers of M."""
    rows, cols = edges[:, torch.argsort(edges[0], stable=True)].numpy()
    starts = np.searchsorted(rows, np.arange(len(x)))
    degree = np.bincount(rows, minlength=len(x)).astype(np.longdouble)[:, None]
    rate = np.longdouble(2 * degree.max() if kind == "comb" else 1)

    def step(y: np.ndarray) -> np.ndarray:
        if kind == "sym":
            return np.add.reduceat((y / np.sqrt(degree))[cols], starts) / np.sqrt(degree)
        sums = np.add.reduceat(y[cols], starts)
        return sums / degree if kind == "rw" else y - (degree * y - sums) / rate

    tau, y = np.longdouble(t) * rate, x.double().numpy().astype(np.longdouble)
    weight = np.exp(-tau)
    total = weight * y
    for k in range(1, 40 + int(tau + 12 * math.sqrt(tau))):
        y, weight = step(y), weight * tau / k
        total = total + weight * y
    return total


def star(nodes: int) -> Tensor:
    """The edges of a hub and its neighbours, in both directions."""
    spokes = torch.stack([torch.zeros(nodes - 1, dtype=torch.int64), torch.arange(1, nodes)])
    return torch.cat([spokes, spokes.flip(0)], dim=1)


def hubs(nodes: int, count: int, degree: int) -> Tensor:
    """A random graph with a few nodes that all others know, and no isolated one."""
    generator = torch.Generator().manual_seed(0)
    ends = [torch.randint(nodes, (2, nodes * degree // 2), generator=generator)]
    ends += [torch.stack([torch.full((nodes,), hub), torch.arange(nodes)]) for hub in range(count)]
    one_way = torch.cat(ends, dim=1)
    both = torch.cat([one_way, one_way.flip(0)], dim=1)[:, (one_way[0] != one_way[1]).repeat(2)]
    places = torch.unique(both[0] * nodes + both[1])
    return torch.stack([places // nodes, places % nodes])


def circulant(nodes: int, degree: int) -> Tensor:
    """A ring in which each node knows as many of the nearest."""
    node = torch.arange(nodes)
    ways = torch.cat([torch.stack([node, (node + k) % nodes]) for k in range(1, degree // 2 + 1)], dim=1)
    return torch.cat([ways, ways.flip(0)], dim=1)


LARGE = {
    "star-1000": lambda: star(1000),
    "star-10000": lambda: star(10_000),
    "hubs": lambda: hubs(2000, 20, 6),
    "circulant-10": lambda: circulant(100, 10),
    "circulant-30": lambda: circulant(100, 30),
    "circulant-60": lambda: circulant(100, 60),
}

DATA = {
    "constant": lambda nodes: torch.ones(nodes),
    "positive": lambda nodes: torch.rand(nodes, generator=torch.Generator().manual_seed(0)),
    "alternating": lambda nodes: 1.0 - 2 * (torch.arange(nodes) % 2),
    "hub": lambda nodes: (torch.arange(nodes) == 0).float(),
}


def edges_of(adjacency: Tensor) -> tuple[Tensor, Tensor]:
    index = adjacency.nonzero().T
    return index, adjacency[index[0], index[1]]


@st.composite
def graphs(draw, *, symmetric: bool | None = None):
    """An adjacency: weighted or not, directed or not, with self-loops, isolated nodes, sinks, or no edges at all."""
    nodes = draw(st.integers(1, 9))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    dtype = draw(st.sampled_from(DTYPES))
    adjacency = (torch.rand(nodes, nodes, generator=generator) < draw(st.sampled_from([0.0, 0.2, 0.6, 1.0]))).to(dtype)
    if draw(st.booleans()):
        adjacency = adjacency * torch.rand(nodes, nodes, generator=generator, dtype=dtype) * 3
    if symmetric or (symmetric is None and draw(st.booleans())):
        adjacency = adjacency + adjacency.T
    if draw(st.booleans()):
        adjacency = adjacency * (1 - torch.eye(nodes, dtype=dtype))
    x = torch.randn(nodes, 3, generator=generator, dtype=dtype)
    return adjacency, x
