"""The device that a command computes on."""

from __future__ import annotations

import torch

from expmflow._validation import expect


def device_named(name: str | None) -> str:
    """The named device, if it exists here; without a name, the accelerator if there is one, else the CPU."""
    if name is None:
        present = _accelerator() if torch.accelerator.is_available() else "cpu"
        return "cpu" if present == "mps" else present  # it lacks float64, in which likelihoods are summed
    try:
        device = torch.device(name)
    except RuntimeError:
        device = torch.device("meta")
    expect(device.type != "mps", "a device with float64, in which likelihoods are summed", repr(name))
    expect(device.type in ("cpu", "cuda", "xpu"), "a device such as cpu or cuda", repr(name))
    expect(device.type == "cpu" or _is_present(device), f"the device {name} on this machine", "none")
    return name


def _is_present(device: torch.device) -> bool:
    same = torch.accelerator.is_available() and _accelerator() == device.type
    return same and (device.index or 0) < torch.accelerator.device_count()


def _accelerator() -> str:
    current = torch.accelerator.current_accelerator()
    return "none" if current is None else current.type
