"""What a layer caches while its weights do not change."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor, nn

from expmflow._identical import identical
from expmflow.numerics import SeriesPlan, plan_series
from expmflow.numerics.series import Gradient, apply_at
from expmflow.operators import ConvOperator, DenseOperator, LinearOperator
from expmflow.transforms.base import Output, expanded

LARGEST_DENSE = 2048  # the most entries of an event: 16 MiB in float32
DENSE_COST = 1.6  # measured cost of a multiplication inside the large product, relative to one inside a convolution


class Stateful(Protocol):
    """An object with parameters and buffers."""

    def parameters(self) -> Iterator[nn.Parameter]: ...

    def buffers(self) -> Iterator[Tensor]: ...


class Snapshot:
    """A copy of a layer's parameters and buffers, from the last time that it was compared."""

    def __init__(self) -> None:
        self._tensors: list[Tensor] = []

    def matches(self, layer: Stateful) -> bool:
        """Whether nothing has changed since the last call; the current values become the new reference."""
        state = [*layer.parameters(), *layer.buffers()]
        unchanged = len(state) == len(self._tensors) and all(map(identical, state, self._tensors))
        if not unchanged:
            self._tensors = [tensor.detach().clone() for tensor in state]
        return unchanged


class Freezable(Stateful, Protocol):
    """The attributes of a layer that freezing an exponential needs."""

    tol: float | None
    terms: int | None
    gradient: Gradient

    def operator(self) -> LinearOperator: ...


class Frozen:
    """The cached plans, and on small events the matrix exp(A), of a layer in evaluation mode.

    The cache lasts until any entry of a parameter or buffer changes: loading a state, moving the layer, or writing into
    a weight in any way empties it. With gradients enabled only the plans are used.
    """

    def __init__(self) -> None:
        self._snapshot = Snapshot()
        self._operator: LinearOperator | None = None
        self._plans: dict[tuple[object, ...], SeriesPlan] = {}
        self._matrices: dict[tuple[object, ...], Tensor] = {}

    def __call__(self, layer: Freezable, x: Tensor, sign: float) -> Output:
        """exp(±A) x and its logdet."""
        op = self._current(layer)
        event_shape = tuple(x.shape[1:])
        plan = self._plan(layer, op, x, sign)
        if torch.is_grad_enabled():
            op = layer.operator()
        elif self._pays(op, event_shape, plan):
            matrix = self._matrix(op, x, sign, plan)
            z = (x.flatten(1) @ matrix).reshape(x.shape)
            return z, expanded(sign * op.trace(event_shape), x)
        z = apply_at(op, x, sign, None, plan, layer.gradient)
        return z, expanded(sign * op.trace(event_shape), x)

    def _current(self, layer: Freezable) -> LinearOperator:
        if not self._snapshot.matches(layer) or self._operator is None:
            with torch.no_grad():
                self._operator = layer.operator()
            self._plans, self._matrices = {}, {}
        return self._operator

    def _plan(self, layer: Freezable, op: LinearOperator, x: Tensor, sign: float) -> SeriesPlan:
        event_shape = tuple(x.shape[1:])
        key = (event_shape, x.dtype, sign, layer.terms, layer.tol)
        if key not in self._plans:
            if layer.terms is not None:
                self._plans[key] = SeriesPlan(1, layer.terms, float("nan"))
            else:  # exp(A) may grow where exp(−A) shrinks
                log_norm = op.scale(sign).log_norm_bound(event_shape)
                self._plans[key] = plan_series(op.norm_bound(event_shape), layer.tol, x.dtype, log_norm=log_norm)
        return self._plans[key]

    def _pays(self, op: LinearOperator, event_shape: tuple[int, ...], plan: SeriesPlan) -> bool:
        """Whether one product with exp(A) costs less than the series of products with A."""
        size = torch.Size(event_shape).numel()
        if size > LARGEST_DENSE:
            return False
        if isinstance(op, DenseOperator):
            return True
        if isinstance(op, ConvOperator):
            series = plan.products * op.kernel.numel() * (size // event_shape[0])
            return DENSE_COST * size * size <= series
        return False

    def _matrix(self, op: LinearOperator, x: Tensor, sign: float, plan: SeriesPlan) -> Tensor:
        """exp(±A)ᵀ, by the series on all unit vectors: about as much work as a batch of d events."""
        key = (tuple(x.shape[1:]), sign, plan)
        if key not in self._matrices:
            size = x[0].numel() if x.shape[0] else torch.Size(x.shape[1:]).numel()
            units = torch.eye(size, dtype=x.dtype, device=x.device).reshape(size, *x.shape[1:])
            self._matrices[key] = apply_at(op, units, sign, None, plan, "autograd").reshape(size, size)
        return self._matrices[key]
