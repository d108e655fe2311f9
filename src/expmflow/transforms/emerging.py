"""Emerging convolutions: two autoregressive convolutions in opposite directions, with a full joint receptive field."""

from __future__ import annotations

import math
from typing import Any, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize

from expmflow._transformed import transformed
from expmflow._validation import expect, expect_count, expect_type
from expmflow.nn.masked import Mask
from expmflow.numerics import ConvergenceError, Solution
from expmflow.numerics.regular import condition
from expmflow.numerics.tiles import CornerSystem, TiledCorners, solve_tiled, tile_corners
from expmflow.numerics.wavefront import solve_corners
from expmflow.transforms.base import Output, Transform, layer_name, real_points
from expmflow.transforms.conv1x1 import ChannelMix, Conv1x1, mix
from expmflow.transforms.frozen import Snapshot
from expmflow.transforms.shapes import expect_filled_images

INITIAL_NORM = 0.1  # approximate norm of the initial difference from the identity
ROUNDINGS = 16  # assumed number of roundings in one entry of a residual, relative to its largest product
TOGETHER = 30.0  # the largest condition at which both systems and W⁻¹ are merged: rounding may grow by as much

_Frozen = tuple[list[TiledCorners], Tensor | None, float]


@final
class Emerging(Transform):
    """z = k₂ ⋆ (k₁ ⋆ W x + b₁) + b₂: a 1×1 convolution W and two autoregressive ones (Hoogeboom et al., 2019).

    k₁ sees the points above and to the left and, at its own point, the channels up to its own; k₂ sees the opposite in
    all three. Together their receptive field is the full square. The log-determinant is h·w·(log |det W| + Σ log |d|)
    with d the diagonals of both centre taps. They are stored as sign and log-magnitude, so training cannot move one
    through zero.

    Forward: two convolutions (W is folded into the first). Inverse: two triangular systems, solved one anti-diagonal at
    a time, with h + w − 1 steps each for points, or fewer for square tiles of points if there are few channels. In
    evaluation mode and without gradients, everything that depends only on the weights is cached. Some weights stretch
    an image beyond the precision of a dtype, so the inverse is verified, and raises `ConvergenceError` if it is wrong.

    In the re-implementation that the convolution exponential was compared with, only height and width are reversed, so
    both centre taps are triangular in the same direction. Its diagonal may pass through zero, and its inverse goes
    pixel by pixel. Here channels are reversed too, as in the original.

    Args:
        channels: C.
        kernel_size: odd, of the full square.
        conv1x1: the 1×1 convolution W, a `Conv1x1` or a `Householder`; if None, one that starts as a random rotation.

    Example:
        >>> layer = T.Emerging(3)
        >>> z, logdet = layer(torch.randn(2, 3, 8, 8))
        >>> x, _ = layer.inverse(z)
    """

    def __init__(self, channels: int, kernel_size: int = 3, *, conv1x1: ChannelMix | None = None) -> None:
        super().__init__()
        expect_count(channels, "channels")
        conv1x1 = Conv1x1(channels) if conv1x1 is None else conv1x1
        expect_type(isinstance(conv1x1, ChannelMix), "conv1x1 to be a Conv1x1 or a Householder", repr(conv1x1))
        expect(conv1x1.channels == channels, f"a 1×1 of {channels} channels", conv1x1.channels)
        expect(conv1x1.dim == 1, "a 1×1 on axis 1", conv1x1.dim)
        self.channels = channels
        self.conv1x1 = conv1x1
        self.first = CornerConv(channels, kernel_size)
        self.second = CornerConv(channels, kernel_size, reverse=True)
        self._snapshot = Snapshot()
        self._tiled: tuple[tuple[int, ...], _Frozen] | None = None

    def check_event_shape(self, event_shape: tuple[int, ...]) -> None:
        expect_filled_images(event_shape, self.channels)

    def _forward(self, x: Tensor, context: Any) -> Output:
        return self._convolved(x), self._logdet(x)

    def _convolved(self, x: Tensor) -> Tensor:
        return self.second(F.conv2d(x, self._folded(), self.first.bias, padding=self.first.centre))

    def _folded(self) -> Tensor:
        """The kernel of the 1×1 followed by the first convolution."""
        return torch.einsum("omhw,mi->oihw", self.first.kernel(), self.conv1x1.matrix()).contiguous()

    def _inverse(self, z: Tensor, context: Any) -> Output:
        logdet = -self._logdet(z)
        if _recorded(z, *self.parameters()):
            return self._solved(z), logdet
        if not self.training and not torch.is_grad_enabled():
            systems, unmix, gain = self._frozen_systems(tuple(z.shape[1:]))
            x = z
            for tiled in systems:
                x = solve_tiled(tiled, x)
            x = x if unmix is None else mix(x, unmix, 1)
        else:
            x, gain = self._solved(z), self._gain()
        self._verify(x.detach(), z.detach(), gain)
        return x, logdet

    def _solved(self, z: Tensor) -> Tensor:
        return mix(solve_corners([self.second.system(), self.first.system()], z), self.conv1x1.inverse_matrix(), 1)

    def _frozen_systems(self, event_shape: tuple[int, ...]) -> _Frozen:
        """The tiled systems, cached until the weights or the image size change."""
        if not self._snapshot.matches(self) or self._tiled is None or self._tiled[0] != event_shape:
            self._tiled = None  # the next line may raise, and the snapshot counts these weights as seen
            self._tiled = event_shape, (*self._tiled_systems(event_shape), self._gain())
        return self._tiled[1]

    def _tiled_systems(self, event_shape: tuple[int, ...]) -> tuple[list[TiledCorners], Tensor | None]:
        """Both systems and W⁻¹ merged into one; or one by one, with W⁻¹ to be applied last, if merging costs digits."""
        origin = self._convolved(self.first.bias.new_zeros(1, *event_shape))[0]
        together = tile_corners([self.second.system(), self.first.system(self.conv1x1)], origin)
        if together.condition <= TOGETHER:
            return [together], None
        alone = [
            tile_corners([conv.system()], conv.bias[:, None, None].expand(event_shape))
            for conv in (self.second, self.first)
        ]
        return alone, self.conv1x1.inverse_matrix()

    @torch.no_grad()
    def _gain(self) -> float:
        """The largest sum of absolute products in an entry of the output, for inputs of at most 1, times condition
        numbers.

        The condition numbers are those of the matrices that the inverse uses: each may amplify the error by as much.
        """
        kernels = self._folded(), self.second.kernel()
        sums = math.prod(float(kernel.abs().sum((1, 2, 3)).amax()) for kernel in kernels)
        inverted = self.conv1x1.matrix(), self.first.unit_centre(), self.second.unit_centre()
        return sums * math.prod(map(condition, inverted))

    @torch.no_grad()
    def _verify(self, x: Tensor, z: Tensor, gain: float) -> None:
        """Raise unless x maps to z. The forward pass is computed only if x is so large that rounding could matter."""
        if x.numel() == 0 or math.isnan(gain):  # NaN weights are reported by whoever checks the result
            return
        eps = torch.finfo(z.dtype).eps
        allowed = eps**0.5 * z.abs().amax((1, 2, 3)).clamp_min(1)
        if bool((ROUNDINGS * eps * gain * x.abs().amax((1, 2, 3)) <= allowed).all()):
            return
        residual = ((self._forward(x, None)[0] - z).abs().amax((1, 2, 3)) / allowed).nan_to_num(torch.inf, torch.inf)
        worst = float(residual.amax()) * eps**0.5
        if worst > eps**0.5:
            raise ConvergenceError(
                f"{layer_name(self)}: Expected a residual of at most {eps**0.5:.2g} (relative); got {worst:.2g}. A map "
                "that stretches by so much has no inverse in this precision.",
                Solution(x, 1, worst, False),
            )

    def _logdet(self, x: Tensor) -> Tensor:
        per_point = self.conv1x1.log_abs_det() + self.first.log_diagonal.sum() + self.second.log_diagonal.sum()
        return real_points(x, self.channels, None) * per_point


def _recorded(*tensors: Tensor) -> bool:
    """Whether operations are traced or transformed, so that nothing may be cached or taken from a cache."""
    if torch.compiler.is_compiling():
        return True
    return torch.jit.is_tracing() or transformed(*tensors)  # type: ignore[attr-defined]


@final
class CornerConv(nn.Module):
    """A convolution that sees the points above and to the left and, at its own point, the channels up to its own.

    Args:
        channels: C.
        kernel_size: odd; one corner of the square is used.
        reverse: whether height, width and channels are reversed.
    """

    weight: Tensor
    sign: Tensor

    def __init__(self, channels: int, kernel_size: int, *, reverse: bool = False) -> None:
        super().__init__()
        expect_count(kernel_size, "kernel_size")
        expect(kernel_size % 2 == 1, "an odd kernel_size", kernel_size)
        self.reverse = reverse
        self.centre = kernel_size // 2
        mask = corner_mask(channels, kernel_size)
        std = INITIAL_NORM / (channels**0.5 * (kernel_size + 1))
        self.weight = nn.Parameter(torch.randn(channels, channels, kernel_size, kernel_size) * std)
        parametrize.register_parametrization(self, "weight", Mask(mask.flip(0, 1, 2, 3) if reverse else mask))
        self.log_diagonal = nn.Parameter(torch.zeros(channels))
        self.register_buffer("sign", torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels))

    def kernel(self) -> Tensor:
        """`(C, C, k, k)`, including the diagonal of the centre tap."""
        diagonal = torch.diag(self.sign * self.log_diagonal.exp())[:, :, None, None]
        return self.weight + F.pad(diagonal, (self.centre,) * 4)

    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(x, self.kernel(), self.bias, padding=self.centre)

    def unit_centre(self) -> Tensor:
        """The centre tap divided by its diagonal."""
        centre = self.kernel()[:, :, self.centre, self.centre]
        return centre / centre.diagonal()[:, None]

    def solve(self, z: Tensor) -> Tensor:
        """The image that this convolution maps to z."""
        return solve_corners([self.system()], z)

    def system(self, conv1x1: ChannelMix | None = None) -> CornerSystem:
        """The equations that invert this convolution, or the composition of a 1×1 and this convolution."""
        taps = self.kernel().permute(2, 3, 0, 1)
        c = self.centre
        taps = taps[c:, c:] if self.reverse else taps[: c + 1, : c + 1].flip(0, 1)
        unit = torch.eye(taps.shape[-1], dtype=taps.dtype, device=taps.device)
        inverse = torch.linalg.solve_triangular(taps[0, 0], unit, upper=self.reverse)
        if conv1x1 is not None:
            taps, inverse = taps @ conv1x1.matrix(), conv1x1.inverse_matrix() @ inverse
        return CornerSystem(taps, inverse, self.bias, self.reverse)


def corner_mask(channels: int, kernel_size: int) -> Tensor:
    """1 where an output depends on another input: the corner up to the centre, and there the channels before its
    own."""
    centre = kernel_size // 2
    mask = torch.zeros(channels, channels, kernel_size, kernel_size)
    mask[:, :, : centre + 1, : centre + 1] = 1
    mask[:, :, centre, centre] = torch.ones(channels, channels).tril(-1)
    return mask
