"""How many iterations the inverse of a Sylvester flow takes, and what a deep stack of layers loses on the way back."""

from __future__ import annotations

import torch
from torch import Tensor

from expmflow import transforms as T
from expmflow.numerics import fixed_point
from expmflow.numerics.solve import triangular_fixed_point
from layers import trained_like
from timing import table

HIDDEN = 64
BATCH = 64


def iterations(_: int) -> str:
    """Rounds until every row of a batch is solved: ours, and the paper's plain iteration, on the same systems."""
    rows = []
    for channels, size in [(12, 16), (24, 8), (48, 4)]:
        torch.manual_seed(1)
        x = torch.randn(BATCH, channels, size, size)
        layer = trained_like(T.ConvSylvester(channels, HIDDEN, lipschitz=1.5), x).eval()
        with torch.no_grad():
            v, _ = layer.basis(layer(x)[0])
            counts = []
            for tol in (1e-4, None):
                ours = triangular_fixed_point(lambda u, rows: layer.inner(u), v, tol=tol)
                plain = fixed_point(lambda u: layer.inner(u)[0], v, tol=tol)
                counts += [str(ours.iterations), str(plain.iterations)]
        rows.append([f"{channels}×{size}×{size}", *counts])
    header = ["shape, batch 64", "ours, 1e-4", "plain, 1e-4", "ours, float32's default", "plain, float32's default"]
    return table(header, rows)


def round_trip(_: int) -> str:
    """The relative error of x after forward and inverse through a stack, in float32."""
    rows = []
    for name, make in (
        ("20 × ConvExp", lambda c: T.ConvExp(c)),
        ("20 × ConvSylvester", lambda c: T.ConvSylvester(c, HIDDEN)),
        ("20 × (ActNorm, Householder, ConvExp, ConvSylvester)", _subflow),
    ):
        cells = [name]
        for channels, size in [(12, 16), (24, 8)]:
            torch.manual_seed(2)
            x = torch.randn(BATCH, channels, size, size)
            layers, h = [], x
            for _ in range(20):
                layers.append(trained_like(make(channels), h))
                with torch.no_grad():
                    h, _ = layers[-1](h)
            chain = T.Chain(layers).eval()
            with torch.no_grad():
                back, _ = chain.inverse(chain(x)[0])
            cells.append(f"{_relative(back, x):.1e}")
        rows.append(cells)
    return table(["layers", "12×16×16", "24×8×8"], rows)


def _subflow(channels: int) -> T.Transform:
    return T.Chain(
        [T.ActNorm(channels), T.Householder(channels), T.ConvExp(channels), T.ConvSylvester(channels, HIDDEN)]
    )


def _relative(a: Tensor, b: Tensor) -> float:
    return float(((a - b).flatten(1).norm(dim=1) / b.flatten(1).norm(dim=1)).max())
