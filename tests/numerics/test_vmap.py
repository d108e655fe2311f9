"""`torch.func` around exponentials: many operators at once are each of them alone."""

from __future__ import annotations

import pytest
import torch
from torch.func import jacfwd, jacrev, vmap

import expmflow as ef
from expmflow.numerics.solve import ConvergenceError, fixed_point

F64 = torch.float64


def rand(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)), dtype=F64)


GRAPH = torch.ones(3, 3, dtype=F64) - torch.eye(3, dtype=F64)
BUILD = {
    "dense": (ef.DenseOperator, (3, 3), (3,)),
    "conv": (ef.ConvOperator, (2, 2, 3, 3), (2, 4, 4)),
    "conv-1d": (lambda k: ef.ConvOperator(k, padding="circular"), (2, 2, 3), (2, 4)),
    "graph": (lambda w: ef.GraphConvOperator(w, 0.5 * w, GRAPH), (2, 2), (3, 2)),
    "scaled": (lambda m: 0.5 * ef.DenseOperator(m).adjoint(), (3, 3), (3,)),
}


@pytest.mark.parametrize("gradient", ["recompute", "autograd"])
@pytest.mark.parametrize("name", BUILD)
def test_many_operators_at_once_are_each_of_them(name, gradient):
    """Of very different norms: the plan has to be right for the largest."""
    build, shape, event = BUILD[name]
    parameters = rand(4, *shape) * torch.tensor([1e-3, 0.1, 1.0, 4.0], dtype=F64).reshape(-1, *(1,) * len(shape))
    x = rand(4, 2, *event)
    together = vmap(lambda p, x: ef.expm_apply(build(p), x, gradient=gradient))(parameters, x)
    alone = torch.stack([ef.expm_apply(build(p), row) for p, row in zip(parameters, x, strict=True)])
    for one, other in zip(together, alone, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12 * float(other.norm() + 1))


def test_many_operators_at_several_times():
    matrices, x, times = rand(3, 2, 2), rand(1, 2), torch.tensor([-0.5, 0.0, 1.0, 2.0], dtype=F64)
    together = vmap(lambda m: ef.expm_apply(ef.DenseOperator(m), x, times))(matrices)
    expected = torch.stack([torch.stack([x @ torch.matrix_exp(t * m).T for t in times]) for m in matrices])
    torch.testing.assert_close(together, expected)


def test_many_graphs_at_once():
    weights = rand(4, 3, 3).abs()
    theta, x = rand(2, 2), rand(1, 3, 2)

    def heat(graph: torch.Tensor) -> torch.Tensor:
        return ef.expm_apply(ef.GraphConvOperator(theta, theta, graph), x)

    torch.testing.assert_close(vmap(heat)(weights), torch.stack([heat(graph) for graph in weights]))


def test_gradients_of_many_operators_at_once():
    matrices, x = rand(3, 2, 2), rand(1, 2)
    together = vmap(jacrev(lambda m: ef.expm_apply(ef.DenseOperator(m), x)))(matrices)
    for matrix, jacobian in zip(matrices, together, strict=True):
        expected = torch.autograd.functional.jacobian(lambda m: x @ torch.matrix_exp(m).T, matrix)
        torch.testing.assert_close(jacobian, expected)


def test_times_of_many_operators_are_shared():
    matrix, x = ef.DenseOperator(rand(2, 2)), rand(1, 2)
    with pytest.raises(ValueError, match=r"Expected one t for all that torch\.vmap maps over, or a vector of times"):
        vmap(lambda t: ef.expm_apply(matrix, x, t))(torch.ones(3, dtype=F64))


def test_power_iteration_takes_a_start():
    matrices, start = rand(3, 2, 2), torch.ones(1, 2, dtype=F64)
    found = vmap(lambda m: ef.power_iteration(ef.DenseOperator(m), (2,), start=start, iterations=200))(matrices)
    torch.testing.assert_close(found, torch.linalg.matrix_norm(matrices, 2))
    with pytest.raises(ValueError, match=r"Expected a start, inside torch\.vmap"):
        vmap(lambda m: ef.power_iteration(ef.DenseOperator(m), (2,)))(matrices)


def test_fixed_points_of_many_batches_at_once():
    gains, y = torch.tensor([0.1, 0.5, 0.9], dtype=F64), rand(3, 2, 4)
    found = vmap(lambda gain, y: fixed_point(lambda x: gain * torch.sin(x), y).value)(gains, y)
    torch.testing.assert_close(found + gains.reshape(-1, 1, 1) * torch.sin(found), y, rtol=0, atol=1e-13)
    with pytest.raises(ConvergenceError, match="Expected a residual of at most"):
        vmap(lambda y: fixed_point(lambda x: 3 * x, y, max_iterations=5).value)(y)


def test_forward_mode_agrees_with_reverse_mode():
    matrix, x = rand(3, 3), rand(2, 3)
    forward, reverse = (way(lambda m: ef.expm_apply(ef.DenseOperator(m), x))(matrix) for way in (jacfwd, jacrev))
    torch.testing.assert_close(forward, reverse)
