"""Long rows of sparse matrices: sums in blocks, whose error does not grow with their length, and their gradients."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from expmflow.operators.adjacency import degrees, from_entries
from expmflow.operators.blocks import LONGEST, block_levels
from expmflow.operators.sparse import Pattern, SparseProduct

F64 = torch.float64


def pattern(lengths: list[int], size: int) -> Pattern:
    """Rows of these lengths, from the first column on; the rest of a square matrix is empty."""
    rows = torch.repeat_interleave(torch.tensor(lengths))
    cols = torch.cat([torch.arange(length) for length in lengths])
    return Pattern(rows, cols, size)


def dense(p: Pattern, values: Tensor) -> Tensor:
    return values.new_zeros(p.size, p.size).index_put((p.rows.long(), p.cols.long()), values)


@given(st.lists(st.one_of(st.integers(0, 40), st.integers(0, 5000)), max_size=30))
def test_blocks_are_short_and_make_up_the_rows(lengths):
    starts = torch.tensor([0, *lengths]).cumsum(0)
    levels, depth = block_levels(starts)
    ends = torch.arange(len(levels[-1]))
    for level in reversed(levels):
        assert int(level[0]) == 0
        assert bool((level.diff() >= 0).all())
        assert int(level.diff().amax() if len(level) > 1 else 0) <= LONGEST
        ends = level[ends]
    assert torch.equal(ends, starts)  # through all levels each row has its own entries
    assert depth == sum(int(level.diff().amax()) for level in levels if len(level) > 1)
    assert depth <= LONGEST * len(levels)


def test_short_rows_are_left_alone():
    starts = torch.tensor([0, LONGEST, LONGEST, 2 * LONGEST])
    levels, depth = block_levels(starts)
    assert len(levels) == 1
    assert levels[0] is starts
    assert depth == LONGEST


@pytest.mark.parametrize("lengths", [[33], [0, 100, 3], [2000, 0, 31, 64, 1999], [1100] * 3])
def test_products_and_their_gradients_are_those_of_the_matrix(lengths):
    p = pattern(lengths, max(lengths))
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(sum(lengths), generator=generator, dtype=F64).requires_grad_()
    x, y = torch.randn(2, p.size, 2, generator=generator, dtype=F64).unbind()
    x.requires_grad_()
    product, expected = SparseProduct.apply(p, values, x), dense(p, values) @ x
    torch.testing.assert_close(product, expected)
    out = p.matrix(values.detach()).add_to(y.clone(), x.detach(), alpha=2.0, beta=-0.5)
    torch.testing.assert_close(out, 2 * expected.detach() - 0.5 * y)
    gathered = p.add_rows(values.unsqueeze(-1) * x[p.cols.long()])
    torch.testing.assert_close(gathered, expected)
    found, wanted = (torch.autograd.grad((z * y).sum(), (values, x), retain_graph=True) for z in (product, expected))
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(degrees(p, values), dense(p, values).sum(1))


@pytest.mark.parametrize("dtype", [torch.float32, F64], ids=str)
@pytest.mark.parametrize("length", [10, 1000, 100_000])
@pytest.mark.parametrize("columns", [1, 8])
def test_the_error_does_not_grow_with_the_length(length, columns, dtype):
    """Equal numbers, all of which round to the same side: within the depth of the sum, which is a few blocks."""
    p = pattern([length], length)
    values, x = torch.full((length,), 0.1, dtype=dtype), torch.full((length, columns), 0.7, dtype=dtype)
    exact = length * float(values[0]) * float(x[0, 0])
    unit = torch.finfo(dtype).eps / 2
    assert p.depth <= 4 * LONGEST
    transposed = Pattern(p.cols.long(), p.rows.long(), length)
    for z in (
        p.matrix(values) @ x,
        SparseProduct.apply(p, values, x),
        p.matrix(values).add_to(torch.zeros_like(x), x),
        p.add_rows(values.unsqueeze(-1) * x),
        torch.autograd.functional.vjp(lambda y: SparseProduct.apply(transposed, values, y), torch.zeros_like(x), x)[1],
    ):
        assert abs(float(z[0, 0]) - exact) <= 20 * unit * exact + 1e-15 * exact  # 100,000 in a row: thousands


def test_degrees_of_hubs_are_exact_to_rounding():
    """Ten thousand equal weights."""
    rows, cols = torch.zeros(10_000, dtype=torch.int64), torch.arange(10_000)
    for weight in (torch.full((10_000,), 0.1, dtype=F64), torch.full((10_000,), 0.1, dtype=F64, requires_grad=True)):
        p = Pattern(rows, cols, 10_000)
        for degree in (degrees(p, weight), p.row_sums(weight)[0]):
            assert abs(float(degree.detach()[0]) - 1000) <= 4e-15 * 1000
        assert from_entries(rows, cols, weight, 10_000).values.shape == weight.shape
