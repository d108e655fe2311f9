"""Bridges to other libraries."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from expmflow.interop import pyg
from expmflow.interop.torch_distributions import TransformAdapter, as_transform

if TYPE_CHECKING:
    from expmflow.interop import sklearn

__all__ = ["TransformAdapter", "as_transform", "pyg", "sklearn"]


def __getattr__(name: str) -> Any:
    """Load scikit-learn, an extra, on first use."""
    if name == "sklearn":
        return import_module("expmflow.interop.sklearn")
    raise AttributeError(f"module 'expmflow.interop' has no attribute {name!r}")
