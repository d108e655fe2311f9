"""Generalized Sylvester flows: z = x + W⁻¹ f(W x), with W an invertible linear map and f autoregressive."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, final

import torch
from torch import Tensor, nn

from expmflow._transformed import transformed
from expmflow._validation import expect_count
from expmflow.nn.autoregressive import ConvInner, DenseInner
from expmflow.nn.constraints import constant_constraints
from expmflow.nn.graph_autoregressive import GraphInner
from expmflow.nn.raster import RasterStack, solve_by_slabs
from expmflow.numerics import ConvergenceError
from expmflow.numerics.solve import triangular_fixed_point, with_implicit_gradient
from expmflow.transforms.base import Chain, Output, Transform, layer_name
from expmflow.transforms.conv1x1 import Householder
from expmflow.transforms.exponential import ConvExp
from expmflow.transforms.graph_exponential import GraphConvExp
from expmflow.transforms.inner import check_inner, context_cutter
from expmflow.transforms.shapes import expect_images, expect_nodes, expect_vectors


class GeneralizedSylvester(Transform):
    """z = x + W⁻¹ f(W x), logdet = Σ log(1 + diag), diag the diagonal of f's Jacobian at W x.

    The inverse solves u + f(u) = W z by a fixed point iteration, then x = z − W⁻¹ f(u). Its residual is verified, and
    its gradient is exact, by the implicit function theorem. It exists whatever the norms of f are, because the Jacobian
    is triangular. `last_iterations` holds the numbers of iterations: of the slowest row of an image, and of the whole
    image.

    Args:
        basis: any invertible linear layer, W; it receives the context too.
        inner: a module whose `forward(u, context)` returns `(f(u), diagonal)`, with a Jacobian that is triangular in
            some order of the variables and a diagonal greater than −1 (Theorem 2); `check_inner` tests both. A context
            tensor with one row per sample is cut to the samples that the inverse has not yet solved. For contexts of
            another form, the inner function does this itself in `context_rows(context, rows)`. One that goes through
            images in raster order may offer `raster_stack(context)` (`expmflow.nn.raster`); it is then inverted row by
            row.
        tol: the largest entry of the residual of the inverse, relative to max(1, max |W z|); follows the dtype.
        max_iterations: the limit before `ConvergenceError`, for each row of an image and for the whole.

    Example:
        >>> layer = T.GeneralizedSylvester(T.Householder(4), expmflow.nn.DenseInner(4, hidden=16))
        >>> z, logdet = layer(torch.randn(2, 4))
    """

    closed_form: ClassVar[tuple[str, ...]] = ("forward",)

    def __init__(
        self, basis: Transform, inner: nn.Module, *, tol: float | None = None, max_iterations: int = 200
    ) -> None:
        super().__init__()
        expect_count(max_iterations, "max_iterations")
        self.basis = basis
        self.inner = inner
        self.tol = tol
        self.max_iterations = max_iterations
        self.last_iterations = 0

    def check_event_shape(self, event_shape: tuple[int, ...]) -> None:
        self.basis.check_event_shape(event_shape)

    def check_context(self, context: Any, x: Tensor) -> None:
        check = getattr(self.inner, "check_context", None)
        if check is not None:
            check(context, x)

    def _forward(self, x: Tensor, context: Any) -> Output:
        u, _ = self.basis(x, context)
        value, diagonal = self.inner(u, context)
        with constant_constraints():  # they have just been updated
            residual, _ = self.basis.inverse(value, context)
        return x + residual, torch.log1p(diagonal).flatten(1).sum(1)

    def _inverse(self, z: Tensor, context: Any) -> Output:
        with constant_constraints():  # all iterations need the same function
            v, _ = self.basis(z, context)
            u = self._solve(v, context)
            value, diagonal = self.inner(u, context)
            residual, _ = self.basis.inverse(value, context)
        return z - residual, -torch.log1p(diagonal).flatten(1).sum(1)

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # the number of iterations depends on the data
    def _solve(self, v: Tensor, context: Any) -> Tensor:
        """u with u + f(u) = v; no gradient passes through the iterations."""
        cut = context_cutter(self.inner, context, v.shape[0])

        def evaluate(u: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
            if cut is not None:
                return self.inner(u, cut(rows))
            value, diagonal = self.inner(v.index_copy(0, rows, u), context)  # f may need all rows for its context
            return value[rows], diagonal[rows]

        stack = getattr(self.inner, "raster_stack", None) if v.numel() and not transformed(v) else None
        limits: Any = {"tol": self.tol, "max_iterations": self.max_iterations}
        try:
            with torch.no_grad():
                start, rounds = (None, 0) if stack is None else solve_by_slabs(stack(context), v.detach(), **limits)
                solution = triangular_fixed_point(evaluate, v.detach(), start=start, **limits)
        except ConvergenceError as error:
            raise ConvergenceError(f"{layer_name(self)}: {error}", error.solution) from None
        self.last_iterations = rounds + solution.iterations
        if not torch.is_grad_enabled():
            return solution.value
        if stack is None:
            return with_implicit_gradient(lambda u: self.inner(u, context), solution.value, v)

        def attach(slab: RasterStack, target: Tensor, i: int) -> Tensor:
            return with_implicit_gradient(slab, solution.value.select(2, i), target)

        return torch.stack(list(stack(context).substitute(v, attach)), dim=2)

    def check_inner(self, u: Tensor, context: Any = None) -> None:
        """Raise `ValueError` unless, at each row of `u`, the inner function satisfies Theorem 2.

        Its Jacobian must be triangular in some order of the variables, with the diagonal that it declares, greater than
        −1. Costs one dense Jacobian per row: for tests and small events.
        """
        with constant_constraints():
            check_inner(self.inner, u, context)


@final
class ConvSylvester(GeneralizedSylvester):
    """The convolutional Sylvester flow: W = exp(M) Q with a convolution M and an orthogonal 1×1 convolution Q.

    The inverse solves an image row by row (`expmflow.nn.raster`) and needs no norm constraint inside f. With a
    constraint, `lipschitz`, training ends at more bits per dimension (results/sylvester.md).

    Args:
        channels: C of the input `(batch, C, h, w)`.
        hidden: channels inside the autoregressive function.
        kernel_size, coeff, training_tol: of the convolution exponential.
        reflections: Householder reflections of Q; one per channel if None.
        gamma: the bound of the diagonal; the inverse is proven to converge for γ ≤ ½, and measured to beyond.
        lipschitz: the largest norm of each inner convolution; 1.5 in the paper, None for no constraint.
        activation: between the inner convolutions, `"elu"`, or `"relu"` as in the paper.
        context_channels: channels of a context `(batch, channels, h, w)` or `(batch, channels)`; 0 for none.
        use_basis: False omits the change of basis, as in the paper's ablation.
        tol, max_iterations: of the inverse.

    Example:
        >>> layer = T.ConvSylvester(4, hidden=32)
        >>> z, logdet = layer(torch.randn(2, 4, 8, 8))
        >>> x, _ = layer.inverse(z)
    """

    def __init__(
        self,
        channels: int,
        hidden: int,
        *,
        kernel_size: int = 3,
        coeff: float = 0.9,
        training_tol: float | None = None,
        reflections: int | None = None,
        gamma: float = 0.5,
        lipschitz: float | None = None,
        activation: str = "elu",
        context_channels: int = 0,
        use_basis: bool = True,
        tol: float | None = None,
        max_iterations: int = 200,
    ) -> None:
        basis = conv_basis(
            channels, reflections, use_basis, kernel_size=kernel_size, coeff=coeff, training_tol=training_tol
        )
        inner = ConvInner(
            channels,
            hidden,
            gamma=gamma,
            lipschitz=lipschitz,
            activation=activation,
            context_channels=context_channels,
        )
        super().__init__(basis, inner, tol=tol, max_iterations=max_iterations)
        self.channels = channels

    def check_event_shape(self, event_shape: tuple[int, ...]) -> None:
        expect_images(event_shape, self.channels)


def conv_basis(channels: int, reflections: int | None, use_basis: bool, **exponential: Any) -> Chain:
    """W = exp(M) Q: an orthogonal 1×1 convolution, then a convolution exponential; without layers, W is the identity.

    Args:
        channels: C.
        reflections: of Q.
        use_basis: False gives the identity.
        exponential: arguments of `ConvExp`.
    """
    layers = [Householder(channels, reflections), ConvExp(channels, **exponential)]
    return Chain(layers if use_basis else [])


@final
class DenseSylvester(GeneralizedSylvester):
    """The Sylvester flow on vectors: an orthogonal basis, and a MADE as the autoregressive function.

    Args:
        features: d of the input `(batch, d)`.
        hidden: the width of two hidden layers, or a list of all widths.
        reflections: Householder reflections of the basis; one per feature if None.
        gamma: the bound of the diagonal.
        context_features: features of a context `(batch, features)`; 0 for none.
        tol, max_iterations: of the inverse.

    Example:
        >>> layer = T.DenseSylvester(2, hidden=16)
        >>> z, logdet = layer(torch.randn(5, 2))
    """

    def __init__(
        self,
        features: int,
        hidden: int | Sequence[int],
        *,
        reflections: int | None = None,
        gamma: float = 0.5,
        context_features: int = 0,
        tol: float | None = None,
        max_iterations: int = 200,
    ) -> None:
        inner = DenseInner(features, hidden, gamma=gamma, context_features=context_features)
        super().__init__(Householder(features, reflections), inner, tol=tol, max_iterations=max_iterations)
        self.features = features

    def check_event_shape(self, event_shape: tuple[int, ...]) -> None:
        expect_vectors(event_shape, self.features)


@final
class GraphSylvester(GeneralizedSylvester):
    """The Sylvester flow on graphs: W = exp(M) Q, with a graph convolution M and an orthogonal matrix Q over features.

    For node features `(batch, N, features)`. What f adds to feature k of a node depends on that feature itself and on
    the features before k of the node and its neighbours. So renumbering the nodes renumbers the result. Layers should
    alternate `reverse`.

    The context is the adjacency: `(N, N)` or `(batch, N, N)`, dense; a pair `(adjacency, mask)` for graphs of different
    sizes in one padded batch, with `mask` of shape `(batch, N)`; or None for complete graphs. Padding is left
    unchanged.

    Args:
        features: F.
        hidden: features inside the graph network.
        reverse: whether f goes from the last feature to the first.
        max_neighbours: as in `GraphConvExp`.
        reflections: Householder reflections of Q; one per feature if None.
        gamma: the bound of the diagonal.
        use_basis: False omits the change of basis.
        tol, max_iterations: of the inverse.

    Example:
        >>> layer = T.GraphSylvester(2, hidden=16)
        >>> z, logdet = layer(torch.randn(8, 4, 2), context=torch.ones(4, 4) - torch.eye(4))
    """

    def __init__(
        self,
        features: int,
        hidden: int = 64,
        *,
        reverse: bool = False,
        max_neighbours: int | None = None,
        reflections: int | None = None,
        gamma: float = 0.5,
        use_basis: bool = True,
        tol: float | None = None,
        max_iterations: int = 200,
    ) -> None:
        inner = GraphInner(features, hidden, gamma=gamma, reverse=reverse)
        q = Householder(features, reflections, dim=-1)
        basis = Chain([q, GraphConvExp(features, max_neighbours=max_neighbours)] if use_basis else [])
        super().__init__(basis, inner, tol=tol, max_iterations=max_iterations)
        self.features = features

    def check_event_shape(self, event_shape: tuple[int, ...]) -> None:
        expect_nodes(event_shape, self.features)
