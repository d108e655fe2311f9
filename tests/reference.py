"""Slow, independent ways to the same numbers."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

import expmflow as ef

_NUMPY_MODE = {"zeros": "constant", "circular": "wrap", "reflect": "reflect"}


def matrix_of(op: ef.LinearOperator, event_shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """The matrix of an operator by unit vectors, `(d, d)` or `(batch, d, d)`."""
    size = math.prod(event_shape)
    units = torch.eye(size, dtype=dtype).reshape(size, *event_shape)
    with torch.no_grad():
        if op.batch_size is None:
            return op(units).reshape(size, size).T
        columns = [op(u.expand(op.batch_size, *event_shape).clone()).flatten(1) for u in units]
        return torch.stack(columns, dim=-1)


def axis_shift(size: int, offset: int, padding: str) -> np.ndarray:
    """The n × n matrix that reads the point at distance `offset` on an axis padded by numpy."""
    margin = abs(offset)
    source = np.pad(np.arange(1, size + 1), margin, mode=_NUMPY_MODE[padding])  # 0 stands for zero padding
    shift = np.zeros((size, size + 1))
    shift[np.arange(size), source[np.arange(size) + margin + offset]] = 1
    return shift[:, 1:]


def conv_matrix(kernel: Tensor, sizes: Sequence[int], padding: str, dilation: Sequence[int], groups: int) -> Tensor:
    """The matrix of a convolution, tap by tap: (channel mixing) ⊗ (a shift on each axis), in float64."""
    weights = kernel.detach().double().numpy()
    channels, inputs = weights.shape[:2]
    total = 0
    for taps in itertools.product(*(range(k) for k in weights.shape[2:])):
        mixing = np.zeros((channels, channels))
        for group in range(groups):
            block = slice(group * inputs, (group + 1) * inputs)
            mixing[block, block] = weights[(block, slice(None), *taps)]
        offsets = [d * (tap - k // 2) for d, tap, k in zip(dilation, taps, weights.shape[2:], strict=True)]
        shifts = [axis_shift(n, o, padding) for n, o in zip(sizes, offsets, strict=True)]
        total = total + functools.reduce(np.kron, shifts, mixing)
    return torch.from_numpy(total)


def normalised_adjacency(adjacency: Tensor) -> Tensor:
    """D^-½ A D^-½ with D_ii = Σ_j A_ij, and 0 for 1/√0; one graph."""
    degrees = adjacency.double().sum(1)
    roots = torch.tensor([0.0 if d == 0 else 1 / math.sqrt(d) for d in degrees.tolist()], dtype=torch.float64)
    return torch.diag(roots) @ adjacency.double() @ torch.diag(roots)


def graph_matrix(theta0: Tensor, theta1: Tensor, normalised: Tensor) -> Tensor:
    """The matrix of X ↦ X θ0 + Â X θ1 on nodes × features: I ⊗ θ0ᵀ + Â ⊗ θ1ᵀ."""
    identity = torch.eye(len(normalised), dtype=torch.float64)
    return torch.kron(identity, theta0.double().T.contiguous()) + torch.kron(
        normalised.double().contiguous(), theta1.double().T.contiguous()
    )


def sigma_max(matrix: Tensor) -> float:
    return float(torch.linalg.matrix_norm(matrix.detach().double(), ord=2).amax())


def lambda_max(matrix: Tensor) -> float:
    """The largest eigenvalue of the symmetric part."""
    return float(torch.linalg.eigvalsh((matrix + matrix.mT).detach().double() / 2).amax())


def expm_product(matrix: Tensor, x: Tensor) -> Tensor:
    """exp(A) x for one matrix and rows of x, in extended precision (19 digits), rounded to float64."""
    a = matrix.detach().double().numpy().astype(np.longdouble)
    value = x.detach().double().numpy().astype(np.longdouble).T
    steps = max(1, math.ceil(np.abs(a).sum(0).max()))
    for _ in range(steps):
        term = total = value
        for i in range(1, 32):
            term = a @ term / (steps * i)
            total = total + term
        value = total
    return torch.from_numpy(value.T.astype(np.float64))
