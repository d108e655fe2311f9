"""The style of every figure."""

from __future__ import annotations

from pathlib import Path
from typing import IO, TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = ("#2563eb", "#d97706", "#059669", "#db2777", "#7c3aed", "#0891b2", "#dc2626", "#4b5563")
INK, FAINT = "#1f2937", "#9ca3af"
DPI = 160

Extent = tuple[float, float, float, float]
"""Left, right, bottom, top."""


def new_figure(width: float, height: float) -> Figure:
    """A figure that needs no window system."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("Expected matplotlib for figures; got none. Install the extra `report`.") from error
    return Figure(figsize=(width, height), dpi=DPI, layout="constrained")


def save_figure(figure: Figure, target: Path | IO[bytes]) -> None:
    """Save as PNG, whatever the file's suffix."""
    figure.savefig(target, format="png")


def frame(axis: Axes, title: str, extent: Extent) -> None:
    """Set the part of the plane that a panel shows."""
    axis.set_xlim(extent[0], extent[1])
    axis.set_ylim(extent[2], extent[3])
    axis.set_aspect("auto" if stretched(extent) else "equal")
    decorate(axis, title, "", grid=False)


def decorate(axis: Axes, title: str, xlabel: str, *, grid: bool = True) -> None:
    """Apply the style of every panel."""
    axis.set_title(title, fontsize=10, color=INK, loc="left")
    axis.set_xlabel(xlabel, fontsize=9, color=INK)
    axis.tick_params(labelsize=8, colors=INK)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axis.spines[side].set_color(FAINT)
    if grid:
        axis.grid(color="#e5e7eb", linewidth=0.6)
        axis.set_axisbelow(True)


def extent_of(points: Tensor) -> Extent:
    """The range of points in the plane, with a margin."""
    least, largest = points.double().amin(0), points.double().amax(0)
    margin = 0.08 * (largest - least).clamp_min(1e-6)
    (x0, y0), (x1, y1) = (least - margin).tolist(), (largest + margin).tolist()
    return x0, x1, y0, y1


def stretched(extent: Extent) -> bool:
    """Whether to scale the axes separately, because equal scales would give a thin strip."""
    ratio = (extent[3] - extent[2]) / (extent[1] - extent[0])
    return not 0.3 < ratio < 3


def aspect(extent: Extent) -> float:
    """Height over width."""
    return 1.0 if stretched(extent) else (extent[3] - extent[2]) / (extent[1] - extent[0])
