"""The inverse of emerging convolutions by anti-diagonals, against a loop over pixels and its own forward pass."""

from __future__ import annotations

import statistics

import torch
import torch.nn.functional as F
from torch import Tensor

from expmflow import transforms as T
from expmflow.training.memory import keep_freed_memory
from expmflow.transforms.conv1x1 import mix
from expmflow.transforms.emerging import CornerConv
from layers import no_grad, trained_like
from timing import in_fresh_processes, medians, table

SHAPES = [(12, 16), (24, 8), (48, 4), (3, 32)]
BATCH = 64
PROCESSES = 7


def against_pixels(rounds: int) -> str:
    """Milliseconds, medians over fresh processes: where buffers come to lie decides over a fifth."""
    runs = in_fresh_processes("wavefronts", "times_and_errors", PROCESSES, rounds)
    rows = []
    for k, (channels, size) in enumerate(SHAPES):
        found = {name: [run[k][name] for run in runs] for name in runs[0][k]}
        middle = {name: statistics.median(values) for name, values in found.items()}
        speedups = sorted(loop / inverse for loop, inverse in zip(found["loop"], found["inverse"], strict=True))
        rows.append(
            [
                f"{channels}×{size}×{size}",
                f"{middle['forward']:.2f}",
                f"{middle['inverse']:.2f}",
                f"**{middle['inverse'] / middle['forward']:.1f}**",
                f"{middle['loop']:.0f}",
                f"**{statistics.median(speedups):.0f}×** ({speedups[0]:.0f} to {speedups[-1]:.0f})",
                f"{middle['error']:.1e}",
                f"{middle['error of the loop']:.1e}",
            ]
        )
    header = [f"shape, batch {BATCH}", "forward, ms", "inverse, ms", "inverse / forward", "pixels, ms", "speed-up"]
    return table([*header, "error", "error of the loop"], rows)


def times_and_errors(rounds: int) -> list[dict[str, float]]:
    """Milliseconds, and how far the inverse and the loop are from the image that was there, for each shape."""
    keep_freed_memory()
    found = []
    for channels, size in SHAPES:
        torch.manual_seed(0)
        x = torch.randn(BATCH, channels, size, size)
        layer = trained_like(T.Emerging(channels), x)
        assert isinstance(layer, T.Emerging)
        layer.eval()
        with torch.no_grad():
            z, _ = layer(x)
            errors = [float((back - x).abs().max()) for back in (layer.inverse(z)[0], pixel_by_pixel(layer, z))]
        ms = medians({"forward": no_grad(layer, x), "inverse": no_grad(layer.inverse, z)}, rounds)
        loop = medians({"loop": lambda layer=layer, z=z: pixel_by_pixel(layer, z)}, max(1, rounds // 5))
        found.append({**ms, **loop, **dict(zip(("error", "error of the loop"), errors, strict=True))})
    return found


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
