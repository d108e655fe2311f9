"""Exponentials on sparse graphs of a thousand to a million nodes against SciPy's expm_multiply."""

from __future__ import annotations

import ctypes
import itertools
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import scipy.sparse
import torch
from scipy.sparse.linalg import LinearOperator as ScipyOperator
from scipy.sparse.linalg import expm_multiply
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import expmflow as ef
from timing import table

SIZES = [1_000, 10_000, 100_000, 1_000_000]
DEGREE = 10
FEATURES = 8
TIMES = [1.0, 10.0]
CHECKED = 100_000  # nodes: beyond, SciPy is not run once more for its result
LONGEST = 1_000_000  # nodes × t: SciPy would take a minute beyond
REST = 0.1  # seconds before each candidate
BUDGET = 2.0  # seconds for the repetitions of one candidate; one run of it counts if it takes longer


class Problem(NamedTuple):
    """A random graph, sorted and without parallel edges, as other libraries hand it over; and SciPy's matrices."""

    edges: Tensor
    x: Tensor
    normalised: scipy.sparse.csr_matrix
    laplacian: scipy.sparse.csr_matrix


def problem(nodes: int) -> Problem:
    generator = torch.Generator().manual_seed(nodes)
    ends = torch.randint(nodes, (2, nodes * DEGREE // 2), generator=generator)
    ends = ends[:, ends[0] != ends[1]]
    places = torch.unique(torch.cat([ends[0] * nodes + ends[1], ends[1] * nodes + ends[0]]))
    edges = torch.stack([places // nodes, places % nodes])
    x = torch.randn(nodes, FEATURES, generator=generator, dtype=torch.float64)
    return Problem(edges, x, *matrices(edges, nodes))


def matrices(edges: Tensor, nodes: int) -> tuple[scipy.sparse.csr_matrix, scipy.sparse.csr_matrix]:
    """Â and the Laplacian I − Â, as one makes them with NumPy and SciPy."""
    rows, cols = edges.int().numpy()
    degree = np.bincount(rows, minlength=nodes).astype(float)
    entries = 1 / np.sqrt(degree[rows] * degree[cols])
    normalised = scipy.sparse.coo_matrix((entries, (rows, cols)), (nodes, nodes)).tocsr()
    return normalised, (scipy.sparse.diags((degree > 0).astype(float)) - normalised).tocsr()


def without_an_edge(edges: Tensor) -> Tensor:
    """Another graph, as large: without the first edge, in both directions."""
    first = edges[:, :1]
    gone = (edges == first).all(0) | (edges == first.flip(0)).all(0)
    return edges[:, ~gone]


def thetas() -> tuple[Tensor, Tensor]:
    """Two matrices of norm one half."""
    matrices = torch.randn(2, FEATURES, FEATURES, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    theta0, theta1 = matrices / (2 * torch.linalg.matrix_norm(matrices, ord=2)[:, None, None])
    return theta0, theta1


def heat(rounds: int) -> str:
    """From the edges to the result; and of a graph that was seen before, while SciPy is handed its Laplacian."""
    rows, seconds = [], {t: ([], []) for t in TIMES}
    with torch.no_grad():
        for nodes in SIZES:
            edges, x, _, laplacian = problem(nodes)
            in_turn = itertools.cycle([edges, without_an_edge(edges)])
            for t in (t for t in TIMES if nodes * t <= LONGEST):
                matrix, columns = -t * laplacian, x.numpy()
                took = _seconds(
                    {
                        "scipy, new": lambda: expm_multiply(-t * matrices(edges, nodes)[1], columns),
                        "new": lambda: ef.heat_kernel(next(in_turn), x, t),
                        "scipy": lambda: expm_multiply(matrix, columns),
                        "ours": lambda: ef.heat_kernel(edges, x, t),
                        "coarse": lambda: ef.heat_kernel(edges, x, t, tol=1e-8),
                        "float": lambda: ef.heat_kernel(edges, x.float(), t),
                    },
                    rounds,
                )
                seconds[t][0].append(edges.shape[1])
                seconds[t][1].append(took["new"])
                rows.append([f"{nodes:,}", f"{t:g}", *_cells(took)])
                if nodes <= CHECKED:
                    exact = torch.from_numpy(expm_multiply(matrix, columns))
                    results = [
                        ef.heat_kernel(edges, y, t, tol=tol) for y, tol in ((x, None), (x, 1e-8), (x.float(), None))
                    ]
                    rows[-1] += [_error(z, exact, x) for z in results]
    header = ["nodes", "t", "SciPy of edges, ms", "new graph, 1e-14", "SciPy of L, ms"]
    header += ["seen, 1e-14", "seen, 1e-8", "seen, float32, 1e-6"]
    fits = ", ".join(f"t = {t:g}: edges^{_exponent(*taken):.2f}" for t, taken in seconds.items())
    header += [f"difference, {tol}" for tol in ("1e-14", "1e-8", "1e-6")]
    return table(header, _filled(rows)) + f"\n\nTime, from ten thousand nodes on: {fits}."


def convolution(rounds: int) -> str:
    """exp(X ↦ X θ0 + Â X θ1), with SciPy applying the same two matrices."""
    rows, counts, seconds = [], [], []
    theta0, theta1 = thetas()
    with torch.no_grad():
        for nodes in SIZES:
            edges, x, normalised, _ = problem(nodes)
            counts.append(edges.shape[1])
            op = ef.GraphConvOperator.from_edge_index(theta0, theta1, edges, nodes)
            theirs, trace = _scipy_operator(normalised, theta0.numpy(), theta1.numpy()), float(op.trace(x.shape))
            single = ef.GraphConvOperator.from_edge_index(theta0.float(), theta1.float(), edges, nodes)
            batch, column = x.unsqueeze(0), x.reshape(-1, 1).numpy()
            took = _seconds(
                {
                    "scipy, new": lambda: expm_multiply(
                        _scipy_operator(matrices(edges, nodes)[0], theta0.numpy(), theta1.numpy()), column, traceA=trace
                    ),
                    "new": lambda: ef.expm_apply(
                        ef.GraphConvOperator.from_edge_index(theta0, theta1, edges, nodes), batch
                    ),
                    "scipy": lambda: expm_multiply(theirs, column, traceA=trace),
                    "kept": lambda: ef.expm_apply(op, batch),
                    "coarse": lambda: ef.expm_apply(op, batch, tol=1e-8),
                    "float": lambda: ef.expm_apply(single, batch.float()),
                },
                rounds,
            )
            seconds.append(took["kept"])
            rows.append([f"{nodes:,}", *_cells(took)])
            if nodes <= CHECKED:
                exact = torch.from_numpy(expm_multiply(theirs, column, traceA=trace)).reshape(x.shape)
                rows[-1].append(_error(ef.expm_apply(op, batch).squeeze(0), exact, x))
    header = ["nodes", "SciPy of edges, ms", "operator new, 1e-14", "SciPy of its operator, ms", "operator kept, 1e-14"]
    header += ["kept, 1e-8", "kept, float32, 1e-6", "difference"]
    fit = f"edges^{_exponent(counts, seconds):.2f}"
    return table(header, _filled(rows)) + f"\n\nTime, from ten thousand nodes on: {fit}."


class Products(TorchDispatchMode):
    """How often a sparse matrix is multiplied inside."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += any(isinstance(a, Tensor) and a.layout == torch.sparse_csr for a in args) and "mm" in str(func)
        return func(*args, **(kwargs or {}))


def products(_: int) -> str:
    """With the adjacency, in float64 at 1e-14: `expm_apply`, and the power series with the same promise."""
    edges, x, _, _ = problem(SIZES[0])
    one, turn = torch.eye(2, dtype=torch.float64), torch.tensor([[0.0, -1.0], [1.0, 0.0]], dtype=torch.float64)
    kinds = {
        "growth, θ0 = θ1 = ½ c I": (one / 2, one / 2),
        "diffusion, θ0 = −c I, θ1 = c I": (-one, one),
        "rotation, θ0 = 0, θ1 = c times a quarter turn": (0 * one, turn),
    }
    rows, batch = [], x[:, :2].unsqueeze(0)
    for name, (theta0, theta1) in kinds.items():
        cells = [name]
        for c in (1.0, 5.0, 20.0):
            op = ef.GraphConvOperator.from_edge_index(c * theta0, c * theta1, edges, len(x))
            event = batch.shape[1:]
            plan = ef.plan_series(op.norm_bound(event), None, x.dtype, log_norm=op.log_norm_bound(event))
            with Products() as ours:
                ef.expm_apply(op, batch)
            cells.append(f"{ours.count} ({plan.products})")
        rows.append(cells)
    return table(["products (of the power series)", "c = 1", "c = 5", "c = 20"], rows)


def memory(_: int) -> str:
    """What a call adds to the largest resident memory of a fresh process, per edge."""
    rows = []
    for name in ("heat", "convolution", "heat, with gradients"):
        cells = [name]
        for nodes in SIZES[2:]:
            command = [sys.executable, __file__, name, str(nodes)]
            out = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
            cells.append(f"{int(out[0]) / int(out[1]):.0f} bytes")
        rows.append(cells)
    return table(["float64, per edge", *(f"{nodes:,} nodes" for nodes in SIZES[2:])], rows)


def _seconds(candidates: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Medians over rounds in turn. As in `medians`, what is quick runs three times in a row, and the last counts; what
    takes long runs once and is not warmed up. Before each, the threads of the one before may come to rest.
    """
    times: dict[str, list[float]] = {name: [] for name in candidates}
    for round_ in range(max(2, rounds)):
        for name, candidate in candidates.items():
            known = times[name]
            if known and (sum(known) + min(known) > BUDGET):
                continue
            time.sleep(REST)
            for _ in range(2 if known and 20 * known[0] < BUDGET else 0):
                candidate()
            start = time.perf_counter()
            candidate()
            took = time.perf_counter() - start
            if round_ or took > BUDGET:  # the first one warms up
                known.append(took)
    return {name: statistics.median(known) for name, known in times.items()}


def _cells(took: dict[str, float]) -> list[str]:
    """What follows one of SciPy's is compared with it."""
    cells, scipy = [], math.nan
    for name, value in took.items():
        scipy = value if name.startswith("scipy") else scipy
        cells.append(f"{1e3 * value:.1f}" + ("" if name.startswith("scipy") else f" ({scipy / value:.1f}×)"))
    return cells


def _filled(rows: list[list[str]]) -> list[list[str]]:
    """Rows of one length."""
    longest = max(len(row) for row in rows)
    return [row + [""] * (longest - len(row)) for row in rows]


def _exponent(edges: list[int], seconds: list[float]) -> float:
    """The slope of time over edges in logarithms; below ten thousand nodes a call is mostly overhead."""
    pairs = list(zip(edges, seconds, strict=True))[1:]
    return statistics.linear_regression([math.log(e) for e, _ in pairs], [math.log(s) for _, s in pairs]).slope


def _error(z: Tensor, exact: Tensor, x: Tensor) -> str:
    return f"{float(((z.double() - exact).norm(dim=0) / x.norm(dim=0)).max()):.0e}"


def _scipy_operator(normalised: scipy.sparse.csr_matrix, theta0: np.ndarray, theta1: np.ndarray) -> ScipyOperator:
    nodes, transposed = normalised.shape[0], normalised.T.tocsr()

    def apply(v: np.ndarray) -> np.ndarray:
        blocks = [column.reshape(nodes, FEATURES) for column in v.reshape(len(v), -1).T]
        return np.stack([(x @ theta0 + normalised @ (x @ theta1)).ravel() for x in blocks], axis=-1).reshape(v.shape)

    def apply_adjoint(v: np.ndarray) -> np.ndarray:
        blocks = [column.reshape(nodes, FEATURES) for column in v.reshape(len(v), -1).T]
        products = [(y @ theta0.T + (transposed @ y) @ theta1.T).ravel() for y in blocks]
        return np.stack(products, axis=-1).reshape(v.shape)

    size = nodes * FEATURES
    return ScipyOperator(
        (size, size), matvec=apply, matmat=apply, rmatvec=apply_adjoint, rmatmat=apply_adjoint, dtype=np.float64
    )


def _measure_memory(name: str, nodes: int) -> None:
    """Run in a process of its own: print what the call added to the peak, and the number of edges."""
    edges, x, _, _ = problem(nodes)
    ef.heat_kernel(edges[:, :0], x[:2], 1.0)  # what the first call loads is no edge's
    ctypes.CDLL("libc.so.6").malloc_trim(0)  # what was freed must not be used again unseen
    with open("/proc/self/clear_refs", "w") as peak:
        peak.write("5")
    before = _resident("VmRSS")
    if name == "convolution":
        with torch.no_grad():
            ef.expm_apply(ef.GraphConvOperator.from_edge_index(*thetas(), edges, nodes), x.unsqueeze(0))
    elif name == "heat":
        with torch.no_grad():
            ef.heat_kernel(edges, x, 1.0)
    else:
        weight = torch.ones(edges.shape[1], dtype=torch.float64, requires_grad=True)
        ef.heat_kernel(edges, x.requires_grad_(), 1.0, edge_weight=weight).sum().backward()
    print(_resident("VmHWM") - before, edges.shape[1])


def _resident(field: str) -> int:
    with open("/proc/self/status") as status:
        (line,) = [line for line in status if line.startswith(field)]
    return 1024 * int(line.split()[1])


if __name__ == "__main__":
    _measure_memory(sys.argv[1], int(sys.argv[2]))
