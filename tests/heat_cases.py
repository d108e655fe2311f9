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
