"""The paper's figures, drawn by the library itself: `expmflow figures`."""

from expmflow.experiments.figures.registry import FIGURES, Sources, write_figure

__all__ = ["FIGURES", "Sources", "write_figure"]
