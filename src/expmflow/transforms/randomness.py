"""The random numbers inside layers, as a pure function of a key, the layer's name and the sample.

A layer whose log-determinant is a random estimate calls `signs` and `poisson`. By default, these draw from torch's own
generator. Within `keyed_draws` they follow from the key that the caller gives (say seed and step), from the layer's
name in the model and from the sample's index, so neither batches nor processes change them.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class _Draws:
    key: str
    names: dict[nn.Module, str]
    rows: Sequence[int | str]

    def generator(self, layer: nn.Module, label: str, row: int | str = "") -> torch.Generator:
        text = f"{self.key}:{self.names[layer]}:{label}:{row}"
        digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
        return torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)

    def check(self, layer: nn.Module, rows: int) -> None:
        if layer not in self.names:
            raise ValueError("Expected a layer of the model that the draws are for; got another.")
        if rows != len(self.rows):
            raise ValueError(f"Expected {len(self.rows)} rows, as the draws are for; got {rows}.")


class _State(threading.local):
    draws: _Draws | None = None


_state = _State()


@contextmanager
def keyed_draws(model: nn.Module, key: str, rows: Sequence[int | str]) -> Iterator[None]:
    """A context in which the random numbers of `model`'s layers are a pure function of `key`, layer name and sample.

    Args:
        model: the evaluated model, without wrappers that change the names of its layers.
        key: identifies the evaluation, for example by seed and step.
        rows: for each row of the batch, what identifies its sample, for example its index in the global batch.

    Example:
        >>> block = T.ResidualBlock(expmflow.nn.LipschitzMLP(2)).eval()
        >>> x = torch.randn(4, 2)
        >>> with T.keyed_draws(block, "seed 0, step 7", range(4)):
        ...     whole = block(x)[1]
        >>> with T.keyed_draws(block, "seed 0, step 7", range(2, 4)):
        ...     half = block(x[2:])[1]
        >>> torch.allclose(whole[2:], half)
        True
    """
    names = {module: name for name, module in model.named_modules()}
    before, _state.draws = _state.draws, _Draws(key, names, rows)
    try:
        yield
    finally:
        _state.draws = before


def signs(layer: nn.Module, x: Tensor) -> Tensor:
    """±1, each with probability ½, in the shape of `x`."""
    draws = _state.draws
    if draws is None:
        return torch.empty_like(x).bernoulli_(0.5).mul_(2).sub_(1)
    draws.check(layer, x.shape[0])
    generators = [draws.generator(layer, "signs", row) for row in draws.rows]
    drawn = [torch.randint(2, x.shape[1:], generator=generator, device="cpu") for generator in generators]
    return 2 * torch.stack(drawn).to(x) - 1 if drawn else torch.empty_like(x)


def poisson(layer: nn.Module, rate: float, rows: int, *, per_row: bool) -> Tensor:
    """`(rows,)` whole numbers, Poisson-distributed, on the CPU: one number for all rows, or one for each."""
    draws = _state.draws
    rates = torch.full((rows if per_row else 1,), rate, dtype=torch.float64, device="cpu")
    if draws is None:
        return torch.poisson(rates).long().expand(rows)
    draws.check(layer, rows)
    labels = draws.rows if per_row else [""]
    drawn = [torch.poisson(rates[:1], draws.generator(layer, "poisson", row)) for row in labels]
    return torch.cat(drawn).long().expand(rows) if drawn else rates.long()
