"""Constraints as parametrizations: the paper's bound on the norm, skew maps, and how training updates them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from expmflow._precision import without_autocast
from expmflow._transformed import batched
from expmflow._validation import expect
from expmflow.nn.fingerprint import fingerprint
from expmflow.nn.spectral import SpectralConstraint
from expmflow.numerics import power_iteration
from expmflow.operators import ConvOperator, LinearOperator

ROUNDS = 8  # of power iteration per training step: a convolution's norms are close together, and one round lags behind


class PowerConstraint(nn.Module):
    """The paper's constraint: σ = ‖A v‖ with v from power iteration on the operator, at the last training batch's size.

    Args:
        template: the operator, whose kernel is replaced by the weight.
        coeff: the largest norm allowed.
    """

    vector: Tensor
    seen: Tensor

    def __init__(self, template: LinearOperator, coeff: float) -> None:
        super().__init__()
        self.coeff = coeff
        self._template = template
        self.register_buffer("vector", torch.empty(0))
        self.register_buffer("seen", torch.zeros(1))

    @torch.no_grad()
    def update(self, weight: Tensor, event_shape: tuple[int, ...]) -> None:
        """A few rounds; a hundred for a new image size."""
        known = tuple(self.vector.shape[1:]) == event_shape
        op = self._template.rebuild([weight])
        start = self.vector.to(weight) if known else None
        rounds = ROUNDS if known else 100
        _, vector = power_iteration(op, event_shape, iterations=rounds, start=start, return_vector=True)
        self.vector = _lasting(vector.contiguous())  # whatever the layout of the convolution: safetensors has no other
        self.seen.copy_(fingerprint(weight))

    def forward(self, weight: Tensor) -> Tensor:
        if self.vector.numel() == 0:  # no training batch yet: the initial weight is small
            return weight
        sigma = torch.linalg.vector_norm(self._template.rebuild([weight]).apply(self.vector.to(weight)))
        return weight * (self.coeff / sigma.clamp_min(self.coeff))

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        if prefix + "vector" in state_dict:  # its shape follows the images of the training
            self.vector = torch.empty_like(state_dict[prefix + "vector"], device=self.vector.device)
        super()._load_from_state_dict(state_dict, prefix, *args)


class SkewMatrix(nn.Module):
    """W − Wᵀ."""

    def forward(self, weight: Tensor) -> Tensor:
        return weight - weight.T


class SkewKernel(nn.Module):
    """The kernel of the convolution with w minus the transposed convolution."""

    def __init__(self, groups: int) -> None:
        super().__init__()
        self.groups = groups

    def forward(self, weight: Tensor) -> Tensor:
        return weight - ConvOperator(weight, groups=self.groups, validate=False).adjoint_kernel()


def constrain(layer: nn.Module, name: str, constraint: SpectralConstraint | PowerConstraint) -> None:
    """Register the constraint as the last parametrization of `layer.name`."""
    parametrize.register_parametrization(layer, name, constraint)


class _Tracking(threading.local):
    def __init__(self) -> None:
        self.suspended = False


_tracking = _Tracking()


@contextmanager
def constant_constraints() -> Iterator[None]:
    """A context in which constraints change only with the weights, so that repeated evaluations see one function."""
    before, _tracking.suspended = _tracking.suspended, True
    try:
        yield
    finally:
        _tracking.suspended = before


@torch.no_grad()
def constraint_has_seen(layer: nn.Module, name: str) -> bool:
    """Whether the constraint of `layer.name` is up to date with the weight."""
    return bool(_is_current(*_constraint_and_weight(layer, name)))


def update_constraint(layer: nn.Module, name: str, event_shape: tuple[int, ...], *, settle: bool = False) -> None:
    """Update the constraint of `layer.name` to the current weight; called at each pass in training.

    With `settle`, a `SpectralConstraint` uses eigenvalues instead of power iteration, and holds for exactly this
    weight.
    """
    original = layer.parametrizations[name].original  # type: ignore[index, union-attr]
    expect(not batched(original), "one weight to follow in training", "many inside torch.vmap: call eval() first")
    with torch.no_grad(), without_autocast(original.device.type):
        constraint, weight = _constraint_and_weight(layer, name)
        before: dict[str, Tensor] = {}
        if _tracking.suspended:
            current = _is_current(constraint, weight)
            if torch.compiler.is_compiling():  # a compiled graph cannot branch, but it can select
                before = {key: value.clone() for key, value in constraint.named_buffers() if key != "turns"}
            elif bool(current):
                return
        if isinstance(constraint, PowerConstraint):
            constraint.update(weight, event_shape)
        elif settle:
            constraint.settle(weight)
        else:
            constraint.update(weight)
        for key, value in before.items():
            buffer = getattr(constraint, key)
            if buffer.shape == value.shape:
                buffer.copy_(torch.where(current.reshape(()), value, buffer))


def _constraint_and_weight(layer: nn.Module, name: str) -> tuple[SpectralConstraint | PowerConstraint, Tensor]:
    """The constraint of `layer.name`, and the weight as the parametrizations before it give it."""
    *before, constraint = layer.parametrizations[name]  # type: ignore[index]
    weight = layer.parametrizations[name].original  # type: ignore[index, union-attr]
    for step in before:
        weight = step(weight)
    return constraint, weight


def _is_current(constraint: SpectralConstraint | PowerConstraint, weight: Tensor) -> Tensor:
    """Whether the constraint was last updated to this weight, `(1,)`."""
    return constraint.seen == fingerprint(weight).to(constraint.seen.dtype)


def _lasting(vector: Tensor) -> Tensor:
    """The vector, or, if it was made in inference mode, a copy that later passes can be differentiated with."""
    if torch.compiler.is_compiling() or not vector.is_inference():
        return vector
    with torch.inference_mode(False):
        return vector.clone()
