"""Distribution functions of mixtures as scalar functions: a single layer can split a density into several modes."""

from __future__ import annotations

import math
from typing import ClassVar, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from expmflow._validation import expect_count, expect_untraced
from expmflow.transforms.coupling import Coupling
from expmflow.transforms.elementwise import LARGEST_LOG_SCALE, Elementwise, Pair, Params, bounded

NARROWEST = 5.0  # no component is narrower than e^-5, or wider than e^5


@final
class Mixture(Elementwise):
    """z = logit F(x) · e^s + t, F the distribution function of a mixture of logistics (Ho et al., 2019).

    The inverse is found by bisection between the quantiles of the components.

    Args:
        components: the number of components of each mixture.
    """

    closed_form = ("forward",)

    def __init__(self, components: int) -> None:
        expect_count(components, "components")
        self.components = components
        self.params_per_entry = 3 * components + 2

    def forward(self, x: Tensor, params: Params) -> Pair:
        *mixture, log_scale, shift = self._parts(params)
        logit, slope = _mixture_logit(x, *mixture)
        return torch.addcmul(shift, logit, log_scale.exp()), slope + log_scale

    def inverse(self, z: Tensor, params: Params) -> Pair:
        log_weights, means, log_widths, log_scale, shift = self._parts(params)
        logit = (z - shift) * (-log_scale).exp()
        x = _quantile(logit, log_weights, means, log_widths)
        return x, -_mixture_logit(x, log_weights, means, log_widths)[1] - log_scale

    def _parts(self, params: Params) -> tuple[Tensor, ...]:
        """Log-weights, means and log-widths, `(components, *shape)` each, then s and t.

        The means start at different values, because equal ones would never separate.
        """
        k, (log_scale, shift) = self.components, params[-2:]
        weights, means, widths = (torch.stack(params[start : start + k]) for start in (0, k, 2 * k))
        apart = torch.linspace(-1, 1, k, dtype=shift.dtype, device=shift.device) if k > 1 else shift.new_zeros(1)
        means = means + apart.reshape(-1, *(1,) * shift.ndim)
        return (
            torch.log_softmax(weights, 0),
            means,
            bounded(widths, NARROWEST),
            bounded(log_scale, LARGEST_LOG_SCALE),
            shift,
        )


@final
class MixtureCoupling(Coupling):
    """z₁ = x₁, z₂ = logit F(x₂) · e^s + t, F the distribution function of a mixture of logistics (Ho et al., 2019).

    The weights, means and widths of F, and s and t, are net(x₁, context). The inverse is found by bisection between the
    quantiles of the components.

    Args:
        net: maps `x₁` (and the context, if one is given) to 3 · components + 2 times the channels of `x₂`.
        channels: C.
        components: the number of components of each mixture.
        dim: the axis of the channels: 1 for images and vectors, −1 for graphs.

    Example:
        >>> layer = T.MixtureCoupling(expmflow.nn.MLP(2, 2 * (3 * 8 + 2), hidden=(16,)), channels=4, components=8)
        >>> z, logdet = layer(torch.randn(5, 4))
    """

    closed_form: ClassVar[tuple[str, ...]] = ("forward",)

    def __init__(self, net: nn.Module, channels: int, *, components: int = 8, dim: int = 1) -> None:
        super().__init__(net, channels, dim=dim, function=Mixture(components))


def _mixture_logit(x: Tensor, log_weights: Tensor, means: Tensor, log_widths: Tensor) -> tuple[Tensor, Tensor]:
    """log F(x) − log(1 − F(x)) and the logarithm of its slope; accurate far out in the tails, too."""
    u = (x - means) * (-log_widths).exp()
    below, above = F.logsigmoid(u), F.logsigmoid(-u)
    log_cdf, log_rest = torch.logsumexp(log_weights + below, 0), torch.logsumexp(log_weights + above, 0)
    log_density = torch.logsumexp(log_weights + below + above - log_widths, 0)
    return log_cdf - log_rest, log_density - log_cdf - log_rest


def _quantile(logit: Tensor, *mixture: Tensor) -> Tensor:
    """x with that logit: bisection to the last digit, then Newton steps, through which gradients flow.

    Each step doubles the order up to which derivatives are right, so two steps make second derivatives right.
    """
    expect_untraced("an iteration, whose rounds depend on who asks")
    with torch.no_grad():
        _, means, log_widths = mixture
        single = means + log_widths.exp() * logit  # the quantile of each component
        low, high = single.amin(0), single.amax(0)
        for _ in range(8 - round(math.log2(torch.finfo(logit.dtype).eps))):
            middle = (low + high) / 2
            under = _mixture_logit(middle, *mixture)[0] < logit
            low, high = torch.where(under, middle, low), torch.where(under, high, middle)
        x = (low + high) / 2
    for _ in range(2 if torch.is_grad_enabled() else 1):
        value, slope = _mixture_logit(x, *mixture)
        x = x - (value - logit) * (-slope).exp()
    return x
