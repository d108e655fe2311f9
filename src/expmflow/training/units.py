"""The units that likelihoods are compared in: bits per dimension for images, nats per node for graphs."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Unit:
    """A name, and how many of it are one nat of a whole row."""

    name: str
    per_nat: float


NATS = Unit("nats", 1.0)


def usual_unit(event_shape: tuple[int, ...]) -> Unit:
    """What the literature uses for events of this shape.

    Example:
        >>> usual_unit((4, 2)), usual_unit((1, 8, 8)).name
        (Unit(name='nats per node', per_nat=0.25), 'bits per dimension')
    """
    if len(event_shape) == 3:
        return Unit("bits per dimension", 1 / (torch.Size(event_shape).numel() * math.log(2)))
    return Unit("nats per node", 1 / event_shape[0]) if len(event_shape) == 2 else NATS
