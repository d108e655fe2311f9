"""The convolution exponential against the textbook loop, and against what else computes exp(A)x."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from scipy.sparse.linalg import LinearOperator as ScipyOperator
from scipy.sparse.linalg import expm_multiply
from torch import Tensor
from torchdiffeq import odeint

import expmflow as ef
from expmflow import transforms as T
from timing import geometric_mean, in_fresh_processes, medians, table

SHAPES = [(12, 16), (24, 8), (48, 8), (48, 4), (96, 4), (3, 32)]
BATCH = 128
NORM = 0.9
TOL = 1e-6
LOOP_TERMS_EVALUATION = 13
LOOP_TERMS_TRAINING = 6
PROCESSES = 7


def textbook(x: Tensor, kernel: Tensor, terms: int) -> Tensor:
    """The loop as the paper prints it."""
    p = z = x
    for i in range(1, terms + 1):
        p = F.conv2d(p, kernel, padding=1) / i
        z = z + p
    return z


def problem(channels: int, size: int) -> tuple[Tensor, Tensor]:
    """A batch, and a kernel with σmax = 0.9 at this size."""
    generator = torch.Generator().manual_seed(channels * size)
    kernel = torch.randn(channels, channels, 3, 3, generator=generator)
    sigma = ef.power_iteration(ef.ConvOperator(kernel.double()), (channels, size, size), iterations=2000)
    return torch.randn(BATCH, channels, size, size, generator=generator), kernel * (NORM / float(sigma))


def frozen_layer(kernel: Tensor) -> T.ConvExp:
    """A layer in evaluation mode with exactly this kernel."""
    layer = T.ConvExp(len(kernel), coeff=10.0, tol=TOL)
    with torch.no_grad():
        layer.parametrizations.kernel.original.copy_(kernel)
    return layer.eval()


def error(z: Tensor, x: Tensor, kernel: Tensor) -> float:
    """The largest relative error of a row."""
    exact = ef.expm_apply(ef.ConvOperator(kernel.double()), x.double())
    return float(((z.double() - exact).flatten(1).norm(dim=1) / x.double().flatten(1).norm(dim=1)).max())


def evaluation(rounds: int) -> str:
    rows, ratios = [], {"known": [], "kept": [], "new": [], "frozen": []}
    for channels, size in SHAPES:
        x, kernel = problem(channels, size)
        op, layer = ef.ConvOperator(kernel), frozen_layer(kernel)
        with torch.no_grad():
            ms = medians(
                {
                    "loop": lambda: textbook(x, kernel, LOOP_TERMS_EVALUATION),
                    "known": lambda: ef.expm_apply(ef.ConvOperator(kernel), x, terms=ef.plan_series(NORM, TOL)),
                    "kept": lambda: ef.expm_apply(op, x, tol=TOL),
                    "new": lambda: ef.expm_apply(ef.ConvOperator(kernel), x, tol=TOL),
                    "frozen": lambda: layer(x),
                },
                rounds,
            )
            build = medians({"build": lambda: frozen_layer(kernel)(x)}, 5)["build"] - ms["frozen"]
            worst = max(error(ef.expm_apply(op, x, tol=TOL), x, kernel), error(layer(x)[0], x, kernel))
            held = sum(m.numel() * m.element_size() for m in layer._frozen._matrices.values())
        for name, values in ratios.items():
            values.append(ms["loop"] / ms[name])
        rows.append(
            [
                f"{channels}×{size}×{size}",
                f"{ms['loop']:.1f}",
                *(f"{ms[name]:.1f} ({ms['loop'] / ms[name]:.2f}×)" for name in ratios),
                f"{build:.0f}",
                f"{held / 2**20:.1f}",
                f"{worst:.1e}",
            ]
        )
    means = [f"**{geometric_mean(values):.2f}×**" for values in ratios.values()]
    rows.append(["geometric mean", "", *means, "", "", ""])
    header = [
        "shape",
        "loop, ms",
        "norm known",
        "operator kept",
        "operator new each time",
        "frozen layer",
        "freezing, ms",
        "frozen, MiB",
        "error",
    ]
    return table(header, rows)


def training(rounds: int) -> str:
    """Medians over fresh processes: where the buffers come to lie decides over up to a factor of two, for minutes."""
    rows, ratios = [], {"autograd": [], "recompute": []}
    runs = in_fresh_processes("exponential", "training_times", PROCESSES, rounds)
    for k, (channels, size) in enumerate(SHAPES):
        ms = {name: statistics.median(run[k][name] for run in runs) for name in runs[0][k]}
        for name, values in ratios.items():
            values.append(ms["loop"] / ms[name])
        cells = [f"{ms[name]:.1f} ({ms['loop'] / ms[name]:.2f}×)" for name in ratios]
        rows.append([f"{channels}×{size}×{size}", f"{ms['loop']:.1f}", *cells])
    rows.append(["geometric mean", "", *(f"**{geometric_mean(values):.2f}×**" for values in ratios.values())])
    return table(["shape", "loop, ms", "autograd", "recompute"], rows)


def training_times(rounds: int) -> list[dict[str, float]]:
    """Milliseconds of each way, for each shape."""
    found = []
    for channels, size in SHAPES:
        x, kernel = problem(channels, size)
        x.requires_grad_()
        kernel.requires_grad_()
        upstream = torch.randn_like(x)

        def step(run: Callable[[], Tensor], x: Tensor = x, kernel: Tensor = kernel, g: Tensor = upstream) -> None:
            torch.autograd.grad(run(), (x, kernel), g)

        terms = LOOP_TERMS_TRAINING
        ms = medians(
            {
                "loop": lambda: step(lambda: textbook(x, kernel, terms)),
                "autograd": lambda: step(
                    lambda: ef.expm_apply(ef.ConvOperator(kernel, validate=False), x, terms=terms, gradient="autograd")
                ),
                "recompute": lambda: step(
                    lambda: ef.expm_apply(ef.ConvOperator(kernel, validate=False), x, terms=terms, gradient="recompute")
                ),
            },
            rounds,
        )
        found.append(ms)
    return found


def peers(rounds: int) -> str:
    """One shape, since the dense matrices and SciPy are slow."""
    channels, size = 12, 8
    x, kernel = problem(channels, size)
    op = ef.ConvOperator(kernel)
    dense = op.dense((channels, size, size)).contiguous()
    matvec = _matvec(kernel, (channels, size, size))
    columns = x.flatten(1).T.double().numpy()
    times = torch.tensor([0.0, 1.0])
    candidates: dict[str, Callable[[], Tensor]] = {
        "expmflow, 1e-6": lambda: ef.expm_apply(op, x, tol=TOL),
        "textbook loop, 13 terms": lambda: textbook(x, kernel, LOOP_TERMS_EVALUATION),
        "torch.matrix_exp, dense": lambda: (x.flatten(1) @ torch.matrix_exp(dense).T).reshape(x.shape),
        "torchdiffeq dopri5, 1e-6": lambda: odeint(
            lambda t, y: F.conv2d(y, kernel, padding=1), x, times, rtol=1e-6, atol=1e-6
        )[-1],
        "SciPy expm_multiply, float64": lambda: torch.from_numpy(
            expm_multiply(matvec, columns, traceA=float(op.trace((channels, size, size)))).T
        ).reshape(x.shape),
    }
    with torch.no_grad():
        ms = medians(candidates, max(3, rounds // 3))
        rows = [
            [name, f"{ms[name]:.1f}", f"{ms[name] / ms['expmflow, 1e-6']:.1f}×", f"{error(run(), x, kernel):.1e}"]
            for name, run in candidates.items()
        ]
    return table([f"{channels}×{size}×{size}, batch {BATCH}", "ms", "time", "error"], rows)


def _matvec(kernel: Tensor, event_shape: tuple[int, ...]) -> ScipyOperator:
    op = ef.ConvOperator(kernel.double())
    size = int(np.prod(event_shape))

    def apply(columns: np.ndarray, operator: ef.LinearOperator) -> np.ndarray:
        batch = torch.from_numpy(np.ascontiguousarray(columns.reshape(size, -1).T)).reshape(-1, *event_shape)
        return operator(batch).flatten(1).T.numpy().reshape(columns.shape)

    return ScipyOperator(
        (size, size),
        matvec=lambda v: apply(v, op),
        matmat=lambda v: apply(v, op),
        rmatvec=lambda v: apply(v, op.adjoint()),
        rmatmat=lambda v: apply(v, op.adjoint()),
        dtype=np.float64,
    )
