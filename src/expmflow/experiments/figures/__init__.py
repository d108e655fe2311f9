"""The paper's figures, drawn by the library itself: `expmflow figures`."""

from expmflow.experiments.figures.registry import FIGURES, Sources, write_figure
from expmflow.experiments.figures.samples import MissingWeightsError

__all__ = ["FIGURES", "MissingWeightsError", "Sources", "write_figure"]
