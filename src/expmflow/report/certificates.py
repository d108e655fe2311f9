"""Norms and error bounds, proven and expected, of the exponentials inside a model."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from expmflow.distributions import Density
from expmflow.nn.graph import complete_graph
from expmflow.numerics import SeriesPlan, certify
from expmflow.operators import LinearOperator
from expmflow.transforms.base import Transform, layer_name, watching
from expmflow.transforms.exponential import Exponential
from expmflow.transforms.graph_exponential import GraphConvExp


@dataclass(frozen=True)
class Certificate:
    """One exponential layer: the norm of its operator, and its plan with proven and expected errors."""

    name: str
    kind: str
    norm: float
    log_norm: float
    plan: SeriesPlan


@torch.no_grad()
def certificates(density: Density, rows: Tensor, context: Tensor | None = None) -> list[Certificate]:
    """The certificates of every exponential in the model, nested ones included, at its event shape there.

    A graph exponential has a norm for each graph; here it is that of the complete graph on the rows' nodes.
    """
    shapes: dict[Transform, tuple[int, ...]] = {}

    def note(layer: Transform, x: Tensor, *results: Tensor) -> None:
        shapes[layer] = tuple(x.shape[1:])  # an exponential preserves the shape

    with watching(note):
        density(rows[:1], None if context is None else context[:1])
    return [
        _certificate(name, layer, _operator(layer, shapes[layer]), shapes[layer])
        for name, layer in density.named_modules()
        if isinstance(layer, Exponential) and layer in shapes
    ]


def _operator(layer: Exponential, shape: tuple[int, ...]) -> LinearOperator:
    if isinstance(layer, GraphConvExp):
        return layer.operator(complete_graph(next(layer.parameters()).new_zeros(1, *shape)))
    return layer.operator()


def _certificate(name: str, layer: Exponential, op: LinearOperator, shape: tuple[int, ...]) -> Certificate:
    norm, log_norm = float(op.norm_bound(shape)), float(op.log_norm_bound(shape))
    plan = certify(op, shape, tol=layer.tol, terms=layer.terms)
    return Certificate(name, layer_name(layer), norm, log_norm, plan)
