"""The original Sylvester flow (van den Berg et al., 2018), with three kinds of orthogonal basis."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, final

import torch
from torch import Tensor

from expmflow._transformed import transformed
from expmflow._validation import expect, expect_count
from expmflow.transforms.amortized import Amortizable
from expmflow.transforms.base import Output
from expmflow.transforms.conv1x1 import reflections_product
from expmflow.transforms.shapes import expect_vectors


class OriginalSylvester(Amortizable):
    """z = x + Q R̃ tanh(R Qᵀx + b), logdet = Σ log(1 + r̃ᵢᵢ rᵢᵢ tanh′), with Q of m orthonormal columns.

    R and R̃ are upper triangular with diagonals in (−1, 1), by tanh. Their other entries are the upper triangles of one
    matrix D and of its transpose. In the basis Q the map is a triangular system, so the inverse finds m scalar roots,
    starting with the last, and refines them together by a Newton step. Gradients through it are exact.

    Args:
        features: d of the input `(batch, d)`.
        size: m.
        basis: the parameters of Q, and the initial values of the layer's own.
        amortized: take all parameters from each sample's context.
    """

    closed_form: ClassVar[tuple[str, ...]] = ("forward",)

    def __init__(self, features: int, size: int, basis: Mapping[str, Tensor], *, amortized: bool) -> None:
        start = {
            "matrix": 0.1 * torch.randn(size, size) * size**-0.5,
            "diagonal_outer": 0.1 * torch.randn(size),
            "diagonal_inner": torch.ones(size),  # if both diagonals were zero, neither would get a gradient
            "bias": torch.zeros(size),
            **basis,
        }
        super().__init__(start, amortized=amortized)
        self.features = features

    @abstractmethod
    def basis(self, params: Mapping[str, Tensor]) -> Tensor:
        """Q, `(batch, d, m)` or `(1, d, m)`."""

    def check_event_shape(self, event_shape: tuple[int, ...]) -> None:
        expect_vectors(event_shape, self.features)

    def _forward(self, x: Tensor, context: Any) -> Output:
        params = self.params(context)
        q = self.basis(params)
        outer, inner, bias = triangles(params)
        h = torch.tanh(times(inner, times(q.mT, x)) + bias)
        return x + times(q, times(outer, h)), _logdet(outer, inner, h)

    def _inverse(self, z: Tensor, context: Any) -> Output:
        params = self.params(context)
        q = self.basis(params)
        outer, inner, bias = triangles(params)
        v = times(q.mT, z)
        u = self._back_substitution(v, outer, inner, bias)
        for _ in range(2 if torch.is_grad_enabled() else 1):  # each step makes one more order of derivatives right
            h = torch.tanh(times(inner, u) + bias)
            defect = u + times(outer, h) - v
            jacobian = outer @ ((1 - h * h).unsqueeze(-1) * inner) + _identity(outer)
            u = u - torch.linalg.solve_triangular(jacobian, defect.unsqueeze(-1), upper=True).squeeze(-1)
        h = torch.tanh(times(inner, u) + bias)
        return z - times(q, times(outer, h)), -_logdet(outer, inner, h)

    @torch.no_grad()
    def _back_substitution(self, v: Tensor, outer: Tensor, inner: Tensor, bias: Tensor) -> Tensor:
        """u with u + R̃ tanh(R u + b) = v: entry i depends only on the entries after it."""
        size = v.shape[1]
        u, h = v.new_zeros(v.shape[0], 0), v.new_zeros(v.shape[0], 0)  # the entries after i
        for i in reversed(range(size)):
            offset = bias[:, i] + (inner[:, i, i + 1 :] * u).sum(1)
            right = v[:, i] - (outer[:, i, i + 1 :] * h).sum(1)
            root = self._tanh_root(right, outer[:, i, i], inner[:, i, i], offset)
            value = torch.tanh(inner[:, i, i] * root + offset)
            u, h = torch.cat([root.unsqueeze(1), u], 1), torch.cat([value.unsqueeze(1), h], 1)
        return u


def triangles(params: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """R̃, R and b."""
    matrix = params["matrix"]
    limit = 1 - 4 * torch.finfo(matrix.dtype).eps  # a tanh may round to 1, where the flow would be singular
    outer = matrix.triu(1) + torch.diag_embed(limit * torch.tanh(params["diagonal_outer"]))
    inner = matrix.mT.triu(1) + torch.diag_embed(limit * torch.tanh(params["diagonal_inner"]))
    return outer, inner, params["bias"]


def times(matrix: Tensor, x: Tensor) -> Tensor:
    """A matrix for each row of `x`, or one, `(1, …)`, for all rows, which is then a single product."""
    if matrix.shape[0] == 1:
        return x @ matrix[0].T
    return (matrix @ x.unsqueeze(-1)).squeeze(-1)


def _logdet(outer: Tensor, inner: Tensor, h: Tensor) -> Tensor:
    slopes = outer.diagonal(dim1=-2, dim2=-1) * inner.diagonal(dim1=-2, dim2=-1)
    return torch.log1p(slopes * (1 - h * h)).sum(1)


def _identity(matrix: Tensor) -> Tensor:
    return torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)


@final
class OrthogonalSylvester(OriginalSylvester):
    """z = x + Q R̃ tanh(R Qᵀx + b) in the plane of m orthonormal vectors Q; O(d m + m²) per sample, and O(d m²) for Q.

    Q comes from the given vectors by a QR decomposition (Gram–Schmidt orthogonalisation); the original iterates towards
    the nearest orthonormal vectors. Linearly dependent vectors have no gradient and are refused in training: for
    example zeros, from a head whose weights start at zero.

    Args:
        features: d of the input `(batch, d)`.
        vectors: m, at most d.
        amortized: take the parameters, m² + 3 m + d m numbers, from each sample's context instead of from the layer.

    Example:
        >>> layer = T.OrthogonalSylvester(6, vectors=2)
        >>> z, logdet = layer(torch.randn(5, 6))
    """

    def __init__(self, features: int, vectors: int, *, amortized: bool = False) -> None:
        expect_count(features, "features")
        expect_count(vectors, "vectors")
        expect(vectors <= features, f"at most {features} vectors, the features", vectors)
        super().__init__(features, vectors, {"vectors": torch.randn(features, vectors)}, amortized=amortized)

    def basis(self, params: Mapping[str, Tensor]) -> Tensor:
        vectors = params["vectors"]
        q, r = torch.linalg.qr(vectors)
        if q.requires_grad and not (torch.compiler.is_compiling() or transformed(vectors)):
            regular = bool((r.detach().diagonal(dim1=-2, dim2=-1) != 0).all())  # otherwise no gradient is finite
            self._expect(regular, "vectors that are linearly independent", "dependent ones")
        signs = torch.where(r.diagonal(dim1=-2, dim2=-1) < 0, -1.0, 1.0)  # LAPACK's signs vary with the input
        return q * signs.to(q).detach().unsqueeze(-2)


@final
class HouseholderSylvester(OriginalSylvester):
    """z = x + Q R̃ tanh(R Qᵀx + b), Q a product of reflections; O(d²) per sample, and O(d² · reflections) for Q.

    Args:
        features: d of the input `(batch, d)`.
        reflections: their number; d reach every orthogonal matrix with the sign of their determinant.
        amortized: take the parameters, d² + 3 d + d · reflections numbers, from each sample's context.

    Example:
        >>> layer = T.HouseholderSylvester(4, reflections=2)
        >>> z, logdet = layer(torch.randn(5, 4))
    """

    def __init__(self, features: int, reflections: int, *, amortized: bool = False) -> None:
        expect_count(features, "features")
        expect_count(reflections, "reflections")
        super().__init__(features, features, {"vectors": torch.randn(features, reflections)}, amortized=amortized)

    def basis(self, params: Mapping[str, Tensor]) -> Tensor:
        return reflections_product(params["vectors"])


@final
class TriangularSylvester(OriginalSylvester):
    """z = x + Q R̃ tanh(R Qᵀx + b), Q the identity or, if `reverse`, the reversal of the features; O(d²) per sample.

    Layers should alternate `reverse`.

    Args:
        features: d of the input `(batch, d)`.
        reverse: see above.
        amortized: take the parameters, d² + 3 d numbers, from each sample's context instead of from the layer.

    Example:
        >>> layers = T.Chain([T.TriangularSylvester(4, reverse=k % 2 == 1) for k in range(4)])
        >>> z, logdet = layers(torch.randn(5, 4))
    """

    def __init__(self, features: int, *, reverse: bool = False, amortized: bool = False) -> None:
        expect_count(features, "features")
        super().__init__(features, features, {}, amortized=amortized)
        self.reverse = reverse

    def basis(self, params: Mapping[str, Tensor]) -> Tensor:
        identity = _identity(params["matrix"]).unsqueeze(0)
        return identity.flip(-1) if self.reverse else identity
