"""Theorem 1: the exponential commutes with whatever its operator commutes with."""

from __future__ import annotations

import math

import pytest
import torch

import expmflow as ef
from graph_cases import weights

F64 = torch.float64


def commutes(op: ef.LinearOperator, image: ef.LinearOperator, move, x: torch.Tensor) -> bool:
    """Whether exp(A′) K x = K exp(A) x."""
    return torch.allclose(ef.expm_apply(image, move(x)), move(ef.expm_apply(op, x)), rtol=1e-12, atol=1e-12)


def kernel(*shape: int, size: float = 0.4) -> torch.Tensor:
    return size * torch.randn(*shape, dtype=F64, generator=torch.Generator().manual_seed(len(shape)))


@pytest.mark.parametrize(("dims", "dilation"), [(1, 1), (2, 1), (2, 2), (3, 1)])
def test_circular_convolutions_commute_with_shifts(dims, dilation):
    op = ef.ConvOperator(kernel(2, 2, *[3] * dims), "circular", dilation=dilation)
    x = torch.randn(2, 2, *range(3, 3 + dims), dtype=F64)
    axes = tuple(range(2, 2 + dims))
    for shift in (1, 2, -1):
        assert commutes(op, op, lambda x, shift=shift: x.roll([shift] * dims, axes), x)


def test_zero_padded_convolutions_do_not():
    """So the test above can fail."""
    op = ef.ConvOperator(kernel(2, 2, 3, 3))
    assert not commutes(op, op, lambda x: x.roll((1, 2), (2, 3)), torch.randn(2, 2, 4, 5, dtype=F64))


@pytest.mark.parametrize("padding", ["zeros", "circular", "reflect"])
def test_symmetric_kernels_commute_with_quarter_turns(padding):
    k = kernel(2, 2, 3, 3)
    symmetric = sum(torch.rot90(k, turns, (2, 3)) for turns in range(4)) / 4
    x = torch.randn(2, 2, 5, 5, dtype=F64)
    for turns in (1, 2, 3):
        op = ef.ConvOperator(symmetric, padding)
        assert commutes(op, op, lambda x, turns=turns: torch.rot90(x, turns, (2, 3)), x)
    op = ef.ConvOperator(k, padding)
    assert not commutes(op, op, lambda x: torch.rot90(x, 1, (2, 3)), x)


@pytest.mark.parametrize("padding", ["zeros", "circular", "reflect"])
def test_turning_kernel_and_image_turns_the_result(padding):
    """For any kernel, and an image that is not square."""
    k = kernel(2, 2, 3, 5)
    op, turned = ef.ConvOperator(k, padding), ef.ConvOperator(torch.rot90(k, 1, (2, 3)).contiguous(), padding)
    assert commutes(op, turned, lambda x: torch.rot90(x, 1, (2, 3)), torch.randn(2, 2, 4, 6, dtype=F64))


@pytest.mark.parametrize("symmetric", [True, False], ids=["undirected", "directed"])
@pytest.mark.parametrize("sparse", [True, False], ids=["sparse", "dense"])
def test_graph_convolutions_commute_with_permutations(sparse, symmetric):
    """Renaming the nodes renames the result: exp of PAPᵀ is P exp(A) Pᵀ."""
    theta0, theta1 = kernel(2, 2), kernel(2, 2, size=0.7)
    adjacency = weights("permutations", 6, 6, dtype=F64, symmetric=symmetric, density=0.6)
    order = torch.tensor([3, 0, 5, 1, 4, 2])
    form = torch.Tensor.to_sparse if sparse else torch.Tensor.clone
    op = ef.GraphConvOperator(theta0, theta1, form(adjacency))
    renamed = ef.GraphConvOperator(theta0, theta1, form(adjacency[order][:, order]))
    x = torch.randn(3, 6, 2, dtype=F64)
    assert commutes(op, renamed, lambda x: x[:, order], x)
    assert not commutes(op, op, lambda x: x[:, order], x)


def test_automorphisms_of_a_graph():
    """A ring looks the same from every node."""
    ring = torch.eye(5, dtype=F64).roll(1, 0) + torch.eye(5, dtype=F64).roll(-1, 0)
    op = ef.GraphConvOperator(kernel(2, 2), kernel(2, 2), ring)
    x = torch.randn(3, 5, 2, dtype=F64)
    assert commutes(op, op, lambda x: x.roll(2, 1), x)
    assert commutes(op, op, lambda x: x.flip(1), x)


def test_commuting_operators_add_up():
    """exp(A + B) = exp(A) exp(B) for circular convolutions of one channel, and not for matrices in general."""
    a, b = (ef.ConvOperator(kernel(1, 1, 3, k), "circular") for k in (3, 5))
    x = torch.randn(2, 1, 5, 6, dtype=F64)
    torch.testing.assert_close(ef.expm_apply(a + b, x), ef.expm_apply(a, ef.expm_apply(b, x)))
    a, b = (ef.DenseOperator(m) for m in torch.randn(2, 4, 4, dtype=F64))
    x = torch.randn(2, 4, dtype=F64)
    assert not torch.allclose(ef.expm_apply(a + b, x), ef.expm_apply(a, ef.expm_apply(b, x)), rtol=1e-2)


def test_skew_operators_are_rotations():
    """A quarter turn of the plane, by the generator of rotations."""
    op = ef.DenseOperator(torch.tensor([[0.0, -1.0], [1.0, 0.0]], dtype=F64))
    x = torch.tensor([[2.0, 1.0]], dtype=F64)
    torch.testing.assert_close(ef.expm_apply(op, x, math.pi / 2), torch.tensor([[-1.0, 2.0]], dtype=F64))
