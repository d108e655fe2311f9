"""A model as a program: its arguments in order, their meaning, and its result."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, final

import torch
from torch import Tensor, nn
from torch.distributions import Distribution

from expmflow._validation import expect
from expmflow.distributions import Density, Draw
from expmflow.distributions.foreign import TorchBase
from expmflow.distributions.protocol import is_shared_graph, repeat_context

What = Literal["likelihood", "sample"]
NUMBERS = {"uniform": "uniform numbers in [0, 1)", "normal": "standard normal numbers"}
BYTES = 256


@dataclass(frozen=True)
class Input:
    """An argument of a program.

    Args:
        name: the name of the argument; arguments are passed in their order.
        shape: that of one row; for a shared argument, that of the whole.
        dtype: of torch, such as `"float32"`.
        meaning: its content, for people.
        shared: whether all rows share it, like a graph.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    meaning: str
    shared: bool = False


@dataclass(frozen=True)
class Program:
    """The arguments of a program, in order, and the meaning of its result."""

    what: What
    inputs: tuple[Input, ...]
    result: str


@final
class Runnable(nn.Module):
    """A model as a function of tensors: `(x, [context], *noise)` to likelihoods, or `([context], *noise)` to rows.

    Args:
        model: in evaluation mode.
        what: which of the two functions.
        context: an example, with at least one row; or a graph that all rows share.
    """

    def __init__(self, model: Density, what: What, context: Tensor | None) -> None:
        super().__init__()
        self.model = model
        self.what = what
        self.context = context
        self.draws = model.draws if what == "likelihood" else model.sample_draws
        self.axes = len(model.event_shape)
        self.shares = is_shared_graph(context, self.axes)
        for base in (part for part in model.modules() if isinstance(part, TorchBase)):
            _without_validation(base.distribution)

    def forward(self, *inputs: Tensor) -> Tensor:
        rest = list(inputs)
        x = rest.pop(0) if self.what == "likelihood" else None
        context = None if self.context is None else rest.pop(0)
        if x is None:
            return self.model.sample(rest[0].shape[0], context, noise=rest)
        return self.model(x, context, noise=rest or None)

    def example(self, rows: int, seed: int = 0) -> dict[str, Tensor]:
        """Example arguments by name, for rows that are samples of the model; the same for the same seed."""
        inputs: dict[str, Tensor] = {}
        context = self.context
        if context is not None and not self.shares:
            context = repeat_context(context[:1], 1, rows, axes=self.axes)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            if self.what == "likelihood":
                drawn = self.model.sample(rows, context)
                inputs["x"] = drawn.to(torch.uint8) if self.model.levels and self.model.levels <= BYTES else drawn
            inputs |= {} if context is None else {"context": context}
            like = next(part for part in (*self.model.parameters(), *self.model.buffers()) if part.is_floating_point())
            inputs |= {name: draw.sample(rows, like) for name, draw in self._noise()}
        return inputs

    def program(self) -> Program:
        """What a user has to know to call it."""
        example = self.example(1)
        meanings = {name: NUMBERS[draw.kind] for name, draw in self._noise()}
        levels = self.model.levels
        meanings["x"] = "the data, in its own units" if levels is None else f"whole numbers from 0 to {levels - 1}"
        meanings["context"] = "the graph of all rows" if self.shares else "what each row is conditioned on"
        inputs = tuple(
            Input(
                name,
                tuple(value.shape if name == "context" and self.shares else value.shape[1:]),
                str(value.dtype).removeprefix("torch."),
                meanings[name],
                name == "context" and self.shares,
            )
            for name, value in example.items()
        )
        bound = "a lower bound on log p(x) for this noise" if self.model.is_bound else "log p(x)"
        result = f"(batch,): {bound}, in nats" if self.what == "likelihood" else "(batch, *row): samples"
        return Program(self.what, inputs, result)

    def _noise(self) -> list[tuple[str, Draw]]:
        several = len(self.draws) > 1
        return [(f"noise_{k}" if several else "noise", draw) for k, draw in enumerate(self.draws)]


def _without_validation(distribution: Distribution) -> None:
    """Turn off torch's checks of a distribution's values: while a program is recorded, there are none."""
    part: object = distribution
    while isinstance(part, Distribution):
        part._validate_args = False
        part = getattr(part, "base_dist", None)


def check_exportable(model: Density, what: What) -> None:
    """Raise `ValueError` for models that no program can represent, before anything is recorded."""
    random = model.random_layers
    expect(not random, "exact log-determinants", f"random estimates in {', '.join(random)}")
    if what == "sample":
        expect(len(model.sample_draws) > 0, "samples made of noise that is given", "a base that draws its own")
