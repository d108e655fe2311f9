"""The promise: error ≤ tol · e^{max(μ, 0)} · ‖x‖, for every norm, dtype and kind of operator."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import expmflow as ef
from reference import conv_matrix, expm_product

NORMS = [0.0, 1e-3, 0.5, 0.9, 3.0, 10.0, 25.0, 50.0]
DTYPES = [torch.float64, torch.float32]
TOLS = {torch.float64: [None, 1e-4, 1e-8, 1e-12], torch.float32: [None, 1e-2, 1e-4, 1e-5]}
DEFAULT = {torch.float64: 1e-14, torch.float32: 1e-6}


def general(generator: torch.Generator) -> Tensor:
    """Neither symmetric nor skew; grows almost as fast as its norm in one direction, decays in others."""
    return 2 * torch.ones(12, 12, dtype=torch.float64) + torch.randn(12, 12, generator=generator, dtype=torch.float64)


def far_from_normal(generator: torch.Generator) -> Tensor:
    """Nearly triangular: the growth e^μ that the promise is relative to is far from reached."""
    matrix = torch.randn(12, 12, generator=generator, dtype=torch.float64)
    return torch.triu(matrix) + 0.1 * torch.tril(matrix)


def skew(generator: torch.Generator) -> Tensor:
    matrix = torch.randn(12, 12, generator=generator, dtype=torch.float64)
    return matrix - matrix.T


def contractive(generator: torch.Generator) -> Tensor:
    """Symmetric with eigenvalues from −1 to 0, as −L of a graph: the worst for cancellation; one direction stays."""
    basis, _ = torch.linalg.qr(torch.randn(12, 12, generator=generator, dtype=torch.float64))
    return -basis @ torch.diag(torch.linspace(0, 1, 12, dtype=torch.float64) ** 2) @ basis.T


def decaying_rotation(generator: torch.Generator) -> Tensor:
    """A large skew part beside a small decay."""
    return skew(generator) + 0.05 * contractive(generator)


KINDS = {f.__name__: f for f in (general, far_from_normal, skew, contractive, decaying_rotation)}


def with_norm(matrix: Tensor, norm: float, dtype: torch.dtype) -> Tensor:
    return (norm * matrix / torch.linalg.matrix_norm(matrix, ord=2)).to(dtype)


def within(z: Tensor, exact: Tensor, x: Tensor, op: ef.LinearOperator, error: float) -> bool:
    """Whether ‖z − exp(A)x‖ ≤ error · e^{max(μ, 0)} · ‖x‖ in every row."""
    mu = max(float(op.log_norm_bound(x.shape[1:])), 0.0)
    off = (z.double().flatten(1) - exact).norm(dim=1)
    return bool((off <= error * math.exp(mu) * x.double().flatten(1).norm(dim=1)).all())


def check(op: ef.LinearOperator, exact: Tensor, x: Tensor, tol: float | None) -> None:
    event, asked = x.shape[1:], DEFAULT[x.dtype] if tol is None else tol
    plan = ef.plan_series(op.norm_bound(event), tol, x.dtype, log_norm=op.log_norm_bound(event))
    attainable = plan.error_bound <= asked
    with torch.no_grad():
        assert within(ef.expm_apply(op, x, tol=tol), exact, x, op, asked if attainable else plan.error_bound)
    assert within(ef.expm_apply(op, x, tol=tol), exact, x, op, asked if attainable else plan.error_bound)
    assert attainable or plan.error_bound < 300 * torch.finfo(x.dtype).eps


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("kind", KINDS)
def test_matrices(kind, norm, dtype):
    for seed in range(2):
        generator = torch.Generator().manual_seed(seed)
        matrix = with_norm(KINDS[kind](generator), norm, dtype)
        x = torch.randn(30, 12, generator=generator, dtype=torch.float64).to(dtype)
        exact = expm_product(matrix, x)
        for tol in TOLS[dtype]:
            for rows in (30, 1):  # large batches may be computed in another way
                check(ef.DenseOperator(matrix), exact[:rows], x[:rows], tol)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("kind", sorted(set(KINDS) - {"far_from_normal"}))
def test_the_promise_can_be_broken(kind, norm, dtype):
    """Zeros break it, and so does half the series where the error is not damped away."""
    generator = torch.Generator().manual_seed(0)
    matrix = with_norm(KINDS[kind](generator), norm, dtype)
    x = torch.randn(4, 12, generator=generator, dtype=torch.float64).to(dtype)
    op, exact = ef.DenseOperator(matrix), expm_product(matrix, x)
    plan = ef.plan_series(op.norm_bound((12,)), None, dtype, log_norm=op.log_norm_bound((12,)))
    promised = max(DEFAULT[dtype], plan.error_bound)
    assert not within(torch.zeros_like(x), exact, x, op, promised)
    if kind in ("general", "skew") and norm >= 0.5:
        half = ef.SeriesPlan(plan.steps, plan.terms // 2, math.nan)
        assert not within(ef.expm_apply(op, x, terms=half), exact, x, op, promised)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("padding", ["zeros", "circular", "reflect"])
def test_convolutions(padding, norm, dtype):
    """With the bounds of a convolution, which are not its exact norms."""
    generator = torch.Generator().manual_seed(1)
    kernel = torch.randn(2, 2, 3, 3, generator=generator, dtype=torch.float64)
    x = torch.randn(2, 2, 4, 3, generator=generator, dtype=torch.float64).to(dtype)
    for k in (kernel, kernel - kernel.transpose(0, 1).flip(2, 3)):
        truth = torch.linalg.matrix_norm(conv_matrix(k, (4, 3), padding, (1, 1), 1), ord=2)
        op = ef.ConvOperator((norm * k / truth).to(dtype), padding)
        exact = expm_product(conv_matrix(op.kernel, (4, 3), padding, (1, 1), 1), x.flatten(1))
        for tol in TOLS[dtype]:
            check(op, exact, x, tol)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scale", [1.0, 20.0])
def test_heat_on_a_graph(scale, dtype):
    one = torch.ones(1, 1, dtype=dtype)
    adjacency = torch.rand(10, 10, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(dtype)
    op = ef.GraphConvOperator(-scale * one, scale * one, adjacency + adjacency.T)
    x = torch.randn(2, 10, 1, dtype=dtype)
    matrix = op.rebuild([p.double() for p in op.parameters]).dense((10, 1))
    check(op, expm_product(matrix, x.flatten(1)), x, None)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("t", [0.0, -1.0, 0.01, 7.0])
def test_at_another_time(t, dtype):
    """μ is that of t·A."""
    generator = torch.Generator().manual_seed(0)
    matrix = with_norm(general(generator), 2.0, dtype)
    x = torch.randn(3, 12, generator=generator, dtype=torch.float64).to(dtype)
    op = ef.DenseOperator(matrix)
    scaled = ef.DenseOperator(t * matrix)
    plan = ef.plan_series(scaled.norm_bound((12,)), None, dtype, log_norm=scaled.log_norm_bound((12,)))
    assert within(
        ef.expm_apply(op, x, t), expm_product(t * matrix, x), x, scaled, max(DEFAULT[dtype], plan.error_bound)
    )


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_many_matrices(kind, dtype):
    """The estimate of rounding holds over many draws, norms and sizes."""
    for seed in range(60):
        generator = torch.Generator().manual_seed(1000 + seed)
        norm = 10 ** float(torch.empty(()).uniform_(-1, 1.9, generator=generator))
        matrix = with_norm(KINDS[kind](generator), norm, dtype)
        x = torch.randn(4, 12, generator=generator, dtype=torch.float64).to(dtype)
        op = ef.DenseOperator(matrix)
        plan = ef.plan_series(op.norm_bound((12,)), None, dtype, log_norm=op.log_norm_bound((12,)))
        promised = max(DEFAULT[dtype], plan.error_bound)
        assert within(ef.expm_apply(op, x), expm_product(matrix, x), x, op, promised), (seed, norm)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("norm", [0.7, 32.0, 137.878, 979.63])
def test_roundings_of_the_operator_itself_add_up(norm, dtype):
    """They are the same in each product: of a rotation, of a matrix of equal entries, of a single number."""
    turn = torch.tensor([[0.0, -norm], [norm, 0.0]], dtype=torch.float64)
    for matrix in (turn, torch.full((16, 16), -norm / 16, dtype=torch.float64)):
        op = ef.DenseOperator(matrix.to(dtype))
        x = torch.randn(50, len(matrix), generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(dtype)
        plan = ef.plan_series(op.norm_bound((len(matrix),)), None, dtype, log_norm=op.log_norm_bound((len(matrix),)))
        exact = expm_product(op.matrix.double(), x.double())
        off = (ef.expm_apply(op, x, terms=plan).double() - exact).norm(dim=1) / x.double().norm(dim=1)
        assert float(off.max()) <= plan.error_bound
