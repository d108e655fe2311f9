"""The registry's Sylvester flows on graphs."""

from __future__ import annotations

import torch

from expmflow import transforms as T
from exponential_cases import DIRECTED, MASK, NOT_A_GRAPH, PATH, TRIANGLES, WEIGHTED
from transform_registry import F64, Case, Cases

CASES = Cases()

ISOLATED = PATH * torch.tensor([1.0, 1.0, 0.0, 1.0], dtype=F64) * torch.tensor([[1.0], [1.0], [0.0], [1.0]], dtype=F64)
NO_GRAPH = [*NOT_A_GRAPH, PATH.to_sparse(), (None, MASK[:2])]

GRAPHS = {
    "graph-sylvester": (2, PATH, {}),
    "graph-sylvester-batched": (2, TRIANGLES, {}),
    "graph-sylvester-masked": (2, (TRIANGLES, MASK), {}),
    "graph-sylvester-masked-shared": (2, (PATH, MASK), {"reverse": True}),
    "graph-sylvester-complete": (3, None, {}),
    "graph-sylvester-complete-masked": (2, (None, MASK), {}),
    "graph-sylvester-weighted": (2, WEIGHTED, {"max_neighbours": 4}),  # with self-loops
    "graph-sylvester-directed": (3, DIRECTED, {"reverse": True}),
    "graph-sylvester-isolated-nodes": (2, ISOLATED, {}),
    "graph-sylvester-large-gamma": (2, PATH, {"gamma": 0.9, "reflections": 1}),
    "graph-sylvester-without-basis": (3, (WEIGHTED, MASK), {"use_basis": False}),
}

for name, (features, context, options) in GRAPHS.items():
    CASES.add(name)(
        lambda f=features, c=context, o=options: Case(
            T.GraphSylvester(f, 6, **o), (4, f), context=c, wrong_event=(4, f + 1), wrong_contexts=NO_GRAPH
        )
    )


def weights(*names: str) -> tuple[str, ...]:
    return tuple(f"inner.{name}.parametrizations.weight.original" for name in names)


@CASES.add("graph-sylvester-one-feature")
def _():
    """There is nothing before the one feature, one reflection is −1, and a number at its limit is ±1."""
    of_basis = ("basis.layers.0.vectors", "basis.layers.1.theta0", "basis.layers.1.theta1")
    idle = (*of_basis, *weights("receive", "send"))
    return Case(T.GraphSylvester(1, 5), (4, 1), context=PATH, wrong_event=(4, 2), idle=idle)


@CASES.add("graph-sylvester-one-node")
def _():
    """A node without neighbours has no messages."""
    of_messages = ("inner.receive.bias", "inner.edge.bias", "inner.message.bias")
    idle = ("basis.layers.1.theta1", *of_messages, *weights("receive", "send", "edge", "message"))
    return Case(T.GraphSylvester(2, 6), (1, 2), wrong_event=(1, 3), idle=idle)
