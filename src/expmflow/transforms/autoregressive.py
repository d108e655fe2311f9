"""Autoregressive flows: a masked network transforms each entry given the entries before it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, final

import torch
from torch import Tensor, nn

from expmflow._validation import expect, expect_count, expect_one_of
from expmflow.nn.autoregressive import INITIAL_SCALE, MADE
from expmflow.nn.context import check_context
from expmflow.nn.conv_made import ConvMADE
from expmflow.nn.precision import network_precision
from expmflow.numerics import ConvergenceError
from expmflow.numerics.roots import substitute
from expmflow.numerics.solve import with_implicit_gradient
from expmflow.transforms.base import Output, Transform, layer_name
from expmflow.transforms.elementwise import Affine, Elementwise, Gate
from expmflow.transforms.mixture import Mixture
from expmflow.transforms.spline import Spline

TRANSFORMERS: dict[str, Callable[[int], Elementwise]] = {
    "affine": lambda components: Affine(),
    "mixture": Mixture,
    "spline": Spline,
}
"""Increasing scalar functions by name, each built from its number of components."""


class Autoregressive(Transform):
    """y_k = g(x_k; net(x_<k, context)) with an increasing function g; one of the two directions of a layer.

    Args:
        features: d for vectors `(batch, d)`, or the channels of images `(batch, channels, *n)`.
        hidden: the width of two hidden layers; for vectors also a list of all widths.
        function: g.
        dims: the number of spatial axes; 0 for vectors.
        context_features: the features of a context `(batch, features)`, or `(batch, features, *n)` for images; 0 for
            none.
        activation: that of the network on vectors.
    """

    def __init__(
        self,
        features: int,
        hidden: int | Sequence[int],
        function: Elementwise,
        *,
        dims: int,
        context_features: int,
        activation: str = "elu",
    ) -> None:
        super().__init__()
        expect_count(features, "features")
        expect_count(context_features, "context_features", at_least=0)
        expect(dims in (0, 1, 2, 3), "0 spatial axes (vectors) to 3", dims)
        expect(dims == 0 or activation == "elu", "elu in networks on images", activation)
        self.features = features
        self.dims = dims
        self.context_channels = context_features
        self.function = function
        self.last_iterations = 0
        outputs = function.params_per_entry
        if dims:
            expect(isinstance(hidden, int), "one width inside a network on images", hidden)
            width = hidden if isinstance(hidden, int) else 0
            self.net: nn.Module = ConvMADE(features, width, outputs, context_features=context_features, dims=dims)
        else:
            widths = (hidden, hidden) if isinstance(hidden, int) else tuple(hidden)
            self.net = MADE(features, widths, outputs, context_features=context_features, activation=activation)
        with torch.no_grad():
            self.net.last.parametrizations.weight.original.mul_(INITIAL_SCALE)  # type: ignore[union-attr, operator]

    def check_event_shape(self, event_shape: tuple[int, ...]) -> None:
        fits = len(event_shape) == self.dims + 1 and event_shape[0] == self.features
        names = ", ".join(f"n{i}" for i in range(1, self.dims + 1))
        what = f"images of shape ({self.features}, {names})" if self.dims else f"vectors of {self.features} features"
        expect(fits, what, f"events {event_shape}")

    def check_context(self, context: Any, x: Tensor) -> None:
        check_context(context, x, self.context_channels)

    def _map(self, x: Tensor, context: Any) -> tuple[Tensor, Tensor]:
        """y and log dy_k/dx_k, entry by entry, in one pass of the network."""
        return self.function.forward(x, self._params(x, context))

    def _solve(self, y: Tensor, context: Any) -> tuple[Tensor, Tensor]:
        """x and log dx_k/dy_k, in at most a pass for each entry and two more; no gradient passes through them."""
        try:
            with torch.no_grad():
                solution = substitute(lambda x: self.function.inverse(y, self._params(x, context))[0], y)
        except ConvergenceError as error:
            raise ConvergenceError(f"{layer_name(self)}: {error}", error.solution) from None
        self.last_iterations = solution.iterations
        x = solution.value
        if torch.is_grad_enabled():
            x = with_implicit_gradient(lambda x: self._residual(x, context), x, y, max_iterations=x[:1].numel() + 8)
        return x, -self._map(x, context)[1]

    def _residual(self, x: Tensor, context: Any) -> tuple[Tensor, Tensor]:
        """y − x, and the diagonal of its Jacobian."""
        y, log_slope = self._map(x, context)
        return y - x, log_slope.expm1()

    def _params(self, x: Tensor, context: Any) -> tuple[Tensor, ...]:
        with network_precision(x.device.type):
            out = self.net(x, context)
        return out.to(x.dtype).chunk(self.function.params_per_entry, dim=1)


@final
class MaskedAutoregressive(Autoregressive):
    """z_k = x_k e^s + t with (s, t) = net(x_<k, context), or another increasing function (Papamakarios et al., 2017).

    `forward`, data to noise, is one pass of the network. `inverse` takes at most two passes more than there are
    entries, and mostly far fewer. Chains should reverse the order between layers, by `Flip` or `Permute`.

    Args:
        features: d for vectors `(batch, d)`, with a MADE; or the channels of images, with masked convolutions.
        hidden: the width of two hidden layers; for vectors also a list of all widths.
        transformer: the function of each entry: `"affine"`; `"mixture"`, the distribution function of a mixture of
            logistics, as in `MixtureCoupling`; or `"spline"`, rational-quadratic on [−5, 5].
        components: of the mixture, or pieces of the spline.
        dims: the number of spatial axes: 0 for vectors, 2 for images.
        context_features: the features of a context `(batch, features)`, or `(batch, features, *n)` for images; 0 for
            none.
        activation: that of the network on vectors: `"elu"`, or `"relu"`, which follows sharp edges better.

    Example:
        >>> layer = T.MaskedAutoregressive(4, hidden=16)
        >>> z, logdet = layer(torch.randn(5, 4))
    """

    closed_form: ClassVar[tuple[str, ...]] = ("forward",)

    def __init__(
        self,
        features: int,
        hidden: int | Sequence[int],
        *,
        transformer: str = "affine",
        components: int = 8,
        dims: int = 0,
        context_features: int = 0,
        activation: str = "elu",
    ) -> None:
        expect_one_of(transformer, TRANSFORMERS, "transformer")
        expect_count(components, "components")
        function = TRANSFORMERS[transformer](components)
        super().__init__(
            features, hidden, function, dims=dims, context_features=context_features, activation=activation
        )

    def _forward(self, x: Tensor, context: Any) -> Output:
        z, log_slope = self._map(x, context)
        return z, log_slope.flatten(1).sum(1)

    def _inverse(self, z: Tensor, context: Any) -> Output:
        x, log_slope = self._solve(z, context)
        return x, log_slope.flatten(1).sum(1)


@final
class InverseAutoregressive(Autoregressive):
    """x_k = g z_k + (1 − g) m, g = σ(s + 1) and (s, m) = net(z_<k, context) (Kingma et al., 2016).

    `inverse`, noise to data, is one pass of the network, so samples and their densities are cheap. `forward` takes at
    most two passes more than there are entries. Chains should reverse the order between layers, by `Flip` or `Permute`.
    The gates start nearly open, with s = 1: otherwise several layers in a chain would shrink the noise, and a VAE would
    start with latents that carry too much information and end with latents that carry none.

    Args:
        features: d for vectors `(batch, d)`, with a MADE; or the channels of images, with masked convolutions.
        hidden: the width of two hidden layers; for vectors also a list of all widths.
        dims: the number of spatial axes: 0 for vectors, 2 for images.
        context_features: the features of a context `(batch, features)`, or `(batch, features, *n)` for images; 0 for
            none.

    Example:
        >>> layer = T.InverseAutoregressive(4, hidden=16, context_features=2)
        >>> x, logdet = layer.inverse(torch.randn(5, 4), context=torch.randn(5, 2))
    """

    closed_form: ClassVar[tuple[str, ...]] = ("inverse",)

    def __init__(self, features: int, hidden: int | Sequence[int], *, dims: int = 0, context_features: int = 0) -> None:
        super().__init__(features, hidden, Gate(), dims=dims, context_features=context_features)
        with torch.no_grad():
            self.net.last.bias[:features].fill_(1.0)  # type: ignore[union-attr, index]

    def _forward(self, x: Tensor, context: Any) -> Output:
        z, log_slope = self._solve(x, context)
        return z, log_slope.flatten(1).sum(1)

    def _inverse(self, z: Tensor, context: Any) -> Output:
        x, log_slope = self._map(z, context)
        return x, log_slope.flatten(1).sum(1)
