"""Tests for your own operators and layers: an `AssertionError` names the fact that does not hold."""

from expmflow.testing.operators import check_operator
from expmflow.testing.transforms import check_transform

__all__ = ["check_operator", "check_transform"]
