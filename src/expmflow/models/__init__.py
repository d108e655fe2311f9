"""Whole models, each readable as one list of layers."""

from expmflow.models.dense import dense_flow

__all__ = ["dense_flow"]
