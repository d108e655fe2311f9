"""Samples of any kind as one picture."""

from __future__ import annotations

from pathlib import Path
from typing import IO

from torch import Tensor

from expmflow.report.figures import samples_figure, save_figure
from expmflow.report.graph_figures import graphs_figure
from expmflow.report.grids import image_grid, save_grid

SHOWN = {1: 2000, 2: 1000, 3: 64}  # rows of tables, graphs, images: events of one, two and three axes


def draw_samples(
    target: Path | IO[bytes],
    samples: Tensor,
    *,
    data: Tensor | None = None,
    levels: int | None = None,
    columns: int | None = None,
) -> None:
    """A PNG file: images in a grid, and without the data; graphs and rows of a table beside the data, if given.

    Args:
        target: the file.
        samples: `(n, *event)`.
        data: rows to compare with.
        levels: the grey levels of images, 256 if not given.
        columns: images in a line.
    """
    if samples.ndim == 4:
        save_grid(image_grid(samples, levels or 256, columns=columns), target)
    elif samples.ndim == 3:
        save_figure(graphs_figure(data, samples), target)
    else:
        save_figure(samples_figure(data, samples), target)
