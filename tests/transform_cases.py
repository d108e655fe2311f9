"""One registry of layers: every test that holds for all of them runs over `CASES`.

A case is a function that returns a fresh layer in float64, small enough for a dense Jacobian, and what it acts on.
`CASES.ready(name)` gives it random parameters. Here are the layers that compose, move, scale and couple.
"""

from __future__ import annotations

import torch

import exponential_cases
import graph_sylvester_cases
import linear_cases
import residual_cases
import sylvester_cases
import vector_flow_cases
from expmflow import nn
from expmflow import transforms as T
from exponential_cases import MASK, PATH, TRIANGLES
from transform_registry import BATCH, F64, Case, Cases, draw

CASES = Cases()
for part in (
    exponential_cases,
    sylvester_cases,
    graph_sylvester_cases,
    vector_flow_cases,
    linear_cases,
    residual_cases,
):
    CASES.update(part.CASES)

# --- linear maps over channels ----------------------------------------------------------------------------------------

for parametrization in ("lu", "free"):
    CASES.add(f"conv1x1-{parametrization}")(
        lambda p=parametrization: Case(T.Conv1x1(3, p), (3, 2, 2), wrong_event=(2, 3, 3))
    )
    CASES.add(f"conv1x1-{parametrization}-vectors")(
        lambda p=parametrization: Case(T.Conv1x1(4, p), (4,), wrong_event=(3,))
    )
    CASES.add(f"conv1x1-{parametrization}-nodes")(
        lambda p=parametrization: Case(T.Conv1x1(2, p, dim=-1), (4, 2), wrong_event=(2, 4))
    )


@CASES.add("conv1x1-1d")
def _():
    return Case(T.Conv1x1(3), (3, 4), wrong_event=(4, 3))


@CASES.add("whiten")
def _():
    return Case(T.Whiten(3), (3,), wrong_event=(2,))


@CASES.add("whiten-one-feature")
def _():
    return Case(T.Whiten(1), (1,), wrong_event=(2,), idle=("below",))


@CASES.add("householder")
def _():
    return Case(T.Householder(3), (3, 2, 2), wrong_event=(2, 3, 3))


@CASES.add("householder-two-reflections")
def _():
    return Case(T.Householder(5, 2), (5,), wrong_event=(4,))


@CASES.add("householder-nodes")
def _():
    return Case(T.Householder(2, 3, dim=-1), (4, 2), wrong_event=(2, 4))


# --- maps that scale or move ------------------------------------------------------------------------------------------


@CASES.add("actnorm")
def _():
    return Case(T.ActNorm(2), (2, 3, 3), wrong_event=(3, 2, 2))


@CASES.add("actnorm-vectors")
def _():
    return Case(T.ActNorm(4), (4,), wrong_event=(3,))


@CASES.add("actnorm-nodes")
def _():
    return Case(T.ActNorm(2, dim=-1), (4, 2), wrong_event=(2, 4))


@CASES.add("squeeze")
def _():
    return Case(T.Squeeze(), (2, 4, 2), wrong_event=(2, 3, 2))


@CASES.add("squeeze-by-three")
def _():
    return Case(T.Squeeze(3), (1, 3, 6), wrong_event=(18,))


@CASES.add("flip")
def _():
    return Case(T.Flip(), (2, 3))


@CASES.add("flip-one-axis")
def _():
    return Case(T.Flip([2]), (2, 3, 2), wrong_event=(4,))


@CASES.add("permute")
def _():
    return Case(T.Permute([2, 0, 1]), (3, 2, 2), wrong_event=(2, 3, 3))


@CASES.add("permute-random-nodes")
def _():
    return Case(T.Permute(5, dim=-1), (2, 5), wrong_event=(5, 2))


# --- couplings --------------------------------------------------------------------------------------------------------


@CASES.add("coupling-densenet")
def _():
    return Case(T.AffineCoupling(nn.DenseNet(2, 4, growth=5), 4), (4, 3, 2), wrong_event=(2, 3, 2))


@CASES.add("coupling-densenet-odd")
def _():
    return Case(T.AffineCoupling(nn.DenseNet(1, 4, growth=4, depth=0), 3), (3, 2, 2), wrong_event=(4, 2, 2))


@CASES.add("coupling-densenet-context")
def _():
    return Case(
        T.AffineCoupling(nn.DenseNet(1, 2, growth=4, depth=1, context_channels=2), 2),
        (2, 4, 2),
        context=draw("coupling-densenet-context", BATCH, 2, 4, 2),
        wrong_event=(3, 4, 2),
        wrong_contexts=[
            None,
            "a word",
            torch.zeros(BATCH, 4, 4, 2),
            torch.zeros(2, 2, 4, 2),
            torch.zeros(BATCH, 2, 2, 2),
        ],
    )


@CASES.add("coupling-densenet-context-vector")
def _():
    return Case(
        T.AffineCoupling(nn.DenseNet(1, 2, growth=4, depth=1, context_channels=5), 2),
        (2, 2, 2),
        context=draw("coupling-densenet-context-vector", BATCH, 5),
        wrong_event=(3, 2, 2),
        wrong_contexts=[None, torch.zeros(BATCH, 4), torch.zeros(2, 5)],
    )


@CASES.add("coupling-mlp")
def _():
    return Case(T.AffineCoupling(nn.MLP(2, 6, hidden=(7,), activation="elu"), 5), (5,), wrong_event=(4,))


@CASES.add("coupling-mlp-context")
def _():
    return Case(
        T.AffineCoupling(nn.MLP(2, 4, hidden=(7, 6), context_features=2), 4),
        (4,),
        context=draw("coupling-mlp-context", BATCH, 2),
        wrong_event=(3,),
        wrong_contexts=[None, torch.zeros(BATCH, 4), torch.zeros(2, 2)],
    )


@CASES.add("coupling-mlp-nodes")
def _():
    return Case(T.AffineCoupling(nn.MLP(1, 4, hidden=(6,)), 3, dim=-1), (4, 3), wrong_event=(4, 2))


@CASES.add("coupling-mlp-nodes-context")
def _():
    return Case(
        T.AffineCoupling(nn.MLP(1, 4, hidden=(6,), context_features=2), 3, dim=-1),
        (4, 3),
        context=draw("coupling-mlp-nodes-context", BATCH, 2),
        wrong_event=(4, 2),
        wrong_contexts=[None, torch.zeros(BATCH, 4, dtype=F64), torch.zeros(BATCH, 2, 3, dtype=F64)],
    )


@CASES.add("mixture-coupling")
def _():
    net = nn.MLP(2, 3 * (3 * 4 + 2), hidden=(7,), activation="elu")
    return Case(T.MixtureCoupling(net, 5, components=4), (5,), wrong_event=(4,))


@CASES.add("mixture-coupling-one-component")
def _():
    return Case(T.MixtureCoupling(nn.DenseNet(1, 5, growth=3), 2, components=1), (2, 2, 3), wrong_event=(3, 2, 2))


@CASES.add("mixture-coupling-nodes-context")
def _():
    return Case(
        T.MixtureCoupling(nn.GraphNetwork(1, 2 * (3 * 2 + 2), hidden=6), 3, components=2, dim=-1),
        (4, 3),
        context=PATH,
        wrong_event=(4, 2),
        wrong_contexts=["a word", torch.zeros(5, 5, dtype=F64)],
    )


@CASES.add("coupling-graph")
def _():
    return Case(
        T.AffineCoupling(nn.GraphNetwork(1, 2, hidden=6), 2, dim=-1),
        (4, 2),
        context=PATH,
        wrong_event=(4, 3),
        wrong_contexts=["a word", torch.zeros(5, 5, dtype=F64), torch.zeros(2, 4, 4, dtype=F64)],
    )


@CASES.add("coupling-graph-complete")
def _():
    return Case(T.AffineCoupling(nn.GraphNetwork(2, 4, hidden=5), 4, dim=-1), (4, 4), wrong_event=(4, 3))


@CASES.add("coupling-graph-masked")
def _():
    return Case(
        T.AffineCoupling(nn.GraphNetwork(1, 2, hidden=6), 2, dim=-1),
        (4, 2),
        context=(TRIANGLES, MASK),
        wrong_event=(4, 3),
        wrong_contexts=[
            (TRIANGLES, MASK[:2]),
            (TRIANGLES, MASK[:, :2]),
            (TRIANGLES, MASK, MASK),
            (TRIANGLES[:2], MASK),
        ],
    )


# --- layers made of layers --------------------------------------------------------------------------------------------


@CASES.add("split")
def _():
    prior = T.AffineCoupling(nn.DenseNet(2, 4, growth=4, depth=1), 4)
    return Case(T.Split(T.Conv1x1(2), prior), (4, 2, 2), wrong_event=(3, 2, 2))


@CASES.add("split-without-prior")
def _():
    return Case(T.Split(T.LinearExp(2), None), (4,), wrong_event=(6,), culprit="LinearExp")


@CASES.add("chain-multiscale")
def _():
    prior = T.AffineCoupling(nn.DenseNet(2, 4, growth=4, depth=1), 4)
    rest = T.Chain([T.ConvExp(2), T.Squeeze(), T.ActNorm(8), T.Inverse(T.Squeeze())])
    level = T.Chain([T.Squeeze(), T.ActNorm(4), T.Conv1x1(4), T.Split(rest, prior), T.Inverse(T.Squeeze())])
    return Case(level, (1, 4, 4), wrong_event=(2, 4, 4), culprit="ActNorm")


@CASES.add("chain-context")
def _():
    """Layers that need no context let it pass."""
    coupling = T.AffineCoupling(nn.MLP(2, 4, hidden=(6,), context_features=2), 4)
    return Case(
        T.Chain([T.LinearExp(4), T.DenseSylvester(4, 8, context_features=2), T.Permute(4), coupling, T.Conv1x1(4)]),
        (4,),
        context=draw("chain-context", BATCH, 2),
        wrong_event=(5,),
        wrong_contexts=[None, torch.zeros(BATCH, 4, dtype=F64)],
        culprit="LinearExp|DenseSylvester|AffineCoupling|Conv1x1",
    )


@CASES.add("chain-graph")
def _():
    coupling = T.AffineCoupling(nn.GraphNetwork(1, 2, hidden=5), 2, dim=-1)
    return Case(
        T.Chain([T.ActNorm(2, dim=-1), T.GraphConvExp(2), T.Permute([1, 0], dim=-1), coupling]),
        (4, 2),
        context=(TRIANGLES, MASK),
        wrong_event=(4, 3),
        wrong_contexts=["a word", (TRIANGLES, MASK[:2])],
        culprit="ActNorm|GraphConvExp|AffineCoupling",
    )


@CASES.add("chain-empty")
def _():
    return Case(T.Chain([]), (3,))


@CASES.add("inverse-conv-exp")
def _():
    return Case(T.Inverse(T.ConvExp(2)), (2, 3, 3), wrong_event=(3, 2, 2), culprit="ConvExp")


@CASES.add("inverse-conv-sylvester")
def _():
    return Case(T.Inverse(T.ConvSylvester(2, 4)), (2, 3, 2), wrong_event=(3, 2, 2), culprit="ConvSylvester")


@CASES.add("inverse-coupling-context")
def _():
    return Case(
        T.Inverse(T.AffineCoupling(nn.MLP(1, 2, hidden=(6,), context_features=2), 2)),
        (2,),
        context=draw("inverse-coupling-context", BATCH, 2),
        wrong_event=(4,),
        wrong_contexts=[None, torch.zeros(BATCH, 4, dtype=F64)],
        culprit="AffineCoupling",
    )
