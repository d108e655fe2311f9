"""Whole models, each readable as one list of layers."""

from expmflow.models.dense import dense_flow
from expmflow.models.graph import graph_flow
from expmflow.models.image import image_flow

__all__ = ["dense_flow", "graph_flow", "image_flow"]
