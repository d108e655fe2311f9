"""The device that a command computes on."""

from __future__ import annotations

import torch

from expmflow._validation import expect


def device_named(name: str | None) -> str:
    """The named device, if it exists here; without a name, the accelerator if there is one, else the CPU."""
    if name is None:
        device = _accelerator() if torch.accelerator.is_available() else "cpu"
        return "cpu" if device == "mps" else device  # it lacks float64, in which likelihoods are summed
    try:
        backend = torch.device(name).type
    except RuntimeError:
        backend = "unknown"
    expect(backend in ("cpu", "cuda", "mps", "xpu"), "a device such as cpu or cuda", repr(name))
    present = backend == "cpu" or (torch.accelerator.is_available() and _accelerator() == backend)
    expect(present, f"the device {name} on this machine", "none")
    return name


def _accelerator() -> str:
    current = torch.accelerator.current_accelerator()
    return "none" if current is None else current.type
