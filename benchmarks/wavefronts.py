"""The inverse of emerging convolutions by anti-diagonals, against a loop over pixels and its own forward pass."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from expmflow import transforms as T
from expmflow.transforms.conv1x1 import mix
from expmflow.transforms.emerging import CornerConv
from layers import no_grad, trained_like
from timing import medians, table

BATCH = 64


def against_pixels(rounds: int) -> str:
    """Milliseconds of the forward pass, of the inverse, and of the loop, which finds the same images."""
    rows = []
    for channels, size in [(12, 16), (24, 8), (48, 4), (3, 32)]:
        torch.manual_seed(0)
        x = torch.randn(BATCH, channels, size, size)
        layer = trained_like(T.Emerging(channels), x)
        assert isinstance(layer, T.Emerging)
        layer.eval()
        with torch.no_grad():
            z, _ = layer(x)
            found, looped = layer.inverse(z)[0], pixel_by_pixel(layer, z)
        runs = {"forward": no_grad(layer, x), "inverse": no_grad(layer.inverse, z)}
        ms = medians(runs, rounds)
        loop = medians({"loop": lambda layer=layer, z=z: pixel_by_pixel(layer, z)}, max(1, rounds // 5))["loop"]
        rows.append(
            [
                f"{channels}×{size}×{size}",
                *(f"{ms[name]:.2f}" for name in runs),
                f"**{ms['inverse'] / ms['forward']:.1f}**",
                f"{loop:.0f}",
                f"**{loop / ms['inverse']:.0f}×**",
                f"{float((found - x).abs().max()):.1e}",
                f"{float((looped - x).abs().max()):.1e}",
            ]
        )
    header = [f"shape, batch {BATCH}", "forward, ms", "inverse, ms", "inverse / forward", "pixels, ms", "speed-up"]
    return table([*header, "error", "error of the loop"], rows)


@torch.no_grad()
def pixel_by_pixel(layer: T.Emerging, z: Tensor) -> Tensor:
    """The inverse as a loop, all images of the batch at once."""
    y = _solve_pixels(layer.first, _solve_pixels(layer.second, z))
    return mix(y, layer.conv1x1.inverse_matrix(), 1)


def _solve_pixels(conv: CornerConv, z: Tensor) -> Tensor:
    """What precedes a pixel is known when its turn comes: a product with its neighbours, and a triangular system."""
    kernel, c = conv.kernel(), conv.centre
    height, width = z.shape[2:]
    found = F.pad(torch.zeros_like(z), (c,) * 4)
    order = [(i, j) for i in range(height) for j in range(width)]
    for i, j in reversed(order) if conv.reverse else order:
        window = found[:, :, i : i + 2 * c + 1, j : j + 2 * c + 1]  # in which the pixel itself is still zero
        rest = z[:, :, i, j] - conv.bias - torch.einsum("oihw,bihw->bo", kernel, window)
        found[:, :, i + c, j + c] = torch.linalg.solve_triangular(kernel[:, :, c, c], rest.T, upper=conv.reverse).T
    return found[:, :, c : c + height, c : c + width]
