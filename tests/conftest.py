"""What every test may ask for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import hypothesis
import pytest
import torch

hypothesis.settings.register_profile("repeatable", derandomize=True, deadline=None, max_examples=50, database=None)
hypothesis.settings.load_profile("repeatable")


@pytest.fixture
def default_dtype() -> Iterator[Callable[[torch.dtype], None]]:
    """Set torch's default dtype, for this test only."""
    before = torch.get_default_dtype()
    yield torch.set_default_dtype
    torch.set_default_dtype(before)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder to work in, so that whatever is written can be found."""
    monkeypatch.chdir(tmp_path)
    return tmp_path
