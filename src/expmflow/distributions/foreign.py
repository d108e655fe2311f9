"""Bases from `torch.distributions`."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from typing import Any, ClassVar, final

import torch
from torch import Tensor
from torch.distributions import Distribution

from expmflow._validation import expect, expect_type
from expmflow.distributions.gaussian import Base


@final
class TorchBase(Base):
    """A `torch.distributions.Distribution` as the base of a flow; a flow wraps any distribution that it is given.

    It draws its own random numbers, with `rsample` if the distribution has it, so it takes neither noise nor a
    temperature. Its parameters move with the flow (`to`, `double`), but are not trained. To learn a base, use one of
    this package, such as `DiagonalGaussian`, or a layer.

    Args:
        distribution: a density with an empty batch shape: `log_prob` maps `(batch, *event)` to `(batch,)`.

    Example:
        >>> heavy = torch.distributions.Independent(torch.distributions.StudentT(torch.full((2,), 3.0)), 1)
        >>> flow = ef.Flow(T.LinearExp(2), heavy)
        >>> flow.log_prob(flow.sample(5)).shape
        torch.Size([5])
    """

    draws_itself: ClassVar[bool] = True

    def __init__(self, distribution: Distribution) -> None:
        name = type(distribution).__name__
        expect_type(isinstance(distribution, Distribution), "a torch.distributions.Distribution", name)
        batch = tuple(distribution.batch_shape)
        expect(batch == (), "one density, as torch.distributions.Independent makes of a batch", f"{name} × {batch}")
        expect(len(distribution.event_shape) > 0, "a density of events with axes", f"{name} of single numbers")
        super().__init__(tuple(distribution.event_shape))
        self.distribution = distribution
        floats = [tensor for tensor in _tensors(distribution) if tensor.is_floating_point()]
        if floats:
            self.register_buffer("_like", floats[0].new_zeros(()), persistent=False)

    def description(self) -> str:
        return f"{_name(self.distribution)} of torch.distributions, of shape {' × '.join(map(str, self.event_shape))}"

    def log_prob(self, z: Tensor) -> Tensor:
        shape = tuple(z.shape[1:])
        expect(shape == self.event_shape, f"latents of shape (batch, *{self.event_shape})", f"events {shape}")
        return self.distribution.log_prob(z)

    def transform_noise(self, noise: Tensor, temperature: float) -> Tensor:
        raise TypeError(f"Expected a base that takes noise; got {self.description()}, which draws its own.")

    def draw(self, n: int) -> Tensor:
        if n == 0:  # some distributions cannot draw zero samples
            return self._like.new_zeros(0, *self.event_shape)  # type: ignore[operator]
        if self.distribution.has_rsample:
            return self.distribution.rsample(torch.Size((n,)))
        return self.distribution.sample(torch.Size((n,)))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> TorchBase:
        """Moves the tensors of the distribution like those of modules."""
        super()._apply(fn, recurse)
        self.distribution = _mapped(self.distribution, fn)
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> TorchBase:
        """A copy as of any module; torch's own copies of distributions lose the transforms inside, as of a Gumbel."""
        memo[id(self.distribution)] = _mapped(self.distribution, lambda tensor: copy.deepcopy(tensor, memo))
        memo[id(self)] = new = self.__new__(type(self))
        new.__dict__ = copy.deepcopy(self.__dict__, memo)
        return new


def _name(distribution: Distribution) -> str:
    inner = getattr(distribution, "base_dist", None)
    return f"{type(distribution).__name__}{f'({_name(inner)})' if isinstance(inner, Distribution) else ''}"


def _tensors(value: Any) -> list[Tensor]:
    """All tensors inside a distribution, including its inner distributions and transforms."""
    found: list[Tensor] = []
    _mapped(value, lambda tensor: found.append(tensor) or tensor)  # type: ignore[func-returns-value]
    return found


def _mapped(value: Any, fn: Callable[[Tensor], Tensor], known: dict[int, Any] | None = None) -> Any:
    """A copy with `fn` applied to each tensor inside; shared parts stay shared."""
    known = {} if known is None else known
    if isinstance(value, Tensor):
        return fn(value)
    if type(value) in (list, tuple):
        return type(value)(_mapped(part, fn, known) for part in value)
    if isinstance(value, weakref.ref):  # from a transform to its inverse, which it can rebuild
        return None
    if not isinstance(value, Distribution | torch.distributions.Transform):
        return value
    if id(value) not in known:
        known[id(value)] = changed = object.__new__(type(value))
        for name, part in vars(value).items():
            changed.__dict__[name] = _mapped(part, fn, known)
    return known[id(value)]
