"""The log-norm μ = λmax((A + Aᵀ)/2): exact where it can be, 0 where nothing grows."""

from __future__ import annotations

import pytest
import torch

import expmflow as ef
from graph_cases import weights
from reference import lambda_max, matrix_of


@pytest.mark.parametrize("shape", [(7, 7), (3, 5, 5)], ids=["one", "batch"])
def test_dense_is_exact(shape):
    matrix = torch.randn(shape, dtype=torch.float64)
    for m in (matrix, -matrix, matrix - 10 * torch.eye(shape[-1], dtype=torch.float64)):
        op = ef.DenseOperator(m)
        assert float(op.log_norm_bound(shape[-1:])) == pytest.approx(lambda_max(m), abs=1e-12)
        assert float((-op).log_norm_bound(shape[-1:])) == pytest.approx(lambda_max(-m), abs=1e-12)


@pytest.mark.parametrize("size", [4, 40], ids=["all frequencies", "sampled"])
@pytest.mark.parametrize("padding", ["zeros", "circular"])
@pytest.mark.parametrize(("dims", "groups"), [(1, 1), (2, 1), (2, 2)])
def test_skew_convolutions_do_not_grow(dims, groups, padding, size):
    kernel = torch.randn(4, 4 // groups, *[3] * dims, dtype=torch.float64)
    transposed = torch.cat([block.transpose(0, 1).flip(*range(2, dims + 2)) for block in kernel.chunk(groups)])
    skew = ef.ConvOperator((kernel - transposed) / 2, padding, groups=groups)
    event = (4, *[size] * dims)
    assert float(skew.log_norm_bound(event)) == pytest.approx(0, abs=1e-14)
    assert float(skew.norm_bound(event)) > 0.1
    x = torch.randn(2, *event, dtype=torch.float64)
    torch.testing.assert_close(skew.adjoint()(x), -skew(x))
    z = ef.expm_apply(skew, x)
    torch.testing.assert_close(z.flatten(1).norm(dim=1), x.flatten(1).norm(dim=1))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("kind", ["dense", "batched", "sparse", "edges", "star"])
def test_minus_a_laplacian_does_not_grow(kind, dtype):
    one = torch.ones(1, 1, dtype=dtype)
    graph = weights("laplacian", *((2, 6, 6) if kind == "batched" else (6, 6)), dtype=dtype, density=0.6)
    if kind == "star":  # the least regular of graphs
        graph = torch.zeros(6, 6, dtype=dtype)
        graph[0, 1:] = graph[1:, 0] = torch.rand(5, dtype=dtype)
    if kind == "edges":
        edges = graph.nonzero().T
        op = ef.GraphConvOperator.from_edge_index(-one, one, edges, 6, graph[edges[0], edges[1]])
    else:
        op = ef.GraphConvOperator(-one, one, graph.to_sparse() if kind == "sparse" else graph)
    eps = torch.finfo(dtype).eps
    assert 0 <= float(op.log_norm_bound((6, 1))) <= 10 * eps
    assert 1 <= float(op.norm_bound((6, 1))) <= 2 * (1 + 10 * eps + 1e-11)
    matrix = matrix_of(op, (6, 1), dtype)
    assert lambda_max(matrix) == pytest.approx(0, abs=10 * eps)


def test_growth_is_bounded_by_the_log_norm():
    """‖exp(tA)‖ ≤ e^{tμ} for t ≥ 0, the reason for the word."""
    for seed in range(20):
        matrix = torch.randn(5, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        mu = ef.DenseOperator(matrix).log_norm_bound((5,))
        for t in (0.1, 1.0, 3.0):
            norm = torch.linalg.matrix_norm(torch.matrix_exp(t * matrix), ord=2)
            assert float(norm) <= float((t * mu).exp()) * (1 + 1e-12)


def test_padding_of_a_masked_graph_neither_grows_nor_shrinks():
    one = torch.ones(1, 1)
    full, part = torch.ones(1, 3, dtype=torch.bool), torch.tensor([[True, True, False]])
    contractive = [ef.GraphConvOperator(-3 * one, one, torch.ones(3, 3), mask=mask) for mask in (full, part)]
    assert [round(float(op.log_norm_bound((3, 1))), 5) for op in contractive] == [-2.0, 0.0]


def test_functions_use_the_norm_where_nothing_is_declared():
    op = ef.FunctionOperator(lambda x: x.roll(1, -1), norm_bound=1.0)
    assert float(op.log_norm_bound((3,))) == 1.0
    assert float((-2.0 * op).log_norm_bound((3,))) == pytest.approx(2.0)
    decaying = ef.FunctionOperator(lambda x: -x, norm_bound=1.0, log_norm_bound=-1.0)
    assert float((2.0 * decaying).log_norm_bound((3,))) == -2.0
    assert float((-decaying).log_norm_bound((3,))) == pytest.approx(1.0)
