"""Masked convolutions in raster order, decomposed into slabs: rows of an image, points of a row.

Once the slabs before it are known, their influence on a slab is constant. So u + f(u) = v is solved by substitution,
slab by slab, with an iteration of its own for each slab.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from expmflow.nn.precision import network_precision
from expmflow.numerics.solve import triangular_fixed_point

_CONV: dict[int, Callable[..., Tensor]] = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
Activation = Callable[[Tensor], Tensor]
Gate = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class RasterStack:
    """Two masked convolutions of width three, optionally with a pointwise map between them, on `(batch, C, *n)`.

    Attributes:
        first, middle, last: kernels; for single points they have no spatial axes.
        first_offset, middle_offset, last_offset: added to their results, `(batch or 1, channels, *n or 1)`.
        activation: between them.
        gate: maps u and the stack's result to f(u) and its diagonal; None if that result is f(u).
        diagonal: maps the input of the last convolution to the diagonal, if there is no gate.
    """

    first: Tensor
    middle: Tensor | None
    last: Tensor
    first_offset: Tensor
    middle_offset: Tensor | None
    last_offset: Tensor
    activation: Activation
    gate: Gate | None = None
    diagonal: Activation | None = None

    def __call__(self, u: Tensor, rows: Any = slice(None)) -> tuple[Tensor, Tensor]:
        """f(u) and its diagonal, for some rows of the batch."""
        with network_precision(u.device.type):
            hidden = self.hidden(u, rows)
            heads = convolve(hidden, self.last) + _rows(self.last_offset, rows)
        if self.gate is not None:
            return self.gate(u, heads.to(u.dtype))
        diagonal = torch.zeros_like(u) if self.diagonal is None else self.diagonal(hidden.to(u.dtype))
        return heads.to(u.dtype), diagonal

    def hidden(self, u: Tensor, rows: Any = slice(None)) -> Tensor:
        """The input of the last convolution."""
        h = self.activation(convolve(u, self.first) + _rows(self.first_offset, rows))
        if self.middle is None or self.middle_offset is None:
            return h
        return self.activation(convolve(h, self.middle) + _rows(self.middle_offset, rows))

    @property
    def dims(self) -> int:
        """The number of spatial axes."""
        return self.first.ndim - 2

    def substitute(self, v: Tensor, solve: Callable[[RasterStack, Tensor, int], Tensor]) -> Iterator[Tensor]:
        """The slabs u_i of u, along the first spatial axis, where `solve(f_i, v_i, i)` returns each u_i."""
        u = hidden = None
        for i, target in enumerate(v.unbind(2)):
            slab = self._slab(i)
            if u is not None and hidden is not None:
                with network_precision(u.device.type):
                    slab = replace(
                        slab,
                        first_offset=slab.first_offset + convolve(u, self.first[:, :, 0]),
                        last_offset=slab.last_offset + convolve(hidden, self.last[:, :, 0]),
                    )
            u = solve(slab, target, i)
            with network_precision(u.device.type):
                hidden = slab.hidden(u)
            yield u

    def _slab(self, i: int) -> RasterStack:
        """f for slab i, as if no slab came before it."""

        def offset(tensor: Tensor) -> Tensor:
            return tensor.select(2, i if tensor.shape[2] > 1 else 0)

        return replace(
            self,
            first=_within(self.first[:, :, 1]),
            middle=None if self.middle is None else self.middle[:, :, 0],
            last=_within(self.last[:, :, 1]),
            first_offset=offset(self.first_offset),
            middle_offset=None if self.middle_offset is None else offset(self.middle_offset),
            last_offset=offset(self.last_offset),
        )


def solve_by_slabs(stack: RasterStack, v: Tensor, *, tol: float | None, max_iterations: int) -> tuple[Tensor, int]:
    """u with u + f(u) = v, slab by slab, and the largest number of iterations that a slab took.

    A slab that does not settle is split again, down to single points, where f has as many variables as channels. Costs
    as many evaluations of f on the whole as one slab takes iterations. Convergence is not guaranteed: the caller
    verifies.
    """
    most = 0

    def solve(slab: RasterStack, target: Tensor, i: int) -> Tensor:
        nonlocal most
        solution = triangular_fixed_point(slab, target, tol=tol, max_iterations=max_iterations, raise_on_failure=False)
        value, taken = solution.value, solution.iterations
        if not solution.converged and slab.dims:
            value, more = solve_by_slabs(slab, target, tol=tol, max_iterations=max_iterations)
            taken += more
        most = max(most, taken)
        return value

    return torch.stack(list(stack.substitute(v, solve)), dim=2), most


def convolve(x: Tensor, kernel: Tensor) -> Tensor:
    """A convolution that keeps the size, also for a kernel without its last slab; without spatial axes, a matrix."""
    if kernel.ndim == 2:
        return F.linear(x, kernel)
    return _CONV[kernel.ndim - 2](x, kernel, padding=kernel.shape[-1] // 2)[:, :, : x.shape[2]]


def _within(kernel: Tensor) -> Tensor:
    """A masked kernel without its last slab, which is zero: a third less work."""
    return kernel if kernel.ndim == 2 else kernel[:, :, :2].contiguous()


def _rows(offset: Tensor, rows: Any) -> Tensor:
    return offset[rows] if offset.shape[0] > 1 else offset
