"""The density model of tables: two autoregressive layers, and an exponential between them."""

from __future__ import annotations

from expmflow import transforms as T
from expmflow._validation import expect_count
from expmflow.distributions import Flow, Logistic
from expmflow.distributions.gaussian import UNIT_VARIANCE


def table_flow(
    features: int, *, blocks: int = 1, hidden: int = 64, components: int = 12, coeff: float = 0.9, layers: int = 2
) -> Flow:
    """Autoregressive splines, whitening, exp(M), then autoregressive mixtures.

    The splines capture edges and levels of single columns. The linear layers are initialised so that the whole model is
    a Gaussian of full covariance; the mixtures of logistics after them find clusters. Forward is one pass; samples take
    at most one pass of each network per column.

    Args:
        features: d, the number of columns.
        blocks: the number of repetitions of all this.
        hidden: the width of the networks inside.
        components: pieces of the splines, and components of the mixtures.
        coeff: the largest norm of each M.
        layers: hidden layers of each network.

    Example:
        >>> flow = table_flow(3, hidden=8)
        >>> flow.log_prob(torch.randn(5, 3)).shape
        torch.Size([5])
    """
    for name, value in (("features", features), ("blocks", blocks), ("hidden", hidden), ("layers", layers)):
        expect_count(value, name)

    def autoregressive(transformer: str) -> T.Transform:
        widths = (hidden,) * layers
        return T.MaskedAutoregressive(
            features, widths, transformer=transformer, components=components, activation="relu"
        )

    chain: list[T.Transform] = [T.ActNorm(features)]
    for _ in range(blocks):
        chain += [
            autoregressive("spline"),
            T.Whiten(features),
            T.LinearExp(features, coeff),
            autoregressive("mixture"),
            T.ActNorm(features),
        ]
    return Flow(T.Chain(chain), Logistic((features,), UNIT_VARIANCE))
