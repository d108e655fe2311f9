"""How fast the terms of the series decay: the bound ‖M‖ⁱ/i!, and the actual terms."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from expmflow._validation import expect, expect_count
from expmflow.data.drawing.panels import COLOURS, FAINT, INK, decorate, new_figure
from expmflow.experiments.figures.terms import photograph
from expmflow.operators import ConvOperator

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

NORMS = (0.9, 2.0, 4.0, 8.0)
TERMS = 24
SIZE = 16


@dataclass(frozen=True)
class Terms:
    """Norms of the terms 0, 1, … of the series, relative to the input: the bound, the worst input, and a picture."""

    bound: list[float]
    worst: list[float]
    picture: list[float]


def measured_terms(norm: float, count: int = TERMS) -> Terms:
    """‖M‖ⁱ/i!, ‖Mⁱ‖/i! and ‖Mⁱx‖/(i!‖x‖) for a random 3 × 3 convolution M with ‖M‖ = `norm`, zeros outside.

    In float64, on 16 × 16 points; x is a small photograph.
    """
    expect(norm > 0, "a positive norm", norm)
    expect_count(count, "count")
    kernel = torch.randn(1, 1, 3, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    matrix = ConvOperator(kernel).dense((1, SIZE, SIZE))
    matrix = matrix * (norm / torch.linalg.matrix_norm(matrix, 2))
    x = photograph(SIZE).double().flatten()
    power, worst, picture = torch.eye(SIZE**2, dtype=torch.float64), [], []
    for i in range(count + 1):
        if i:
            power = matrix @ power / i
        worst.append(float(torch.linalg.matrix_norm(power, 2)))
        picture.append(float(_length(power @ x) / _length(x)))
    return Terms([norm**i / math.factorial(i) for i in range(count + 1)], worst, picture)


def bound_figure() -> Figure:
    """One colour for each norm: the bound as a line, the largest possible term and a picture's term as markers."""
    figure = new_figure(8.4, 4.8)
    axis = figure.subplots()
    steps = range(TERMS + 1)
    for norm, colour in zip(NORMS, COLOURS, strict=False):
        terms = measured_terms(norm)
        axis.plot(steps, terms.bound, color=colour, linewidth=1.6, label=rf"$\|M\| = {norm:g}$")
        axis.plot(steps, terms.worst, "o", color=colour, markersize=4.5, markerfacecolor="white", markeredgewidth=1.1)
        axis.plot(steps, terms.picture, ".", color=colour, markersize=4)
    for dtype, name in ((torch.float32, "float32"), (torch.float64, "float64")):
        axis.axhline(torch.finfo(dtype).eps, color=FAINT, linewidth=0.8, linestyle="--")
        axis.text(0.1, 1.5 * torch.finfo(dtype).eps, f"rounding in {name}", fontsize=8, color=INK)
    axis.set_yscale("log")
    axis.set_ylim(1e-17, 2e3)
    axis.set_xlim(-0.3, TERMS + 0.3)
    decorate(axis, "Terms of the exponential series of a random 3 × 3 convolution, relative to the input", "term $i$")
    _legend(axis)
    return figure


def _legend(axis: Axes) -> None:
    """A legend of the colours and the markers."""
    style: dict[str, Any] = {"frameon": False, "fontsize": 9, "labelcolor": INK}
    hollow: dict[str, Any] = {"marker": "o", "linestyle": "", "markerfacecolor": "white", "markersize": 4.5}
    marks = [
        axis.plot([], [], color=INK, linewidth=1.6, label=r"bound, $\|M\|^i/\,i!$"),
        axis.plot([], [], color=INK, label=r"worst input, $\|M^i\|/\,i!$", **hollow),
        axis.plot([], [], ".", color=INK, markersize=4, label="a photograph"),
    ]
    axis.add_artist(axis.legend(handles=[line for (line,) in marks], loc="upper right", **style))
    lines = [line for line in axis.lines if str(line.get_label()).startswith(r"$\|M\| =")]
    axis.legend(handles=lines, loc="lower left", bbox_to_anchor=(0.0, 0.14), **style)


def _length(x: Tensor) -> Tensor:
    return torch.linalg.vector_norm(x)
