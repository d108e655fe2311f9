"""A convolution as one matrix, and its exponential, for each kind of padding."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from expmflow.data.drawing.panels import INK, new_figure
from expmflow.operators import ConvOperator

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SIZE = 5
KERNEL = ((0.1, -0.4, 0.2), (0.5, 0.3, -0.5), (-0.2, 0.4, 0.1))
PADDINGS = {"zeros": "zeros around the image", "circular": "circular", "reflect": "reflected at the edges"}


def equivalent_matrices(padding: str) -> tuple[Tensor, Tensor]:
    """M of the 3 × 3 kernel on an image of 5 × 5 points, `(25, 25)`, and exp(M), in float64."""
    kernel = torch.tensor(KERNEL, dtype=torch.float64).reshape(1, 1, 3, 3)
    matrix = ConvOperator(kernel, padding=padding).dense((1, SIZE, SIZE))  # type: ignore[arg-type]
    return matrix, torch.linalg.matrix_exp(matrix)


def matrices_figure() -> Figure:
    """M above and exp(M) below, with the determinant computed from the trace; the kernel to their left."""
    figure = new_figure(10.8, 6.6)
    axes = figure.subplots(2, 4, gridspec_kw={"width_ratios": [0.55, 1, 1, 1]})
    matrices = {padding: equivalent_matrices(padding) for padding in PADDINGS}
    limits = [max(float(pair[k].abs().max()) for pair in matrices.values()) for k in range(2)]
    _kernel(axes[0, 0], limits[0])
    axes[1, 0].axis("off")
    for column, (padding, label) in enumerate(PADDINGS.items(), start=1):
        matrix, exponential = matrices[padding]
        _show(axes[0, column], matrix, limits[0], f"$M$, {label}")
        trace, logdet = float(matrix.trace()), float(torch.linalg.slogdet(exponential).logabsdet)
        _show(axes[1, column], exponential, limits[1], r"$\exp(M)$")
        axes[0, column].set_xlabel(rf"$\mathrm{{tr}}\, M = {trace:.2f}$", fontsize=11, color=INK)
        axes[1, column].set_xlabel(rf"$\log\det \exp(M) = {logdet:.2f}$", fontsize=11, color=INK)
    for row, limit in enumerate(limits):
        image = axes[row, 3].images[0]
        figure.colorbar(image, ax=axes[row, 3], shrink=0.8, ticks=[-limit, 0, limit], format="{x:.1f}")
    return figure


def _kernel(axis: Axes, limit: float) -> None:
    axis.imshow(KERNEL, cmap="RdBu_r", vmin=-limit, vmax=limit)
    for i, row in enumerate(KERNEL):
        for j, value in enumerate(row):
            colour = "white" if abs(value) > 0.6 * limit else INK
            axis.text(j, i, f"{value:g}".replace("-", "−"), ha="center", va="center", fontsize=10, color=colour)
    _bare(axis, "kernel $m$")


def _show(axis: Axes, matrix: Tensor, limit: float, title: str) -> None:
    """Draw a matrix: white is zero; lines mark where a row of the image ends."""
    axis.imshow(matrix.numpy(), cmap="RdBu_r", vmin=-limit, vmax=limit, interpolation="nearest")
    for k in range(1, SIZE):
        for line in (axis.axhline, axis.axvline):
            line(k * SIZE - 0.5, color="#d1d5db", linewidth=0.6)
    _bare(axis, title)


def _bare(axis: Axes, title: str) -> None:
    axis.set_title(title, fontsize=12, color=INK)
    axis.set_xticks([])
    axis.set_yticks([])
