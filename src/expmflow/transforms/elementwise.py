"""Increasing scalar functions, applied entry by entry, with parameters for each entry from a network."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import final

import torch
import torch.nn.functional as F
from torch import Tensor

Pair = tuple[Tensor, Tensor]
Params = tuple[Tensor, ...]

LARGEST_LOG_SCALE = 2.0


class Elementwise(ABC):
    """`forward(x, params)` is `(z, log dz/dx)`, `inverse(z, params)` is `(x, log dx/dz)`, all of the shape of `x`."""

    params_per_entry: int
    """How many numbers the function needs for each entry."""

    closed_form: tuple[str, ...] = ("forward", "inverse")
    """The directions that need no iteration."""

    @abstractmethod
    def forward(self, x: Tensor, params: Params) -> Pair: ...

    @abstractmethod
    def inverse(self, z: Tensor, params: Params) -> Pair: ...


@final
class Affine(Elementwise):
    """z = x e^s + t, with s bounded by ±2."""

    params_per_entry = 2

    def forward(self, x: Tensor, params: Params) -> Pair:
        log_scale, shift = bounded(params[0], LARGEST_LOG_SCALE), params[1]
        return torch.addcmul(shift, x, log_scale.exp()), log_scale

    def inverse(self, z: Tensor, params: Params) -> Pair:
        log_scale, shift = bounded(params[0], LARGEST_LOG_SCALE), params[1]
        return (z - shift) * (-log_scale).exp(), -log_scale


@final
class Gate(Elementwise):
    """z = σ(s + 1) x + (1 − σ(s + 1)) m (Kingma et al., 2016)."""

    params_per_entry = 2

    def forward(self, x: Tensor, params: Params) -> Pair:
        logit, mean = params[0] + 1, params[1]
        return torch.lerp(mean, x, torch.sigmoid(logit)), F.logsigmoid(logit)

    def inverse(self, z: Tensor, params: Params) -> Pair:
        logit, mean = params[0] + 1, params[1]
        return z + (z - mean) * (-logit).exp(), -F.logsigmoid(logit)  # an open gate lets z through, whatever m is


def bounded(x: Tensor, largest: float) -> Tensor:
    """A smooth clamp: about x near zero, and never beyond ±`largest`."""
    return largest * torch.tanh(x / largest)
