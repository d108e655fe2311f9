"""Posteriors of VAEs, by name.

A new kind is one entry of `POSTERIORS`; configs, help and error messages follow.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from expmflow import transforms as T
from expmflow.distributions import AmortizedGaussian, FlowPosterior


@dataclass(frozen=True)
class FlowSettings:
    """The sizes of a posterior's flow.

    Args:
        flows: the number K of layers.
        hidden: the width of autoregressive networks.
        context: how many features the encoder passes to them, for each sample or at each point.
        vectors: the number of vectors in orthogonal Sylvester flows.
        reflections: of Householder Sylvester flows, and of the basis of generalized ones.
    """

    flows: int = 4
    hidden: int = 320
    context: int = 64
    vectors: int = 8
    reflections: int = 8


Layers = Callable[[int, FlowSettings], list[T.Transform]]
"""Maps the features (or channels) of the latents to layers, noise to latents."""


@dataclass(frozen=True)
class PosteriorKind:
    """A flow, whether its latents are images, and whether its layers take a context."""

    layers: Layers
    spatial: bool = False
    context: bool = False


def _gaussian(d: int, s: FlowSettings) -> list[T.Transform]:
    return []


def _planar(d: int, s: FlowSettings) -> list[T.Transform]:
    return [T.Planar(d, amortized=True) for _ in range(s.flows)]


def _orthogonal(d: int, s: FlowSettings) -> list[T.Transform]:
    return [T.OrthogonalSylvester(d, min(s.vectors, d), amortized=True) for _ in range(s.flows)]


def _householder(d: int, s: FlowSettings) -> list[T.Transform]:
    return [T.HouseholderSylvester(d, s.reflections, amortized=True) for _ in range(s.flows)]


def _triangular(d: int, s: FlowSettings) -> list[T.Transform]:
    return [T.TriangularSylvester(d, reverse=k % 2 == 1, amortized=True) for k in range(s.flows)]


def _iaf(d: int, s: FlowSettings) -> list[T.Transform]:
    layers = [T.InverseAutoregressive(d, s.hidden, context_features=s.context) for _ in range(s.flows)]
    turned: list[T.Transform] = [part for layer in layers for part in (T.Inverse(layer), T.Flip())]
    return turned[:-1]


def _conv_iaf(c: int, s: FlowSettings) -> list[T.Transform]:
    layers = [T.InverseAutoregressive(c, s.hidden, dims=2, context_features=s.context) for _ in range(s.flows)]
    return _alternating(T.Inverse(layer) for layer in layers)


def _sylvester(d: int, s: FlowSettings) -> list[T.Transform]:
    return [
        T.DenseSylvester(d, s.hidden, reflections=s.reflections, context_features=s.context) for _ in range(s.flows)
    ]


def _conv_sylvester(c: int, s: FlowSettings) -> list[T.Transform]:
    return _alternating(T.ConvSylvester(c, s.hidden, context_channels=s.context) for _ in range(s.flows))


def _alternating(layers: Iterable[T.Transform]) -> list[T.Transform]:
    """Every second layer in reversed order, without moving the latents."""
    return [T.Flipped(layer) if k % 2 else layer for k, layer in enumerate(layers)]


POSTERIORS: dict[str, PosteriorKind] = {
    "gaussian": PosteriorKind(_gaussian),
    "planar": PosteriorKind(_planar),
    "iaf": PosteriorKind(_iaf, context=True),
    "orthogonal": PosteriorKind(_orthogonal),
    "householder": PosteriorKind(_householder),
    "triangular": PosteriorKind(_triangular),
    "sylvester": PosteriorKind(_sylvester, context=True),
    "conv-gaussian": PosteriorKind(_gaussian, spatial=True),
    "conv-iaf": PosteriorKind(_conv_iaf, spatial=True, context=True),
    "conv-sylvester": PosteriorKind(_conv_sylvester, spatial=True, context=True),
}

if TYPE_CHECKING:
    PosteriorName = str
else:
    PosteriorName = Literal[*POSTERIORS]


def build_posterior(name: str, event_shape: tuple[int, ...], settings: FlowSettings) -> FlowPosterior:
    """A posterior of latents of this shape: `(d,)`, or `(c, h, w)` for a spatial kind."""
    kind = POSTERIORS[name]
    flow = T.Chain(kind.layers(event_shape[0], settings))
    context = settings.context if kind.context and settings.flows else 0
    return FlowPosterior(flow, AmortizedGaussian(event_shape), context_features=context)
