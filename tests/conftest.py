"""What every test may ask for."""

from __future__ import annotations

from collections.abc import Callable, Iterator

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
