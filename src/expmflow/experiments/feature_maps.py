"""The convolution exponential of one picture: forward, inverse, and their errors.

    python -m expmflow.experiments.feature_maps --out runs/feature-maps

The filter is the paper's, m = [0.6, 0, −0.6]. The picture is generated here, so nothing is downloaded. The figure shows
the feature maps of the series in both directions; it needs matplotlib (the extra `report`).
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from expmflow._validation import expect, expect_count
from expmflow.numerics import SeriesPlan, certify, expm_apply
from expmflow.operators import ConvOperator, LinearOperator

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

EDGE_FILTER = (0.6, 0.0, -0.6)
TERMS_SHOWN = 5


@dataclass(frozen=True)
class Outcome:
    """The results of the demo; errors are relative to ‖x‖."""

    x: Tensor
    z: Tensor
    back: Tensor
    plan: SeriesPlan
    norm_bound: float
    log_norm_bound: float
    proven: float
    measured: float
    round_trip_proven: float
    round_trip_measured: float
    logdet: float


def draw_cat(size: int = 64) -> Tensor:
    """A grey cat on black, `(1, 1, size, size)`, values in [0, 1]."""
    expect_count(size, "size", at_least=16)
    pixel = 2 / size
    centres = torch.arange(size) * pixel - 1 + pixel / 2
    y, x = torch.meshgrid(centres, centres, indexing="ij")
    x = x.abs()  # the cat is symmetric: draw one half
    canvas = torch.zeros(size, size)
    shapes = [  # back to front: the signed distance to a shape's edge, and its grey
        (_triangle(x, y, (0.10, -0.50), (0.66, -0.96), (0.76, -0.10)), 0.62),
        (_triangle(x, y, (0.34, -0.52), (0.60, -0.80), (0.66, -0.30)), 0.30),
        (_ellipse(x, y, (0.0, 0.10), (0.80, 0.72)), 0.70),
        (_triangle(x, y, (0.00, -0.60), (0.10, -0.62), (0.04, -0.28)), 0.40),
        (_triangle(x, y, (0.17, -0.60), (0.27, -0.54), (0.19, -0.26)), 0.40),
        (_ellipse(x, y, (0.16, 0.42), (0.22, 0.18)), 0.92),
        (_ellipse(x, y, (0.36, 0.00), (0.20, 0.17)), 1.00),
        (_ellipse(x, y, (0.34, 0.00), (0.07, 0.15)), 0.00),
        (_triangle(x, y, (-0.10, 0.26), (0.10, 0.26), (0.00, 0.37)), 0.10),
        (_segment(x, y, (0.00, 0.36), (0.00, 0.48), 0.02), 0.10),
        (_segment(x, y, (0.00, 0.48), (0.15, 0.43), 0.02), 0.10),
        (_segment(x, y, (0.36, 0.38), (0.95, 0.26), 0.015), 1.00),
        (_segment(x, y, (0.36, 0.46), (0.95, 0.52), 0.015), 1.00),
    ]
    for distance, grey in shapes:
        coverage = (0.5 - distance / pixel).clamp(0, 1)
        canvas = canvas + coverage * (grey - canvas)
    return canvas.reshape(1, 1, size, size)


def edge_operator(dtype: torch.dtype = torch.float32) -> ConvOperator:
    """The paper's edge filter as a 1 × 3 convolution with zero padding."""
    return ConvOperator(torch.tensor(EDGE_FILTER, dtype=dtype).reshape(1, 1, 1, 3))


def run(x: Tensor) -> Outcome:
    """exp(M) x, its inverse, and both errors: the plan's proven bound, and the distance to the dense exponential."""
    op, event_shape = edge_operator(x.dtype), x.shape[1:]
    norm_bound, log_norm_bound = op.norm_bound(event_shape), op.log_norm_bound(event_shape)
    plan = certify(op, event_shape)
    z = expm_apply(op, x, terms=plan)
    back = expm_apply(-op, z, terms=plan)
    proven = plan.proven_bound * math.exp(max(float(log_norm_bound), 0.0))
    return Outcome(
        x=x,
        z=z,
        back=back,
        plan=plan,
        norm_bound=float(norm_bound),
        log_norm_bound=float(log_norm_bound),
        proven=proven,
        measured=_relative_error(z, exact_exponential(x), x),
        # exp(M) is orthogonal: the inverse propagates one error unchanged, and adds one of the same size
        round_trip_proven=proven * (2 + proven),
        round_trip_measured=_relative_error(back, x, x),
        logdet=float(op.trace(event_shape)),
    )


def exact_exponential(x: Tensor) -> Tensor:
    """exp(M) x in float64 by the matrix exponential. The filter works along rows, so one row's matrix is enough."""
    width = x.shape[-1]
    row = ConvOperator(torch.tensor(EDGE_FILTER, dtype=torch.float64).reshape(1, 1, 3))
    return x.double() @ torch.linalg.matrix_exp(row.dense((1, width))).mT


def series_terms(op: LinearOperator, x: Tensor, count: int) -> list[Tensor]:
    """The first terms of the series: x, A x, A²x/2!, …, `count` of them after x."""
    expect_count(count, "count")
    terms = [x]
    for i in range(1, count + 1):
        terms.append(op(terms[-1]) / i)
    return terms


def write_figure(outcome: Outcome, path: Path) -> None:
    """Write the figure as PNG."""
    figure = terms_figure(outcome)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def terms_figure(outcome: Outcome) -> Figure:
    """The feature maps of the series: forward above, backward below."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("Expected matplotlib for the figure; got none. Install the extra `report`.") from error

    op = edge_operator(outcome.x.dtype)
    rows = [
        ("forward", "m", "x", r"z = m {\star}_e x", outcome.x, outcome.z, op),
        ("reverse", "(-m)", "z", r"x = (-m) {\star}_e z", outcome.z, outcome.back, -op),
    ]
    widths = [1.0] * (TERMS_SHOWN + 1) + [0.12, 1.0]  # the narrow column makes room for the dots before the result
    figure = Figure(figsize=(1.72 * sum(widths), 4.6), dpi=150)
    axes = figure.subplots(2, len(widths), gridspec_kw={"width_ratios": widths, "wspace": 0.26, "hspace": 0.42})
    figure.subplots_adjust(left=0.035, right=0.985, top=0.83, bottom=0.11)
    figure.suptitle("The convolution exponential, term by term, with the edge filter $m = [0.6,\\ 0,\\ -0.6]$", y=0.97)
    note = "Each term has its own grey scale, grey being zero. Below each map: its length relative to the picture's."
    figure.text(0.5, 0.025, note, ha="center", fontsize=9)
    length = outcome.x.norm()
    for row, (direction, kernel, start, result, first, last, operator) in zip(axes, rows, strict=True):
        terms = series_terms(operator, first, TERMS_SHOWN)
        *term_axes, gap, last_axis = row
        for i, (axis, term) in enumerate(zip(term_axes, terms, strict=True)):
            largest = float(term.abs().max())
            scale = (0.0, 1.0) if i == 0 else (-largest, largest)
            _show(axis, term, _label(i, kernel, start), f"{float(term.norm() / length):.2g}", scale)
            if i < TERMS_SHOWN:
                axis.text(1.13, 0.5, "+", transform=axis.transAxes, ha="center", va="center")
        gap.axis("off")
        gap.text(0.5, 0.5, r"$+ \cdots =$", transform=gap.transAxes, ha="center", va="center")
        _show(last_axis, last, result, f"{float(last.norm() / length):.2g}", (0.0, 1.0))
        row[0].set_ylabel(direction, fontsize=11)
    return figure


def describe(outcome: Outcome) -> str:
    """The numbers, as the demo prints them."""
    height, width = outcome.x.shape[-2:]
    lines = [
        f"picture          {height} x {width}, {str(outcome.x.dtype).removeprefix('torch.')}",
        f"filter           m = {list(EDGE_FILTER)}",
        f"norm             at most {outcome.norm_bound:.4f} (log-norm at most {outcome.log_norm_bound:.4f})",
        f"plan             {outcome.plan.steps} step(s) of {outcome.plan.terms} terms",
        "",
        "error relative to the picture's length      proven   measured",
        f"  z = exp(M) x                           {outcome.proven:9.1e}   {outcome.measured:8.1e}",
        "  exp(-M) z = x                          "
        f"{outcome.round_trip_proven:9.1e}   {outcome.round_trip_measured:8.1e}",
        "",
        f"log-det          {outcome.logdet:g} (the trace of M, exact)",
    ]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demo; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m expmflow.experiments.feature_maps",
        description="Exponentiate the paper's edge filter on a picture, invert it, and draw the terms.",
        epilog="example: python -m expmflow.experiments.feature_maps --out runs/feature-maps",
    )
    parser.add_argument(
        "--out", type=Path, default=Path("runs/feature-maps"), help="folder for terms.png (default: runs/feature-maps)"
    )
    out: Path = parser.parse_args(arguments).out
    try:
        expect(not out.exists() or out.is_dir(), "--out to be a folder", f"the file {out}")
        outcome = run(draw_cat())
        print(describe(outcome))
        figure = out / "terms.png"
        write_figure(outcome, figure)
    except (ValueError, ImportError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    print(f"figure           {figure}")
    return 0


def _relative_error(value: Tensor, truth: Tensor, scale: Tensor) -> float:
    return float((value.double() - truth.double()).norm() / scale.double().norm())


def _show(axis: Axes, image: Tensor, title: str, caption: str, scale: tuple[float, float]) -> None:
    axis.imshow(image[0, 0].numpy(), cmap="gray", vmin=scale[0], vmax=scale[1])
    axis.set_title(f"${title}$", fontsize=11)
    axis.set_xlabel(caption, fontsize=9, labelpad=3)
    axis.set_xticks([])
    axis.set_yticks([])


def _label(power: int, kernel: str, start: str) -> str:
    if power == 0:
        return start
    exponent = rf"{{\star}}^{power}" if power > 1 else r"{\star}"
    return rf"{kernel} {exponent} {start}" + (rf"\,/\,{power}!" if power > 1 else "")


# --- signed distances: negative inside -------------------------------------------------------------------------------

Point = tuple[float, float]


def _ellipse(x: Tensor, y: Tensor, centre: Point, radii: Point) -> Tensor:
    return (torch.hypot((x - centre[0]) / radii[0], (y - centre[1]) / radii[1]) - 1) * min(radii)


def _segment(x: Tensor, y: Tensor, start: Point, end: Point, width: float) -> Tensor:
    dx, dy = end[0] - start[0], end[1] - start[1]
    along = (((x - start[0]) * dx + (y - start[1]) * dy) / (dx * dx + dy * dy)).clamp(0, 1)
    return torch.hypot(x - start[0] - along * dx, y - start[1] - along * dy) - width


def _triangle(x: Tensor, y: Tensor, *corners: Point) -> Tensor:
    """Corners in clockwise order as seen on the screen (y points down)."""
    edges = zip(corners, corners[1:] + corners[:1], strict=True)
    sides = [((x - a[0]) * (b[1] - a[1]) - (y - a[1]) * (b[0] - a[0])) / math.dist(a, b) for a, b in edges]
    return torch.stack(sides).amax(0)


if __name__ == "__main__":
    sys.exit(main())
