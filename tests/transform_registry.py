"""What the registry in `transform_cases` is made of."""

from __future__ import annotations

import copy
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from expmflow import transforms as T
from expmflow.nn import ConvInner, GraphInner, GraphNetwork, PowerConstraint, SpectralConstraint
from expmflow.transforms.autoregressive import Autoregressive
from expmflow.transforms.emerging import CornerConv

BATCH = 3  # no other axis of a context has this length, so that it is plain which contexts belong to rows
F64 = torch.float64


@dataclass
class Case:
    """A layer, the shape of an event, and what else it takes.

    `wrong_event` and `wrong_contexts` are to be refused by a `ValueError` that names `culprit` (the layer, or the part
    of it that minds). Layers that take any event have no wrong one. `idle` names parameters that cannot matter.
    """

    layer: T.Transform
    event: tuple[int, ...]
    context: Any = None
    wrong_event: tuple[int, ...] | None = None
    wrong_contexts: Sequence[Any] = ()
    culprit: str = ""
    idle: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        self.layer = self.layer.double()
        self.culprit = self.culprit or self.name

    @property
    def name(self) -> str:
        """The name of the layer's class; `parametrize` puts a prefix before it."""
        return type(self.layer).__name__.removeprefix("Parametrized")


class Cases(dict[str, Callable[[], Case]]):
    """Named cases; a name is taken once."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._ready: dict[str, Case] = {}

    def add(self, name: str) -> Callable[[Callable[[], Case]], Callable[[], Case]]:
        """A decorator that puts a case under its name."""

        def register(make: Callable[[], Case]) -> Callable[[], Case]:
            assert name not in self, name
            self[name] = make
            return make

        return register

    def ready(self, name: str) -> Case:
        """A case with random parameters that its constraints have settled on, in evaluation mode; the caller's own."""
        if name not in self._ready:
            torch.manual_seed(seed(name))
            case = self[name]()
            randomise(case.layer)
            inner = case.layer.transform if isinstance(case.layer, T.Inverse) else case.layer
            settle(inner, points(name, case), case.context)
            case.layer.eval()
            self._ready[name] = case
        return copy.deepcopy(self._ready[name])


def seed(name: str) -> int:
    return zlib.crc32(name.encode())


def draw(name: str, *shape: int) -> Tensor:
    """Standard normal entries that depend on the name only."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed(name)), dtype=F64)


def points(name: str, case: Case) -> Tensor:
    return draw(f"{name} x", BATCH, *case.event)


def mapped(context: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """A context with each tensor in it changed."""
    if isinstance(context, tuple):
        return tuple(mapped(part, change) for part in context)
    return change(context) if isinstance(context, Tensor) else context


def rows_of(context: Any, rows: slice) -> Any:
    """The context of some of the rows."""
    return mapped(context, lambda tensor: tensor[rows] if tensor.shape[0] == BATCH else tensor)


@torch.no_grad()
def randomise(layer: nn.Module) -> None:
    """Weights under a norm constraint far beyond it, output layers away from zero, all others moved."""
    for parameter in layer.parameters():
        parameter.add_(0.3 * torch.randn_like(parameter))
    for module in layer.modules():
        if isinstance(module, T.GraphConvExp):
            module.theta0.mul_(10)
            module.theta1.mul_(10)
        if isinstance(module, parametrize.ParametrizationList):
            module.original.normal_(std=5.0 if _limited(module) else 1.0)
    for module in layer.modules():
        if isinstance(module, GraphNetwork):  # five layers deep: their gains multiply
            for parameter in module.parameters():
                parameter.mul_(0.5)
        if isinstance(module, CornerConv):  # errors grow along the rows and columns of its inverse
            module.parametrizations.weight.original.mul_(0.3)
        if isinstance(module, GraphInner | ConvInner | Autoregressive):  # heads of order one
            for part in module.modules():
                if isinstance(part, parametrize.ParametrizationList) and not _limited(part):
                    part.original.div_(part.original[0].numel() ** 0.5)


def _limited(parts: parametrize.ParametrizationList) -> bool:
    return any(isinstance(step, SpectralConstraint | PowerConstraint) for step in parts)


def settle(layer: T.Transform, x: Tensor, context: Any = None, rounds: int = 30) -> None:
    """Training passes, in which constraints find the norms of the weights, and ActNorm its start."""
    layer.train()
    with torch.no_grad():
        for _ in range(rounds):
            layer(x, context)
