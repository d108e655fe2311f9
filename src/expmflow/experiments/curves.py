"""Learning curves of rows, by steps and by seconds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from expmflow.data.drawing.panels import COLOURS, INK, decorate, new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DASHES = ("-", "--", ":", "-.")  # one for each seed


def draw_curves(rows: Sequence[Mapping[str, Any]], labels: Mapping[str, str], path: Path) -> None:
    """`curves_figure` as SVG; the same rows give the same file."""
    import matplotlib

    figure = curves_figure(rows, labels)
    with matplotlib.rc_context({"svg.hashsalt": path.name}):
        temporary = path.with_name(f".{path.name}.tmp")
        figure.savefig(temporary, format="svg", metadata={"Date": None})
    temporary.replace(path)


def curves_figure(rows: Sequence[Mapping[str, Any]], labels: Mapping[str, str]) -> Figure:
    """The validation results of all rows against their steps and against the seconds of their training.

    Args:
        rows: of a table of images, each with its `curve` and what a step takes.
        labels: what to call the models.
    """
    figure = new_figure(12, 3.6)
    left, right = figure.subplots(1, 2, sharey=True)
    models, seeds = list(labels), sorted({row["seed"] for row in rows})
    values = sorted(bits for row in rows for _, bits in row["curve"] if bits is not None)
    for row in rows:
        points = [(step, bits) for step, bits in row["curve"] if bits is not None]
        colour = COLOURS[models.index(row["model"]) % len(COLOURS)]
        style = {"color": colour, "linewidth": 1.5, "linestyle": DASHES[seeds.index(row["seed"]) % len(DASHES)]}
        label = labels[row["model"]] + (f", seed {row['seed']}" if len(seeds) > 1 else "")
        steps, bits = [step for step, _ in points], [value for _, value in points]
        left.plot(steps, bits, label=label, **style)
        right.plot([step * row["seconds_per_step"] for step in steps], bits, **style)
    if values:  # the first validations are far off and would flatten all others
        highest = values[int(0.85 * (len(values) - 1))]
        margin = 0.06 * max(highest - values[0], 1e-3)
        left.set_ylim(values[0] - margin, highest + margin)
    decorate(left, "validation, bits per dimension", "steps")
    decorate(right, "", "seconds of training")
    figure.legend(loc="outside right upper", frameon=False, fontsize=9, labelcolor=INK)
    return figure
