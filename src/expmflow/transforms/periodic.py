"""Periodic convolutions: on a torus a convolution is one small matrix per frequency."""

from __future__ import annotations

from typing import Any, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from expmflow._validation import expect, expect_count, expect_untraced
from expmflow.numerics.regular import is_regular
from expmflow.operators.padding import pad
from expmflow.operators.spectrum import symbol
from expmflow.transforms.base import Output, Transform, expanded
from expmflow.transforms.shapes import expect_filled_images

INITIAL_NORM = 0.1  # approximate norm of the initial difference from a rotation of the channels


@final
class PeriodicConv(Transform):
    """z = k ⋆ x with circular padding (Hoogeboom et al., 2019; Finzi et al., 2019).

    For each frequency ω the transformed channels are multiplied by the matrix k̂(ω). So the log-determinant is
    Σ_ω log |det k̂(ω)| and the inverse solves with k̂(ω), both exactly. Only one frequency of each conjugate pair is
    computed, and counted twice: about h·w/2 matrices of C × C in either direction. Forward: one convolution.

    Args:
        channels: C.
        kernel_size: odd.

    Example:
        >>> layer = T.PeriodicConv(3)
        >>> z, logdet = layer(torch.randn(2, 3, 8, 8))
        >>> x, _ = layer.inverse(z)
    """

    def __init__(self, channels: int, kernel_size: int = 3) -> None:
        super().__init__()
        expect_count(channels, "channels")
        expect_count(kernel_size, "kernel_size")
        expect(kernel_size % 2 == 1, "an odd kernel_size", kernel_size)
        self.channels = channels
        rotation = torch.linalg.qr(torch.randn(channels, channels))[0]
        kernel = torch.randn(channels, channels, kernel_size, kernel_size)
        kernel *= INITIAL_NORM / (2 * kernel_size * channels**0.5)
        kernel[:, :, kernel_size // 2, kernel_size // 2] += rotation
        self.kernel = nn.Parameter(kernel)

    def check_event_shape(self, event_shape: tuple[int, ...]) -> None:
        expect_filled_images(event_shape, self.channels)

    def _forward(self, x: Tensor, context: Any) -> Output:
        half = self.kernel.shape[-1] // 2
        z = F.conv2d(pad(x, (half, half), "circular"), self.kernel)
        return z, expanded(self._log_abs_det(self._matrices(x), x), x)

    def _inverse(self, z: Tensor, context: Any) -> Output:
        matrices = self._matrices(z)
        logdet = expanded(-self._log_abs_det(matrices, z), z)
        if z.shape[0] == 0:  # an empty batch has no Fourier transform
            return z.clone(), logdet
        height, width = z.shape[2:]
        waves = torch.fft.rfft2(z, dim=(-1, -2))  # half of the rows, as `symbol` has them
        right = waves.flatten(2).permute(2, 1, 0)
        solution = torch.linalg.solve(matrices.to(right.dtype), right).permute(2, 1, 0).reshape(waves.shape)
        return torch.fft.irfft2(solution, s=(width, height), dim=(-1, -2)), logdet

    def _matrices(self, x: Tensor) -> Tensor:
        """k̂(ω), `(frequencies, C, C)`: the first ⌊h/2⌋ + 1 rows of frequencies."""
        expect_untraced("a periodic convolution, whose frequencies depend on its input")
        matrices = symbol(self.kernel, 1, tuple(x.shape[2:]), (1, 1))[:, 0]
        regular = is_regular(matrices, self.kernel.detach().abs().sum((1, 2, 3)))
        self._expect(regular, "a kernel that can be inverted at every frequency", "one that cannot")
        return matrices

    def _log_abs_det(self, matrices: Tensor, x: Tensor) -> Tensor:
        height, width = x.shape[2:]
        rows = torch.linalg.slogdet(matrices)[1].reshape(-1, width).sum(1)
        alone = rows[:1] + rows[-1:] if height % 2 == 0 else rows[:1]  # all others also stand for their conjugates
        return (2 * rows.sum() - alone.sum()).to(x.dtype)
