"""Activations by name."""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor

from expmflow._validation import expect_one_of

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"relu": F.relu, "leaky_relu": F.leaky_relu, "elu": F.elu}


def activation_named(name: str) -> Callable[[Tensor], Tensor]:
    """The activation of that name; raises `ValueError` if there is none."""
    expect_one_of(name, ACTIVATIONS, "activation")
    return ACTIVATIONS[name]
