"""Bridges to other libraries."""

from expmflow.interop import pyg
from expmflow.interop.torch_distributions import TransformAdapter, as_transform

__all__ = ["TransformAdapter", "as_transform", "pyg"]
