"""All figures by name; a new one is one entry."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from expmflow.experiments.figures.bound import bound_figure
from expmflow.experiments.figures.matrices import matrices_figure
from expmflow.experiments.figures.samples import check_graphs, graphs_figure, samples_figure, samples_source
from expmflow.experiments.figures.terms import terms_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FORMATS = ("png", "svg")


@dataclass(frozen=True)
class Sources:
    """The sources of trained models.

    Args:
        results: the folder with the tables, and the weights beside them.
        run: a run of images to sample from; if None, the best convolutional Sylvester flow in `results`, or, if there
            is none, the model `digits`, which ships with the package.
    """

    results: Path = Path("results")
    run: str | Path | None = None


@dataclass(frozen=True)
class Entry:
    """A figure: its content, how it is drawn, and a check that raises `ValueError` if something it needs is missing."""

    about: str
    draw: Callable[[Sources], Figure]
    check: Callable[[Sources], object] = lambda sources: None


FIGURES: dict[str, Entry] = {
    "matrix": Entry("a convolution as a matrix, and its exponential", lambda sources: matrices_figure()),
    "terms": Entry("the feature maps of an edge filter, term by term", lambda sources: terms_figure()),
    "bound": Entry("how fast the terms vanish", lambda sources: bound_figure()),
    "samples": Entry(
        "samples of a convolutional Sylvester flow",
        lambda sources: samples_figure(samples_source(sources.results, sources.run)),
        lambda sources: samples_source(sources.results, sources.run),
    ),
    "graphs": Entry(
        "samples of graph flows beside their data",
        lambda sources: graphs_figure(sources.results),
        lambda sources: check_graphs(sources.results),
    ),
}


def write_figure(name: str, folder: Path, sources: Sources, formats: Sequence[str] = FORMATS) -> list[Path]:
    """Draw a figure into `folder`, once for each format; the same sources make the same files."""
    import matplotlib

    figure = FIGURES[name].draw(sources)
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for ending in formats:
        path = folder / f"{name}.{ending}"
        temporary = path.with_name(f".tmp-{path.name}")
        stamp = {"Date": None} if ending == "svg" else None
        try:
            with matplotlib.rc_context({"svg.hashsalt": name}):
                figure.savefig(temporary, format=ending, metadata=stamp)
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
        written.append(path)
    return written
