"""The registry's residual blocks and triangular convolutions.

Blocks are in exact mode here, since the tests of all layers compare log-determinants; what holds for the random
estimate is in `transforms/test_residual.py`.
"""

from __future__ import annotations

import torch

from expmflow import nn
from expmflow import transforms as T
from transform_registry import BATCH, F64, Case, Cases, draw

CASES = Cases()


def block(net: torch.nn.Module, coeff: float = 0.98) -> T.ResidualBlock:
    return T.ResidualBlock(net, coeff, logdet="exact")


@CASES.add("residual-conv")
def _():
    return Case(block(nn.LipschitzConvNet(2, 5)), (2, 3, 3), wrong_event=(3, 3, 3))


@CASES.add("residual-conv-1d")
def _():
    net = nn.LipschitzConvNet(2, 4, kernel_sizes=(5, 3), dims=1)
    return Case(block(net, 0.7), (2, 4), wrong_event=(3, 4))


@CASES.add("residual-conv-context")
def _():
    return Case(
        block(nn.LipschitzConvNet(2, 4, context_channels=2)),
        (2, 4, 2),
        context=draw("residual-conv-context", BATCH, 2, 4, 2),
        wrong_event=(3, 4, 2),
        wrong_contexts=[None, torch.zeros(BATCH, 4, 4, 2), torch.zeros(2, 2, 4, 2), torch.zeros(BATCH, 2, 2, 2)],
    )


@CASES.add("residual-mlp")
def _():
    return Case(block(nn.LipschitzMLP(4, (8, 6))), (4,), wrong_event=(3,))


@CASES.add("residual-mlp-context")
def _():
    return Case(
        block(nn.LipschitzMLP(3, (6,), context_features=2), 0.9),
        (3,),
        context=draw("residual-mlp-context", BATCH, 2),
        wrong_event=(4,),
        wrong_contexts=[None, "a word", torch.zeros(BATCH, 4, dtype=F64), torch.zeros(2, 2, dtype=F64)],
    )


@CASES.add("residual-own-network")
def _():
    """Of torch's own parts: groups, wrapped images, activations that do not expand."""
    net = torch.nn.Sequential(
        torch.nn.Conv2d(2, 4, 3, padding=1, padding_mode="circular", groups=2),
        torch.nn.Sequential(torch.nn.Tanh(), torch.nn.Conv2d(4, 4, 1)),
        torch.nn.Softplus(),
        torch.nn.Conv2d(4, 2, 3, padding=2, dilation=2),
    )
    return Case(block(net, 0.95), (2, 3, 4), wrong_event=(3, 3, 4))


@CASES.add("residual-moved-entries")
def _():
    """The first linear map sees another shape than the block."""
    flat, whole = torch.nn.Flatten(), torch.nn.Unflatten(1, (2, 1, 3))
    net = torch.nn.Sequential(flat, torch.nn.Linear(6, 5), nn.LipSwish(), torch.nn.Linear(5, 6), whole)
    return Case(block(net), (2, 1, 3), wrong_event=(3, 1, 3))


@CASES.add("triangular-conv-sylvester")
def _():
    return Case(T.TriangularConvSylvester(2), (2, 3, 3), wrong_event=(3, 3, 3))


@CASES.add("triangular-conv-sylvester-wide")
def _():
    return Case(T.TriangularConvSylvester(2, 4, use_basis=False), (2, 3, 2), wrong_event=(3, 3, 2))


@CASES.add("triangular-conv-sylvester-constrained")
def _():
    return Case(T.TriangularConvSylvester(2, 2, lipschitz=1.5), (2, 3, 3), wrong_event=(3, 3, 3))


@CASES.add("triangular-conv-sylvester-wide-kernels")
def _():
    layer = T.TriangularConvSylvester(1, 3, kernel_size=5)
    return Case(layer, (1, 3, 3), wrong_event=(2, 3, 3), idle=("basis.layers.0.vectors",))


@CASES.add("triangular-conv-sylvester-context")
def _():
    return Case(
        T.TriangularConvSylvester(2, 2, context_channels=2),
        (2, 4, 2),
        context=draw("triangular-conv-sylvester-context", BATCH, 2, 4, 2),
        wrong_event=(3, 4, 2),
        wrong_contexts=[None, torch.zeros(BATCH, 4, 4, 2), torch.zeros(2, 2, 4, 2), torch.zeros(BATCH, 2, 2, 2)],
    )


@CASES.add("generalized-sylvester-triangular-1d")
def _():
    layer = T.GeneralizedSylvester(T.Conv1x1(3), nn.TriangularConvInner(3, dims=1, width=2))
    return Case(layer, (3, 3), wrong_event=(2, 3))
