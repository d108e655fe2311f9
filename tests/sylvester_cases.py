"""The registry's Sylvester flows."""

from __future__ import annotations

import torch

from expmflow import nn
from expmflow import transforms as T
from transform_registry import BATCH, F64, Case, Cases, draw

CASES = Cases()


@CASES.add("dense-sylvester")
def _():
    return Case(T.DenseSylvester(5, 8), (5,), wrong_event=(4,))


@CASES.add("dense-sylvester-one-hidden-layer")
def _():
    return Case(T.DenseSylvester(4, [7], reflections=2), (4,), wrong_event=(3,))


@CASES.add("dense-sylvester-one-feature")
def _():
    idle = (
        "basis.vectors",
        "inner.net.layers.0.parametrizations.weight.original",
    )  # one reflection is −1; x₀ sees none
    return Case(T.DenseSylvester(1, 4), (1,), wrong_event=(2,), idle=idle)


@CASES.add("dense-sylvester-context")
def _():
    return Case(
        T.DenseSylvester(4, 8, context_features=2),
        (4,),
        context=draw("dense-sylvester-context", BATCH, 2),
        wrong_event=(3,),
        wrong_contexts=[None, "a word", torch.zeros(BATCH, 4), torch.zeros(2, 2)],
    )


@CASES.add("dense-sylvester-large-gamma")
def _():
    return Case(T.DenseSylvester(4, 8, gamma=0.9), (4,), wrong_event=(3,))


@CASES.add("conv-sylvester")
def _():
    return Case(T.ConvSylvester(2, 6), (2, 3, 3), wrong_event=(3, 3, 3))


@CASES.add("conv-sylvester-one-channel")
def _():
    layer = T.ConvSylvester(1, 3, kernel_size=5, coeff=0.5)
    return Case(layer, (1, 3, 4), wrong_event=(2, 3, 4), idle=("basis.layers.0.vectors",))


@CASES.add("conv-sylvester-without-basis")
def _():
    return Case(T.ConvSylvester(3, 6, use_basis=False), (3, 2, 3), wrong_event=(2, 2, 3))


@CASES.add("conv-sylvester-of-the-paper")
def _():
    return Case(T.ConvSylvester(2, 4, lipschitz=1.5, activation="relu"), (2, 3, 2), wrong_event=(3, 3, 2))


@CASES.add("conv-sylvester-large-gamma")
def _():
    return Case(T.ConvSylvester(2, 4, gamma=0.7, reflections=1), (2, 3, 2), wrong_event=(3, 3, 2))


@CASES.add("conv-sylvester-context")
def _():
    return Case(
        T.ConvSylvester(2, 5, context_channels=2),
        (2, 4, 2),
        context=draw("conv-sylvester-context", BATCH, 2, 4, 2),
        wrong_event=(3, 4, 2),
        wrong_contexts=[None, torch.zeros(BATCH, 4, 4, 2), torch.zeros(2, 2, 4, 2), torch.zeros(BATCH, 2, 2, 2)],
    )


@CASES.add("conv-sylvester-context-vector")
def _():
    return Case(
        T.ConvSylvester(2, 5, context_channels=4),
        (2, 2, 2),
        context=draw("conv-sylvester-context-vector", BATCH, 4),
        wrong_event=(3, 2, 2),
        wrong_contexts=[None, torch.zeros(BATCH, 2), torch.zeros(2, 4)],
    )


@CASES.add("generalized-sylvester-linear-exp")
def _():
    layer = T.GeneralizedSylvester(T.LinearExp(4), nn.DenseInner(4, 8))
    return Case(layer, (4,), wrong_event=(3,))


@CASES.add("generalized-sylvester-chain")
def _():
    basis = T.Chain([T.Conv1x1(2), T.ConvExp(2, dims=1, padding="circular", norm="power")])
    layer = T.GeneralizedSylvester(basis, nn.ConvInner(2, 4, dims=1))
    return Case(layer, (2, 4), wrong_event=(3, 4), culprit="Conv1x1")


@CASES.add("generalized-sylvester-3d")
def _():
    basis = T.ConvExp(1, dims=3)
    layer = T.GeneralizedSylvester(basis, nn.ConvInner(1, 2, dims=3, context_channels=2))
    return Case(
        layer,
        (1, 2, 2, 2),
        context=draw("generalized-sylvester-3d", BATCH, 2, 2, 2, 2),
        wrong_event=(2, 2, 2, 2),
        wrong_contexts=[None, torch.zeros(BATCH, 2, 2, 2, 4, dtype=F64)],
    )
