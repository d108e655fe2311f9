"""Linear maps over channels, the same at every point: 1×1 convolutions and products of reflections."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, Literal, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from expmflow._validation import expect, expect_count
from expmflow.nn.graph import check_graph, node_mask
from expmflow.numerics.regular import is_regular
from expmflow.transforms.base import Output, Transform, keep_padding, real_points
from expmflow.transforms.shapes import expect_channels


class ChannelMix(Transform):
    """A matrix applied to the axis `dim` of `(batch, *event)`, the channels; 1 for images, −1 for graphs.

    On graphs whose context has a node mask, padding is left unchanged and does not count.
    """

    def __init__(self, channels: int, dim: int) -> None:
        super().__init__()
        expect_count(channels, "channels")
        expect(dim in (1, -1), "the channels on axis 1 or -1", dim)
        self.channels = channels
        self.dim = dim

    def check_event_shape(self, event_shape: tuple[int, ...]) -> None:
        expect_channels(event_shape, self.channels, self.dim)

    def check_context(self, context: Any, x: Tensor) -> None:
        if self.dim == -1:
            check_graph(None, node_mask(context), x)

    @abstractmethod
    def matrix(self) -> Tensor:
        """W, `(channels, channels)`."""

    @abstractmethod
    def inverse_matrix(self) -> Tensor:
        """W⁻¹."""

    @abstractmethod
    def log_abs_det(self) -> Tensor:
        """log |det W|, a scalar."""

    def _forward(self, x: Tensor, context: Any) -> Output:
        mask = node_mask(context) if self.dim == -1 else None
        z = keep_padding(mix(x, self.matrix(), self.dim), x, mask)
        return z, real_points(x, self.channels, mask) * self.log_abs_det()

    def _inverse(self, z: Tensor, context: Any) -> Output:
        mask = node_mask(context) if self.dim == -1 else None
        x = keep_padding(mix(z, self.inverse_matrix(), self.dim), z, mask)
        return x, -real_points(z, self.channels, mask) * self.log_abs_det()


def mix(x: Tensor, matrix: Tensor, dim: int) -> Tensor:
    """`matrix` applied to the axis `dim`: a matrix product if that axis is last in memory, else a 1×1 convolution."""
    if dim == 1 and x.ndim == 4 and not (x.device.type == "cpu" and x.stride(1) == 1):
        return F.conv2d(x, matrix[:, :, None, None])
    return (x.movedim(dim, -1) @ matrix.T).movedim(-1, dim)


@final
class Conv1x1(ChannelMix):
    """A 1×1 convolution with a learned matrix (Kingma and Dhariwal, 2018).

    Args:
        channels: C.
        parametrization: `"lu"`, W = P L U with a fixed permutation P, is cheap to invert; `"free"` is any matrix.
        dim: the axis of the channels: 1 for images, −1 for graphs and vectors.
        start: the initial matrix, not singular; a random rotation if None.

    Example:
        >>> z, logdet = T.Conv1x1(3)(torch.randn(2, 3, 8, 8))
    """

    permutation: Tensor
    sign: Tensor

    def __init__(
        self,
        channels: int,
        parametrization: Literal["lu", "free"] = "lu",
        *,
        dim: int = 1,
        start: Tensor | None = None,
    ) -> None:
        super().__init__(channels, dim)
        expect(parametrization in ("lu", "free"), "parametrization to be 'lu' or 'free'", repr(parametrization))
        self.parametrization = parametrization
        matrix = torch.linalg.qr(torch.randn(channels, channels))[0] if start is None else start
        expect(matrix.shape == (channels,) * 2, f"a start of shape {(channels,) * 2}", tuple(matrix.shape))
        regular = start is None or bool(torch.linalg.slogdet(start)[1].isfinite())
        expect(regular, "a start that can be inverted", "a singular matrix")
        if parametrization == "free":
            self.weight = nn.Parameter(matrix.clone(memory_format=torch.contiguous_format))  # LAPACK is column-major
            return
        permutation, lower, upper = torch.linalg.lu(matrix)
        diagonal = upper.diagonal()
        self.register_buffer("permutation", permutation.contiguous())
        self.register_buffer("sign", diagonal.sign())
        self.lower = nn.Parameter(lower.tril(-1).contiguous())
        self.upper = nn.Parameter(upper.triu(1).contiguous())
        self.log_diagonal = nn.Parameter(diagonal.abs().log())

    def _factors(self) -> tuple[Tensor, Tensor]:
        lower = self.lower.tril(-1) + torch.eye(self.channels, dtype=self.lower.dtype, device=self.lower.device)
        return lower, self.upper.triu(1) + torch.diag(self.sign * self.log_diagonal.exp())

    def matrix(self) -> Tensor:
        if self.parametrization == "free":
            return self.weight
        lower, upper = self._factors()
        return self.permutation @ lower @ upper

    def inverse_matrix(self) -> Tensor:
        if self.parametrization == "free":
            regular = is_regular(self.weight, self.weight.detach().abs().sum(1))
            known = regular or bool(self.weight.isfinite().all())  # NaN is reported by whoever checks the result
            self._expect(regular or not known, "a matrix that can be inverted", "a singular one")
            return torch.linalg.inv(self.weight)
        lower, upper = self._factors()
        half = torch.linalg.solve_triangular(lower, self.permutation.T, upper=False, unitriangular=True)
        return torch.linalg.solve_triangular(upper, half, upper=True)

    def log_abs_det(self) -> Tensor:
        return torch.linalg.slogdet(self.weight)[1] if self.parametrization == "free" else self.log_diagonal.sum()


@final
class Householder(ChannelMix):
    """An orthogonal matrix, the product of reflections I − 2 v vᵀ / ‖v‖²; logdet 0.

    The product is formed at once: for unit vectors in the columns of V it is I − V S⁻¹ Vᵀ with S the strictly upper
    part of VᵀV plus ½ I.

    Args:
        channels: C.
        reflections: their number; C if None, which reaches every orthogonal matrix with the sign of its determinant.
        dim: the axis of the channels: 1 for images and vectors, −1 for graphs.

    Example:
        >>> q = T.Householder(3).matrix()
        >>> torch.allclose(q @ q.T, torch.eye(3), atol=1e-6)
        True
    """

    def __init__(self, channels: int, reflections: int | None = None, *, dim: int = 1) -> None:
        super().__init__(channels, dim)
        count = channels if reflections is None else reflections
        expect_count(count, "reflections")
        self.vectors = nn.Parameter(torch.randn(channels, count))

    def matrix(self) -> Tensor:
        return reflections_product(self.vectors)

    def inverse_matrix(self) -> Tensor:
        return self.matrix().T

    def log_abs_det(self) -> Tensor:
        return self.vectors.new_zeros(())


def reflections_product(vectors: Tensor) -> Tensor:
    """H₁ H₂ … H_k for reflections along the columns of `vectors`, `(..., d, k)`."""
    unit = F.normalize(vectors, dim=-2)
    count = unit.shape[-1]
    half = torch.eye(count, dtype=unit.dtype, device=unit.device) / 2
    core = torch.linalg.solve_triangular((unit.mT @ unit).triu(1) + half, unit.mT, upper=True)
    return torch.eye(unit.shape[-2], dtype=unit.dtype, device=unit.device) - unit @ core
