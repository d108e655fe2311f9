"""One way to refuse bad input: `Expected …; got …`."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from expmflow._transformed import exporting, transformed


def expect(condition: bool, expected: str, got: object) -> None:
    """Raise `ValueError` with the standard message unless `condition` holds."""
    if not condition:
        raise ValueError(f"Expected {expected}; got {got}.")


def expect_type(condition: bool, expected: str, got: object) -> None:
    """Raise `TypeError` with the standard message unless `condition` holds."""
    if not condition:
        raise TypeError(f"Expected {expected}; got {got}.")


def expect_tensor(value: object, name: str) -> None:
    """`value` is a real floating-point tensor."""
    expect_type(isinstance(value, Tensor), f"{name} to be a tensor", type(value).__name__)
    if isinstance(value, Tensor):  # narrows the type
        expect_type(value.is_floating_point(), f"{name} of a real floating-point dtype", value.dtype)


def expect_finite(value: Tensor, name: str) -> None:
    """`value` has no NaN or infinity. Reads the tensor, so `torch.compile` and `torch.func` skip it."""
    if torch.compiler.is_compiling() or value.numel() == 0 or transformed(value):
        return
    value = value.detach()
    extremes = float(value.amax()), float(value.amin())  # both are NaN if any entry is; aminmax is slow for strides
    expect(all(map(math.isfinite, extremes)), f"{name} to be finite", "NaN or infinity in it")


def expect_alike(tensors: Sequence[tuple[str, Tensor]]) -> None:
    """All tensors share one dtype and one device."""
    (first_name, first), *rest = tensors
    for name, tensor in rest:
        expect_type(tensor.dtype == first.dtype, f"{name} of dtype {first.dtype}, as {first_name}", tensor.dtype)
        expect(tensor.device == first.device, f"{name} on {first.device}, as {first_name}", tensor.device)


def expect_one_of(value: object, options: Collection[str], name: str) -> None:
    """`value` is one of the `options`."""
    if value not in options:
        expect(False, f"{name} to be one of {', '.join(options)}", repr(value))


def expect_count(value: object, name: str, *, at_least: int = 1) -> None:
    """`value` is a whole number, and not below `at_least`."""
    whole = isinstance(value, int | torch.SymInt) and not isinstance(value, bool)
    expect_type(whole, f"{name} to be a whole number", repr(value))
    if isinstance(value, int):
        expect(value >= at_least, f"{name} of at least {at_least}", value)


def expect_untraced(what: str) -> None:
    """Raise inside `torch.jit.trace`, which would record `what` for one input and get it wrong for others."""
    tracing = not torch.compiler.is_compiling() and torch.jit.is_tracing()  # type: ignore[attr-defined]
    expect(not tracing, f"no torch.jit.trace around {what}", "one: use torch.compile or torch.export")


def expect_unexported(what: str) -> None:
    """Raise inside `torch.export`: `what` needs numbers that are known only when a program runs."""
    expect(not exporting(), f"no torch.export around {what}", "one")
