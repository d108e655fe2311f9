"""What the exponential layers' constraint and gradients cost, and the dense exponential against Pyro's."""

from __future__ import annotations

from collections.abc import Callable

import torch
from pyro.distributions.transforms import MatrixExponential
from torch import Tensor

import expmflow as ef
from expmflow import nn as N
from expmflow import transforms as T
from layers import backward, trained_like
from timing import geometric_mean, medians, table


def constraint_share(rounds: int) -> str:
    """How much of the training step of a ConvExp layer goes into its norm constraint."""
    rows = []
    for channels, size in [(12, 16), (24, 8), (48, 8), (48, 4), (96, 4), (3, 32)]:
        x = torch.randn(128, channels, size, size)
        layer = trained_like(T.ConvExp(channels), x)

        def constraint(layer: T.Transform = layer, x: Tensor = x) -> None:
            layer.update(x)
            layer.kernel.sum().backward()

        ms = medians({"layer": backward(layer, x), "constraint": constraint}, rounds)
        share = ms["constraint"] / ms["layer"]
        rows.append([f"{channels}×{size}×{size}", f"{ms['layer']:.1f}", f"{ms['constraint']:.2f}", f"{share:.0%}"])
    return table(["shape, batch 128", "training step, ms", "constraint, ms", "share"], rows)


def gradient_modes(rounds: int) -> str:
    """Whole models with either gradient: what the layers' default is chosen by."""
    rows, ratios = [], []
    for channels, size, depth in [(12, 16, 4), (24, 8, 4), (48, 4, 4)]:
        x = torch.randn(64, channels, size, size)
        models = {}
        for gradient in ("autograd", "recompute"):
            torch.manual_seed(0)
            model = T.Chain([layer for _ in range(depth) for layer in _subflow(channels, gradient)])
            models[gradient] = backward(model, x)
        ms = medians(models, rounds)
        ratios.append(ms["recompute"] / ms["autograd"])
        rows.append([f"{channels}×{size}×{size}", *(f"{ms[g]:.0f}" for g in models), f"{ratios[-1]:.2f}×"])
    rows.append(["geometric mean", "", "", f"**{geometric_mean(ratios):.2f}×**"])
    return table(["four subflows on", "autograd, ms", "recompute, ms", "recompute / autograd"], rows)


def against_pyro(rounds: int) -> str:
    """exp(W)x on vectors: Pyro's MatrixExponential with its own number of terms (8), and more of them.

    A rotation times 0.9 has all its singular values at the norm, where the truncated series is at its worst.
    """
    rows = []
    for features, kind in [(16, "random"), (64, "random"), (256, "random"), (64, "rotation"), (256, "rotation")]:
        generator = torch.Generator().manual_seed(features)
        weight = torch.randn(features, features, generator=generator)
        weight = torch.linalg.qr(weight)[0] if kind == "rotation" else weight
        weight = weight * (0.9 / torch.linalg.matrix_norm(weight, ord=2))
        x = torch.randn(512, features, generator=generator)
        exact = x.double() @ torch.matrix_exp(weight.double()).T
        op = ef.DenseOperator(weight)
        runs: dict[str, Callable[[], Tensor]] = {"expmflow, 1e-6": lambda op=op, x=x: ef.expm_apply(op, x, tol=1e-6)}
        for terms in (8, 12, 18):
            pyro = MatrixExponential(features, iterations=terms, normalization="none")
            pyro.weights.data.copy_(weight)
            runs[f"Pyro, {terms} terms"] = lambda pyro=pyro, x=x: pyro._call(x)
        with torch.no_grad():
            ms = medians(runs, rounds)
            for name, run in runs.items():
                off = (run().double() - exact).norm(dim=1) / x.double().norm(dim=1)
                rows.append([f"{features}, {kind}, {name}", f"{ms[name]:.2f}", f"{float(off.max()):.1e}"])
    return table(["features, weight, method (batch 512)", "ms", "error"], rows)


def _subflow(channels: int, gradient: str) -> list[T.Transform]:
    half = channels // 2
    return [
        T.Conv1x1(channels),
        T.ConvExp(channels, gradient=gradient),  # type: ignore[arg-type]
        T.AffineCoupling(N.DenseNet(half, 2 * half, growth=32, depth=2), channels),
    ]
