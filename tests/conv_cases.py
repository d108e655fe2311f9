"""Convolutions for the registry: dimensions × padding × kernel × dilation × groups."""

from __future__ import annotations

import itertools

import torch

import expmflow as ef
from operator_registry import Cases, draw, parameter

CASES = Cases()

_CONVOLUTIONS: list[tuple[str, tuple[int, ...], tuple[int, ...], tuple[int, ...], int]] = [
    # name, event, kernel sizes, dilation, groups
    ("conv1d-3", (2, 6), (3,), (1,), 1),
    ("conv1d-5-dilated", (2, 9), (5,), (2,), 1),
    ("conv1d-1", (3, 4), (1,), (1,), 1),
    ("conv2d-3x3", (2, 4, 5), (3, 3), (1, 1), 1),
    ("conv2d-1x3", (2, 3, 4), (1, 3), (1, 1), 1),
    ("conv2d-5x5", (1, 6, 5), (5, 5), (1, 1), 1),
    ("conv2d-3x3-dilated", (1, 5, 6), (3, 3), (2, 2), 1),
    ("conv2d-3x3-anisotropic", (1, 3, 7), (3, 3), (1, 3), 1),
    ("conv2d-3x3-groups", (4, 3, 3), (3, 3), (1, 1), 2),
    ("conv2d-3x3-depthwise", (3, 3, 4), (3, 3), (1, 1), 3),
    ("conv3d-3x3x3", (1, 3, 2, 4), (3, 3, 3), (1, 1, 1), 1),
    ("conv3d-1x3x1-groups", (2, 2, 3, 2), (1, 3, 1), (1, 1, 1), 2),
]


def convolution(
    name: str, padding: str, event: tuple[int, ...], sizes: tuple[int, ...], dilation: tuple[int, ...], groups: int
) -> None:
    def make(dtype: torch.dtype):
        channels = event[0]
        taps = torch.Size(sizes).numel() * channels // groups
        kernel = parameter(name, channels, channels // groups, *sizes, dtype=dtype, size=0.8 / taps**0.5)
        return ef.ConvOperator(kernel, padding, dilation=dilation, groups=groups), event

    CASES.add(f"{name}-{padding}")(make)


for (_name, _event, *_rest), _padding in itertools.product(_CONVOLUTIONS, ("zeros", "circular", "reflect")):
    convolution(_name, _padding, _event, *_rest)

for _size, _taps, _distance in itertools.product((1, 2), (3, 5), (1, 2)):  # the torus may be smaller than the kernel
    convolution(f"conv1d-{_taps}-on-{_size}-by-{_distance}", "circular", (2, _size), (_taps,), (_distance,), 1)
convolution("conv2d-5x3-on-1x2", "circular", (2, 1, 2), (5, 3), (1, 1), 1)
convolution("conv1d-5-on-1", "zeros", (2, 1), (5,), (1,), 1)
convolution("conv2d-5x5-on-2x3", "zeros", (1, 2, 3), (5, 5), (1, 1), 1)
convolution("conv2d-3x3-channels-last", "zeros", (12, 2, 3), (3, 3), (1, 1), 1)
convolution("conv1d-3-large", "zeros", (1, 60), (3,), (1,), 1)  # beyond the cap on sampled frequencies
convolution("conv1d-3-large", "reflect", (1, 60), (3,), (1,), 1)


@CASES.add("conv2d-edge-filter")
def _(dtype: torch.dtype):
    return ef.ConvOperator(torch.tensor([[[[0.6, 0.0, -0.6]]]], dtype=dtype, requires_grad=True)), (1, 3, 5)


# entries of one sign, or of signs that take turns: their roundings do not average out
_PATTERNS = {
    "constant": lambda shape: torch.ones(shape),
    "positive": lambda shape: draw("positive", *shape, dtype=torch.float32).abs(),
    "alternating": lambda shape: (1.0 - 2 * (torch.arange(torch.Size(shape).numel()) % 2)).reshape(shape),
}


def patterned(name: str, padding: str) -> None:
    def make(dtype: torch.dtype):
        entries = _PATTERNS[name]((12, 12, 3, 3)).to(dtype)
        return ef.ConvOperator((0.9 * entries / entries.abs().sum((1, 2, 3)).amax()).requires_grad_(), padding), (
            12,
            2,
            2,
        )

    CASES.add(f"conv2d-{name}-{padding}")(make)


for _name, _padding in itertools.product(_PATTERNS, ("zeros", "circular")):
    patterned(_name, _padding)
