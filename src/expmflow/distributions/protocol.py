"""The protocol of every trained model: all that training, evaluation and reports use.

A flow knows log p(x) itself. A dequantized flow, or a VAE, knows a random number whose exponential has the mean p(x):
the mean of the number itself lies below log p(x), and the logarithm of the mean of many such exponentials approaches
it. A flow with a residual layer knows log p(x) up to a random error of mean zero. For a training loop, these differ in
the random numbers that one evaluation takes, and in the meaning of the result; the protocol covers both.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, final

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from expmflow._validation import expect, expect_count, expect_type
from expmflow.distributions.bounds import elbo, estimate_log_weights, importance_weighted
from expmflow.transforms.base import Composite, Transform

NoiseKind = Literal["uniform", "normal"]
Noise = Tensor | Sequence[Tensor] | None
"""One tensor `(batch, *shape)` for each `Draw`, in their order; a single tensor stands for a sequence of one. If None,
the density draws the numbers itself, from torch's own generator."""


@dataclass(frozen=True)
class Draw:
    """The kind and shape of random numbers that one row takes."""

    kind: NoiseKind
    shape: tuple[int, ...]

    def sample(self, rows: int, like: Tensor) -> Tensor:
        """`(rows, *shape)` of the dtype and on the device of `like`, from torch's own generator."""
        draw = torch.rand if self.kind == "uniform" else torch.randn
        return draw((rows, *self.shape), dtype=like.dtype, device=like.device)


@dataclass(frozen=True)
class Latents:
    """What the latent variables of a density reveal about some rows, for people to look at.

    Args:
        rows: the rows.
        reconstructions: the expectation of each row given its latents, as floats.
        path: the expectations along a straight line between the latents of the first row and of the second.
        kl: for each latent dimension, the KL divergence in nats, averaged over the rows.
    """

    rows: Tensor
    reconstructions: Tensor
    path: Tensor
    kl: Tensor


class Density(nn.Module, ABC):
    """A density that can be trained, evaluated and sampled.

    Calling it gives log p(x | context), or one random sample of a lower bound on it. Rows of the batch are independent
    of each other, both in the computation and in their noise: row k of a result depends only on row k of `x`, of the
    context and of the noise. So results do not depend on batches or processes.

    A new density implements `event_shape`, `forward`, `sample` and `description`. Optional members: `is_bound` if the
    result is a bound, `draws` and `sample_draws` for the random numbers of likelihoods and samples, `levels` for
    integer data, and `takes_beta` if training weighs a part of the bound.

    Example:
        >>> flow = ef.Flow(T.ActNorm(2), ef.distributions.StandardNormal((2,)))
        >>> flow.event_shape, flow.exact, flow.draws, flow.sample_draws
        ((2,), True, (), (Draw(kind='normal', shape=(2,)),))
    """

    is_bound: bool = False
    """Whether the mean over the noise lies below log p(x): an evidence lower bound. If the layers inside are exact, the
    exponential of the result has the mean p(x), so results are log weights of importance samples."""

    takes_double: bool = False
    """Whether rows of floats should come in float64 for any dtype of the density, because it standardises them."""

    takes_beta: ClassVar[bool] = False
    """Whether `forward` takes `beta`, a scalar tensor with which training weighs the Kullback-Leibler part of a bound
    during its first steps (`optim.kl_warmup`). Without it, the weight is 1 and the bound is complete."""

    @property
    @abstractmethod
    def event_shape(self) -> tuple[int, ...]:
        """The shape of one row; if rows may have several shapes, that of samples without a context."""

    @property
    def levels(self) -> int | None:
        """The number of integer levels: rows hold 0 … levels − 1. None if rows are floats."""
        return None

    @property
    def draws(self) -> tuple[Draw, ...]:
        """The random numbers that the likelihood of one row takes; none for an exact one."""
        return ()

    @property
    def sample_draws(self) -> tuple[Draw, ...]:
        """The random numbers that one sample takes."""
        return (Draw("normal", self.event_shape),)

    @property
    @final
    def exact(self) -> bool:
        """Whether the result is log p(x) itself: neither a bound nor a random estimate."""
        return not self.is_bound and not self.random_layers

    @property
    @final
    def random_layers(self) -> tuple[str, ...]:
        """The names of layers whose log-determinant is a random estimate, which makes the exponential of a result
        biased."""
        layers = [(name, layer) for name, layer in self.named_modules() if isinstance(layer, Transform)]
        return tuple(name for name, layer in layers if not (layer.exact_logdet or isinstance(layer, Composite)))

    def start_from(self, rows: Tensor) -> None:
        """Called once with the training rows, before training, to initialise from them."""

    @abstractmethod
    def forward(self, x: Tensor, context: Any = None, *, noise: Noise = None) -> Tensor:
        """log p(x | context) or a sample of its lower bound, `(batch,)` in nats, differentiable.

        Args:
            x: `(batch, *event)`.
            context: one row for each of `x`, or one for all (a graph); None for an unconditional density.
            noise: the random numbers of `draws`.
        """

    @abstractmethod
    def sample(self, n: int, context: Any = None, *, temperature: float = 1.0, noise: Noise = None) -> Tensor:
        """`(n, *event)`, without gradients.

        Args:
            n: the number of samples.
            context: one row for each sample, or one for all.
            temperature: multiplies the standard deviation of the noise.
            noise: the random numbers of `sample_draws`.
        """

    @abstractmethod
    def description(self) -> str:
        """The parts of the density, for people."""

    def round_trip_error(self, x: Tensor, context: Any = None) -> Tensor | None:
        """The largest |x − x'| of each row, with x' recovered from the noise of x; None if there is no inverse."""
        return None

    def latents(self, x: Tensor) -> Latents | None:
        """The latent variables of at least two rows; None if there are none."""
        return None

    def __copy__(self) -> Density:
        new = self.__new__(type(self))
        new.__dict__ = self.__dict__.copy()
        return new

    def __deepcopy__(self, memo: dict[int, Any]) -> Density:
        memo[id(self)] = new = self.__new__(type(self))
        new.__dict__ = copy.deepcopy(self.__dict__, memo)
        return new

    def __reduce_ex__(self, protocol: Any) -> Any:
        """For pickle and `torch.save`: raises with advice if torch cannot pickle constrained weights."""
        constrained = any(parametrize.is_parametrized(module) for module in self.modules())
        better = "ef.save(flow, folder), or torch.save of flow.state_dict(), for weights under a constraint"
        expect_type(not constrained, better, "pickle")
        return super().__reduce_ex__(protocol)

    @final
    def describe(self) -> None:
        """Print the `description`."""
        print(self.description())

    @final
    def log_weights(self, x: Tensor, context: Any = None, *, samples: int, chunk: int = 16) -> Tensor:
        """`(samples, batch)` results with independent noise, without gradients; `chunk` copies of a row at a time."""

        def sample(count: int) -> Tensor:
            rows = repeat_context(context, x.shape[0], count, axes=x.ndim - 1) if _per_row(context, x) else context
            return self(x.repeat_interleave(count, 0), rows).reshape(-1, count).T

        return estimate_log_weights(sample, samples, chunk=chunk)

    @final
    def elbo(self, x: Tensor, context: Any = None, *, samples: int = 1) -> Tensor:
        """The mean of `samples` results for each row, `(batch,)`; for a bound, the evidence lower bound."""
        return elbo(self.log_weights(x, context, samples=samples))

    @final
    def importance_weighted(self, x: Tensor, context: Any = None, *, samples: int, chunk: int = 16) -> Tensor:
        """The importance-weighted bound on log p(x), `(batch,)`."""
        self.check_weighable(samples)
        return importance_weighted(self.log_weights(x, context, samples=samples, chunk=chunk))

    @final
    def check_weighable(self, samples: int) -> None:
        """Raise `ValueError` unless importance sampling is valid: it needs a bound with exact layers."""
        expect_count(samples, "importance samples")
        expect(self.is_bound, "a density known by a bound for importance samples", "one whose likelihood needs none")
        random = self.random_layers
        expect(not random, "exact log-determinants for importance samples", f"random estimates in {', '.join(random)}")


def given_noise(draws: Sequence[Draw], noise: Noise, rows: int, like: Tensor) -> tuple[Tensor, ...]:
    """The noise as a tuple with a checked tensor for each draw; drawn if `noise` is None."""
    if noise is None:
        return tuple(draw.sample(rows, like) for draw in draws)
    given = (noise,) if isinstance(noise, Tensor) else tuple(noise)
    expect(len(given) == len(draws), f"{len(draws)} tensors of noise", len(given))
    for draw, tensor in zip(draws, given, strict=True):
        shape = (rows, *draw.shape)
        expect(tuple(tensor.shape) == shape, f"noise of shape {shape}", tuple(tensor.shape))
    return given


def lone_noise(noise: Noise) -> Tensor | None:
    """The noise of a density with at most one draw, as a tensor."""
    if noise is None or isinstance(noise, Tensor):
        return noise
    if len(noise) == 0:
        return None
    expect(len(noise) == 1, "one tensor of noise", len(noise))
    return noise[0]


def repeat_context(context: Any, rows: int, times: int, *, axes: int) -> Any:
    """Each row of a context repeated `times` times in a row; a graph `(N, N)` shared by all rows stays shared.

    In a pair `(adjacency, mask)` the mask has a row for each of `rows`. Events of graphs have two `axes`, nodes and
    features; for them, a square matrix is a graph.
    """
    if isinstance(context, tuple):
        graph, *masks = context
        return repeat_context(graph, rows, times, axes=2), *(repeat_context(m, rows, times, axes=1) for m in masks)
    if context is None or is_shared_graph(context, axes):
        return context
    got = f"one of shape {tuple(context.shape)}" if isinstance(context, Tensor) else type(context).__name__
    expect(isinstance(context, Tensor) and context.shape[:1] == (rows,), f"a context of {rows} rows", got)
    return context.repeat_interleave(times, 0)


def is_shared_graph(context: Any, axes: int) -> bool:
    """Whether a context, for events with this many axes, is one graph `(N, N)` for all rows."""
    square = isinstance(context, Tensor) and context.ndim == 2 and context.shape[0] == context.shape[1]
    return square and axes == 2


def _per_row(context: Any, x: Tensor) -> bool:
    if isinstance(context, tuple):  # a graph and its mask
        return True
    return isinstance(context, Tensor) and context.ndim > 0 and context.shape[0] == x.shape[0]
