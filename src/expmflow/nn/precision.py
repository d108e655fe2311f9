"""Mixed precision where it is harmless: in the networks, and nowhere else.

Layers switch autocast off for their own computations, and on again for the networks inside them. Series, solves,
log-determinants and losses keep the dtype of the parameters.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

HALF = (torch.bfloat16, torch.float16)


class _State(threading.local):
    coarse: torch.dtype | None = None


_state = _State()


@contextmanager
def full_precision(device_type: str) -> Iterator[None]:
    """Switch autocast off, and record for `network_precision` that it was on."""
    if not torch.is_autocast_enabled(device_type):
        yield
        return
    before, _state.coarse = _state.coarse, torch.get_autocast_dtype(device_type)
    try:
        with torch.autocast(device_type, enabled=False):
            yield
    finally:
        _state.coarse = before


@contextmanager
def network_precision(device_type: str) -> Iterator[None]:
    """Inside a layer, for its networks: autocast as the caller of the layer has set it."""
    if _state.coarse is None:
        yield
        return
    with torch.autocast(device_type, dtype=_state.coarse):
        yield


def raised(value: Any, dtype: torch.dtype) -> Any:
    """What a network under autocast made, in `dtype`; tensors that are not coarse, and all else, as they are."""
    if isinstance(value, tuple):
        return tuple(raised(part, dtype) for part in value)
    return value.to(dtype) if isinstance(value, Tensor) and value.dtype in HALF else value
