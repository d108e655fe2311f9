"""Gradients of heat kernels: in the features, the times and the weights, at any time, in little memory."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import expmflow as ef
from heat_cases import KINDS, edges_of, laplacian

F64 = torch.float64


@pytest.mark.parametrize("gradient", ["recompute", "autograd"])
@pytest.mark.parametrize("directed", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_gradcheck(kind, directed, gradient):
    """In x, in the times and in every weight, with a self-loop and an isolated node."""
    index = torch.tensor([[0, 1, 1, 2, 2, 0, 3], [1, 0, 2, 1, 0, 2, 3]])
    weight = torch.tensor([1.0, 1.0, 0.5, 0.5, 2.0, 2.0, 0.7], dtype=F64)
    if directed:
        weight = weight * torch.linspace(0.5, 1.5, 7, dtype=F64)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(5, 2, generator=generator, dtype=F64)
    t = torch.tensor([0.4, 2.0], dtype=F64)

    def kernel(x, t, w):
        return ef.heat_kernel(index, x, t, kind, w, gradient=gradient)

    inputs = [v.requires_grad_() for v in (x, t, weight)]
    assert torch.autograd.gradcheck(kernel, inputs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("t", [0.0, 0.5, 30.0])
def test_both_gradients_agree(kind, t):
    adjacency = torch.rand(7, 7, dtype=F64)
    index, weight = edges_of(adjacency + adjacency.T)
    results = []
    for gradient in ("recompute", "autograd"):
        torch.manual_seed(0)
        x, time = torch.randn(2, 7, 2, dtype=F64, requires_grad=True), torch.tensor([t, 1.0], dtype=F64)
        inputs = [x, time.requires_grad_(), weight.clone().requires_grad_()]
        z = ef.heat_kernel(index, x, time, kind, inputs[2], gradient=gradient)
        results.append(torch.autograd.grad(z, inputs, torch.randn_like(z)))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("t", [0.0, 1e-12, 0.3, 8.0])
def test_derivative_in_t_solves_the_heat_equation(kind, t):
    """d/dt exp(−tL)x = −L exp(−tL)x, also where hardly any time has passed."""
    adjacency = torch.rand(6, 6, dtype=F64)
    adjacency = adjacency + adjacency.T
    index, weight = edges_of(adjacency)
    x, time = torch.randn(6, 2, dtype=F64), torch.tensor(t, dtype=F64, requires_grad=True)
    z = ef.heat_kernel(index, x, time, kind, weight)
    direction = torch.randn_like(z)
    (slope,) = torch.autograd.grad(z, time, direction)
    matrix = torch.from_numpy(laplacian(adjacency, kind).astype(np.float64))
    torch.testing.assert_close(slope, -(direction * (matrix @ z.detach())).sum(), rtol=1e-10, atol=1e-10)


def test_second_derivatives():
    index = torch.tensor([[0, 1, 1, 2], [1, 0, 2, 1]])
    x, t, weight = torch.randn(3, 1, dtype=F64), torch.tensor(0.7, dtype=F64), torch.ones(4, dtype=F64)
    inputs = [v.requires_grad_() for v in (x, t, weight)]

    def kernel(x, t, w, gradient="autograd"):
        return ef.heat_kernel(index, x, t, "sym", w, gradient=gradient)

    assert torch.autograd.gradgradcheck(kernel, inputs, rtol=1e-4, atol=1e-5)
    (slope,) = torch.autograd.grad(kernel(*inputs).sum(), t)
    with pytest.raises(RuntimeError, match="Expected gradient='autograd' for a second derivative"):
        torch.autograd.grad(kernel(*inputs, gradient="recompute").sum(), t, create_graph=True)
    assert slope.isfinite()


def test_memory_between_the_passes_does_not_grow_with_time():
    index, _ = edges_of(torch.ones(20, 20))
    kept = []
    for t in (0.1, 400.0):
        saved = []
        x = torch.randn(20, 3, requires_grad=True)
        with torch.autograd.graph.saved_tensors_hooks(lambda v, saved=saved: saved.append(v.numel()) or v, lambda v: v):
            ef.heat_kernel(index, x, t)
        kept.append(sum(saved))
    assert kept[1] - kept[0] < 500  # the weights of the terms, and no terms


def test_a_weight_that_grows_from_zero():
    """Of two nodes that nothing links yet, "comb" knows how their values would meet."""
    index, x = torch.tensor([[0, 1], [1, 0]]), torch.tensor([1.0, 0.0], dtype=F64)
    weight = torch.zeros(2, dtype=F64, requires_grad=True)
    ef.heat_kernel(index, x, 1.0, "comb", weight)[0].backward()
    torch.testing.assert_close(weight.grad, torch.tensor([-1.0, 0.0], dtype=F64))
