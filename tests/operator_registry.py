"""What the registry in `operator_cases` is made of."""

from __future__ import annotations

import zlib
from collections.abc import Callable

import torch
from torch import Tensor

import expmflow as ef

Case = Callable[[torch.dtype], tuple[ef.LinearOperator, tuple[int, ...]]]


class Cases(dict[str, Case]):
    """Named cases; a name is taken once."""

    def add(self, name: str) -> Callable[[Case], Case]:
        """A decorator that puts a case under its name."""

        def register(make: Case) -> Case:
            assert name not in self, name
            self[name] = make
            return make

        return register


def draw(name: str, *shape: int, dtype: torch.dtype) -> Tensor:
    """Standard normal entries that depend on the name only: float32 is float64 rounded."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def parameter(name: str, *shape: int, dtype: torch.dtype, size: float) -> Tensor:
    return (size * draw(name, *shape, dtype=dtype)).requires_grad_()
