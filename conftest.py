"""Doctests find `torch`, `ef` and `T` as the documentation's readers do."""

from typing import Any

import pytest
import torch

import expmflow as ef
from expmflow import transforms as T


@pytest.fixture(autouse=True)
def _names(doctest_namespace: dict[str, Any]) -> None:
    doctest_namespace.update(torch=torch, ef=ef, expmflow=ef, T=T)
    torch.manual_seed(0)
