"""A flow on vectors."""

from __future__ import annotations

from expmflow import transforms as T
from expmflow._validation import expect_count
from expmflow.distributions import Flow, StandardNormal
from expmflow.nn import MLP


def dense_flow(features: int, *, blocks: int = 4, hidden: int = 64, coeff: float = 0.9, coupling: bool = True) -> Flow:
    """Blocks of ActNorm, exp(M), a Sylvester layer and an affine coupling, with the features reversed in between.

    Args:
        features: d.
        blocks: the number of blocks.
        hidden: the width of the networks inside.
        coeff: the largest norm of each M.
        coupling: False omits the couplings; a single feature has none.

    Example:
        >>> flow = dense_flow(2, blocks=1, hidden=8)
        >>> flow.log_prob(torch.randn(5, 2)).shape
        torch.Size([5])
    """
    expect_count(features, "features")
    expect_count(blocks, "blocks")
    layers: list[T.Transform] = []
    for _ in range(blocks):
        layers += [T.ActNorm(features), T.LinearExp(features, coeff), T.DenseSylvester(features, hidden)]
        if coupling and features > 1:
            passive = features // 2
            net = MLP(passive, 2 * (features - passive), hidden=(hidden, hidden), activation="elu")
            layers.append(T.AffineCoupling(net, features))
        layers.append(T.Flip())
    layers.append(T.ActNorm(features))
    return Flow(T.Chain(layers), StandardNormal((features,)))
