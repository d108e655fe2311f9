"""The convolution against its matrix, written down tap by tap: product, adjoint, trace, bounds, over drawn shapes."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

import expmflow as ef
from reference import conv_matrix, lambda_max, sigma_max

PADDINGS = ("zeros", "circular", "reflect")


@st.composite
def convolutions(draw, paddings=PADDINGS, dtypes=(torch.float64, torch.float32)):
    """An operator, its event shape and its matrix (of the very same kernel, in float64)."""
    dims = draw(st.integers(1, 3))
    padding = draw(st.sampled_from(paddings))
    sizes = [draw(st.integers(1, [9, 5, 3][dims - 1])) for _ in range(dims)]
    kernel_sizes = [draw(st.sampled_from([1, 3, 5] if dims < 3 else [1, 3])) for _ in range(dims)]
    dilation = [draw(st.integers(1, 3)) for _ in range(dims)]
    margins = [d * (k // 2) for d, k in zip(dilation, kernel_sizes, strict=True)]
    assume(padding != "reflect" or all(m < n for m, n in zip(margins, sizes, strict=True)))
    groups, per_group = draw(st.sampled_from([(1, 1), (1, 2), (2, 1), (1, 3), (2, 2)]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    kernel = torch.randn(groups * per_group, per_group, *kernel_sizes, generator=generator, dtype=torch.float64)
    kernel = kernel.to(draw(st.sampled_from(dtypes)))
    op = ef.ConvOperator(kernel, padding, dilation=dilation, groups=groups)
    return op, (groups * per_group, *sizes), conv_matrix(kernel, sizes, padding, dilation, groups)


def rounding(op: ef.ConvOperator, matrix: torch.Tensor) -> float:
    return 50 * torch.finfo(op.kernel.dtype).eps * max(sigma_max(matrix), 1e-300)


@given(convolutions(), st.integers(0, 3))
def test_products_are_those_of_the_matrix(case, batch):
    op, event, matrix = case
    x = torch.randn(batch, *event, dtype=op.kernel.dtype)
    for product, expected in ((op, matrix), (op.adjoint(), matrix.T)):
        y = product(x)
        assert y.shape == x.shape
        assert y.dtype == x.dtype
        error = (y.double().flatten(1) - x.double().flatten(1) @ expected.T).norm(dim=1)
        assert (error <= rounding(op, matrix) * x.double().flatten(1).norm(dim=1)).all()
    torch.testing.assert_close(op.dense(event).double(), matrix, rtol=0, atol=rounding(op, matrix))


@given(convolutions())
def test_trace_is_exact(case):
    """Off-centre taps reach the diagonal with reflect, and with circular on images smaller than the kernel."""
    op, event, matrix = case
    assert float(op.trace(event)) == pytest.approx(float(matrix.trace()), abs=rounding(op, matrix) * len(matrix))


@given(convolutions())
def test_bounds_are_never_below(case):
    op, event, matrix = case
    assert float(op.norm_bound(event)) >= sigma_max(matrix) * (1 - 1e-13)
    assert float(op.log_norm_bound(event)) >= lambda_max(matrix) - 1e-13 * sigma_max(matrix)


@given(convolutions(paddings=("circular",)))
def test_circular_bounds_are_exact(case):
    op, event, matrix = case
    assert float(op.norm_bound(event)) == pytest.approx(sigma_max(matrix), rel=1e-10)
    assert float(op.log_norm_bound(event)) == pytest.approx(lambda_max(matrix), abs=1e-10 * sigma_max(matrix))


@given(convolutions(paddings=("reflect",)))
def test_reflect_costs_at_most_root_two_an_axis(case):
    """√2 for each axis that is padded, times what the taps can add up to on any torus."""
    op, event, matrix = case
    padded = sum(k > 1 for k in op.kernel.shape[2:])
    assert float(op.norm_bound(event)) <= 2 ** (padded / 2) * sum_of_taps(op) * (1 + 1e-10)
    assert float(op.norm_bound(event)) >= sigma_max(matrix) * (1 - 1e-13)


def sum_of_taps(op: ef.ConvOperator) -> float:
    """Σ over taps of the norm of the channel mixing: no convolution on a torus is larger."""
    taps = op.kernel.double().flatten(2).movedim(-1, 0).unflatten(1, (op.groups, -1))
    return float(torch.linalg.matrix_norm(taps, ord=2).amax(-1).sum())


@pytest.mark.parametrize("channels", [1, 3])
def test_zero_padded_bound_is_tight_on_average(channels):
    generator = torch.Generator().manual_seed(channels)
    ratios = []
    for _ in range(40 if channels == 1 else 10):
        kernel = torch.randn(channels, channels, 3, 3, generator=generator, dtype=torch.float64)
        truth = sigma_max(conv_matrix(kernel, (8, 8), "zeros", (1, 1), 1))
        ratios.append(float(ef.ConvOperator(kernel).norm_bound((channels, 8, 8))) / truth)
    assert min(ratios) >= 1
    assert sum(ratios) / len(ratios) <= 1.10


@pytest.mark.parametrize("padding", PADDINGS)
def test_groups_are_bounded_by_their_largest(padding):
    generator = torch.Generator().manual_seed(0)
    kernel = torch.randn(6, 2, 3, 3, generator=generator, dtype=torch.float64)
    whole = ef.ConvOperator(kernel, padding, groups=3).norm_bound((6, 5, 4))
    blocks = [ef.ConvOperator(block, padding).norm_bound((2, 5, 4)) for block in kernel.split(2)]
    assert float(whole) == pytest.approx(float(max(blocks)), rel=1e-12)


@pytest.mark.parametrize("factor", [-2.5, 0.0, 0.1])
@pytest.mark.parametrize("padding", PADDINGS)
def test_bounds_scale(padding, factor):
    kernel = torch.randn(2, 2, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    op = ef.ConvOperator(kernel, padding)
    scaled = factor * op
    assert float(scaled.norm_bound((2, 7))) == pytest.approx(abs(factor) * float(op.norm_bound((2, 7))))
    if factor >= 0:
        assert float(scaled.log_norm_bound((2, 7))) == pytest.approx(factor * float(op.log_norm_bound((2, 7))))


def test_as_torch_convolves():
    """The same numbers as torch.nn.Conv2d with its padding modes."""
    for padding in PADDINGS:
        layer = torch.nn.Conv2d(
            4, 4, (3, 5), padding=(2, 2), dilation=(2, 1), groups=2, padding_mode=padding, bias=False
        )
        op = ef.ConvOperator(layer.weight, padding, dilation=(2, 1), groups=2)
        x = torch.randn(3, 4, 6, 5)
        torch.testing.assert_close(op(x), layer(x))


def test_edge_filter_of_the_paper_is_skew():
    op = ef.ConvOperator(torch.tensor([[[[0.6, 0.0, -0.6]]]], dtype=torch.float64))
    n = 28
    assert float(op.log_norm_bound((1, n, n))) == pytest.approx(0, abs=1e-14)
    # tridiagonal ±0.6: singular values 1.2 cos(πj/(n+1))
    truth = 1.2 * math.cos(math.pi / (n + 1))
    assert truth <= float(op.norm_bound((1, n, n))) <= 1.2 * (1 + 1e-10)
