"""The convolution as an operator."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, final

import torch
import torch.nn.functional as F
from torch import Tensor

from expmflow._transformed import transformed
from expmflow._validation import expect, expect_count, expect_finite, expect_one_of, expect_tensor, expect_type
from expmflow.operators import spectrum
from expmflow.operators.base import LinearOperator, Scalar
from expmflow.operators.padding import (
    PADDINGS,
    Padding,
    check_size,
    fixed_points,
    merged_taps,
    pad,
    pad_reflect_adjoint,
)

CHANNELS_LAST_FROM = 12  # measured: with fewer channels and no gradient, contiguous memory is faster

_CONV: dict[int, Callable[..., Tensor]] = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
_CONV_TRANSPOSE: dict[int, Callable[..., Tensor]] = {
    1: F.conv_transpose1d,
    2: F.conv_transpose2d,
    3: F.conv_transpose3d,
}
_CHANNELS_LAST = {2: torch.channels_last, 3: torch.channels_last_3d}


@final
class ConvOperator(LinearOperator):
    """x ↦ m ⋆ x for `x` of shape `(batch, C, *n)`: a convolution that keeps channels and size.

    As everywhere in deep learning, ⋆ is the cross-correlation.

    Args:
        kernel: `(C, C/groups, *k)` with 1, 2 or 3 spatial dimensions and odd sizes k.
        padding: `"zeros"`, `"circular"` or `"reflect"`.
        dilation: the distance between taps, one number or one per axis.
        groups: the number of channel blocks that do not mix.
        validate: check shapes and finiteness; layers that build an operator at each call turn it off.

    Example:
        >>> edges = ConvOperator(torch.tensor([[[[0.6, 0.0, -0.6]]]]))      # the paper's edge filter, 1 × 3
        >>> edges(torch.eye(3).reshape(1, 1, 3, 3))[0, 0, 0]
        tensor([0.0000, 0.6000, 0.0000])
        >>> edges.trace((1, 28, 28)), edges.log_norm_bound((1, 28, 28)).item()
        (tensor(0.), 0.0)
    """

    def __init__(
        self,
        kernel: Tensor,
        padding: Padding = "zeros",
        *,
        dilation: int | Sequence[int] = 1,
        groups: int = 1,
        validate: bool = True,
    ) -> None:
        super().__init__()
        dims = kernel.ndim - 2 if isinstance(kernel, Tensor) else 0
        if validate:
            _check_arguments(kernel, padding, dilation, groups)
        self.kernel = kernel
        self.padding = padding
        self.dilation = (dilation,) * dims if isinstance(dilation, int) else tuple(dilation)
        self.groups = groups
        self._margins = tuple(d * (k // 2) for d, k in zip(self.dilation, kernel.shape[2:], strict=True))
        self._dims = dims
        # the convolution pads with zeros itself; all other paddings are applied beforehand
        self._inner_padding = self._margins if padding == "zeros" else (0,) * dims
        self._outer_padding = (0,) * dims if padding == "zeros" else self._margins

    @property
    def parameters(self) -> tuple[Tensor, ...]:
        return (self.kernel,)

    def _around(self, kernel: Tensor) -> ConvOperator:
        """The same convolution with another kernel of this shape, without checks; layers build several at each call."""
        other = object.__new__(ConvOperator)
        other.__dict__.update(self.__dict__, kernel=kernel, _cache={}, _cached_for=None)
        return other

    def rebuild(self, parameters: Sequence[Tensor]) -> ConvOperator:
        return self._around(*parameters)

    def scale(self, factor: Scalar) -> ConvOperator:
        return self._around(_channels_last(self.kernel * factor))

    def multiples(self, factors: Sequence[float]) -> list[LinearOperator]:
        column = self.kernel.new_tensor(factors).reshape(-1, *(1,) * self.kernel.ndim)
        return [self._around(kernel) for kernel in (column * _channels_last(self.kernel)).unbind()]

    def _options(self) -> dict[str, Any]:
        return {"padding": self._inner_padding, "dilation": self.dilation, "groups": self.groups}

    def apply(self, x: Tensor) -> Tensor:
        return _CONV[self._dims](pad(x, self._outer_padding, self.padding), self.kernel, **self._options())

    def apply_adjoint(self, y: Tensor) -> Tensor:
        if self.padding != "reflect":  # the transpose is a convolution again, and faster as one
            return self.adjoint_product()(y)
        spread = _CONV_TRANSPOSE[self._dims](y, self.kernel, **self._options())
        return pad_reflect_adjoint(spread, self._outer_padding)

    def adjoint_product(self) -> Callable[[Tensor], Tensor]:
        if self.padding == "reflect":
            return self.apply_adjoint
        return self._around(_channels_last(self.adjoint_kernel())).apply

    def adjoint_kernel(self) -> Tensor:
        """The kernel of the transpose, which is also a convolution unless the padding is reflect."""
        shape = self.kernel.shape
        blocks = self.kernel.reshape(self.groups, shape[1], *shape[1:]).transpose(1, 2)
        return blocks.reshape(shape).flip([axis + 2 for axis in range(self._dims)])

    def parameter_vjp(self, x: Tensor, y: Tensor) -> tuple[Tensor | None, ...]:
        padded = pad(x, self._outer_padding, self.padding)
        ones, zeros = (1,) * self._dims, (0,) * self._dims
        geometry = (ones, self._inner_padding, self.dilation, False, zeros, self.groups)
        # the kernel's gradient alone, without the input's
        return (torch.ops.aten.convolution_backward(y, padded, self.kernel, None, *geometry, (False, True, False))[1],)

    def layout(self, x: Tensor) -> Tensor:
        few = self.kernel.shape[0] < CHANNELS_LAST_FROM and not torch.is_grad_enabled()
        return x if few or x.device.type != "cpu" or transformed(x) else _channels_last(x)

    def folded(self, event_shape: tuple[int, ...]) -> ConvOperator:
        """Taps that reach the same point of a small torus are summed; taps that always miss the image are dropped."""
        kernel = self._folded_kernel(event_shape[1:])
        return self if kernel is self.kernel else self._around(kernel.to(self.kernel.dtype))

    def _folded_kernel(self, sizes: tuple[int, ...]) -> Tensor:
        kernel = self.kernel
        for axis, (k, d, n) in enumerate(zip(kernel.shape[2:], self.dilation, sizes, strict=True), start=2):
            targets = merged_taps(k, d, n, self.padding)
            if targets != list(range(k)):  # in float64: taps that cancel must not leave a rounding error
                merge = kernel.new_zeros(k, k, dtype=torch.float64)
                for tap, target in enumerate(targets):
                    if target is not None:
                        merge[tap, target] = 1
                kernel = (kernel.double().movedim(axis, -1) @ merge).movedim(-1, axis)
        return kernel

    def check_event_shape(self, event_shape: tuple[int, ...]) -> None:
        channels = self.kernel.shape[0]
        if len(event_shape) != self._dims + 1 or event_shape[0] != channels:
            axes = ", ".join(["batch", str(channels), *"hwd"[: self._dims]])
            expect(False, f"an input of shape ({axes})", f"events of shape {tuple(event_shape)}")
        for size, margin in zip(event_shape[1:], self._margins, strict=True):
            check_size(size, margin, self.padding)

    def trace(self, event_shape: Sequence[int]) -> Tensor:
        """tr A: over all taps, the trace over channels times the number of points that the tap maps to themselves."""
        sizes = self._event(event_shape)[1:]
        blocks = self.kernel.reshape(self.groups, *self.kernel.shape[1:2], *self.kernel.shape[1:])
        taps = blocks.diagonal(dim1=1, dim2=2).sum((0, -1))
        counts = [
            [fixed_points(n, d * (j - k // 2), self.padding) for j in range(k)]
            for n, d, k in zip(sizes, self.dilation, taps.shape, strict=True)
        ]
        reached = [math.prod(tap) for tap in itertools.product(*counts)]
        return (taps.flatten() * taps.new_tensor(reached)).sum()

    def sum_length(self, event_shape: Sequence[int]) -> int:
        """Taps times the channels of a group, because sums are formed tap by tap."""
        return self.kernel[0].numel()

    def adjoint_sum_length(self, event_shape: Sequence[int]) -> int:
        folded = 2 * self._dims if self.padding == "reflect" else 0
        return self.sum_length(event_shape) + folded

    def _absolute_norm_bound(self, event_shape: tuple[int, ...]) -> Tensor:
        """For a kernel without negative entries, frequency zero has the largest norm."""
        taps = self._folded_kernel(event_shape[1:]).double().abs().flatten(2).sum(-1)
        mixing = torch.linalg.matrix_norm(taps.unflatten(0, (self.groups, -1)), ord=2).amax()
        return mixing * (math.sqrt(2) ** self._reflected_axes())

    def _reflected_axes(self) -> int:
        return sum(margin > 0 for margin in self._margins) if self.padding == "reflect" else 0

    def _symbol(self, event_shape: tuple[int, ...]) -> tuple[Tensor, float]:
        sizes = event_shape[1:]
        points, spacing, slack = spectrum.torus_sizes(sizes, self.kernel.shape[2:], self.dilation, self.padding)
        return spectrum.symbol(self._folded_kernel(sizes), self.groups, points, spacing), slack

    def _norm_bound(self, event_shape: tuple[int, ...]) -> Tensor:
        symbol, slack = self._symbol(event_shape)
        return spectrum.largest_singular_value(symbol) * slack * math.sqrt(2) ** self._reflected_axes()

    def _log_norm_bound(self, event_shape: tuple[int, ...]) -> Tensor:
        if self.padding == "reflect":  # its transpose is not a convolution
            return self.norm_bound(event_shape)
        symbol, slack = self._symbol(event_shape)
        least, largest = spectrum.hermitian_range(symbol)
        # with S ≥ |λ| everywhere, λ + S ≥ 0 exceeds its largest sample by at most the factor `slack`
        everywhere = slack * torch.maximum(largest, -least)
        return slack * largest + (slack - 1) * everywhere


def _channels_last(x: Tensor) -> Tensor:
    """`x` with its channels contiguous in memory, which is fastest for torch's convolutions."""
    dims = x.ndim - 2
    if transformed(x):  # tensors inside torch.func have no memory layout of their own
        return x
    return x.contiguous(memory_format=_CHANNELS_LAST[dims]) if dims in _CHANNELS_LAST else x


def _check_arguments(kernel: Tensor, padding: str, dilation: int | Sequence[int], groups: int) -> None:
    expect_tensor(kernel, "the kernel")
    dims = kernel.ndim - 2
    expect(dims in (1, 2, 3), "a kernel of shape (C, C/groups, *k) with 1 to 3 spatial axes", tuple(kernel.shape))
    expect_one_of(padding, PADDINGS, "padding")
    expect_count(groups, "groups")
    outputs, inputs = kernel.shape[:2]
    expect(outputs > 0, "at least one channel", "none")
    expect(
        inputs * groups == outputs,
        f"as many input as output channels (kernel (C, C/{groups}, ...))",
        f"{inputs * groups} to {outputs}",
    )
    expect(all(k % 2 == 1 for k in kernel.shape[2:]), "odd kernel sizes", tuple(kernel.shape[2:]))
    several = isinstance(dilation, Sequence)
    expect_type(isinstance(dilation, int) or several, "dilation to be a whole number or several", repr(dilation))
    distances = (dilation,) * dims if isinstance(dilation, int) else tuple(dilation)
    expect(len(distances) == dims, f"one dilation, or {dims}", distances)
    for distance in distances:
        expect_count(distance, "dilation")
    expect_finite(kernel, "the kernel")
