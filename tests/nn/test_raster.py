"""Substitution: u + f(u) = v row by row, for convolutions of any size, with gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import expmflow as ef
from expmflow import transforms as T
from expmflow.nn import ConvInner
from expmflow.nn.raster import solve_by_slabs
from expmflow.numerics.solve import triangular_fixed_point
from transform_registry import draw

EVENTS = {1: (3, 5), 2: (2, 3, 5), 3: (2, 2, 3, 2)}


def inner(dims: int, size: float, context_channels: int = 0) -> ConvInner:
    """Weights of `size` times those that keep the variance; no constraint."""
    torch.manual_seed(dims)
    made = ConvInner(EVENTS[dims][0], 8, dims=dims, context_channels=context_channels).double()
    with torch.no_grad():
        made.last.parametrizations.weight.original.mul_(100)  # which starts at a hundredth
        for layer in (made.first, made.middle, made.last):
            layer.parametrizations.weight.original.mul_(size)
            layer.bias.normal_()
    return made


@pytest.mark.parametrize("dims", EVENTS)
@pytest.mark.parametrize("with_context", [False, True], ids=["", "context"])
def test_a_stack_is_the_inner_function(dims, with_context):
    f = inner(dims, 1.0, context_channels=2 if with_context else 0)
    u = draw("u", 3, *EVENTS[dims])
    for context in [draw("map", 3, 2, *EVENTS[dims][1:]), draw("vector", 3, 2)] if with_context else [None]:
        stack = f.raster_stack(context)
        torch.testing.assert_close(stack(u), f(u, context), rtol=0, atol=1e-13)
        rows = torch.tensor([2, 0])
        torch.testing.assert_close(stack(u[rows], rows)[0], f(u, context)[0][rows], rtol=0, atol=1e-13)


@pytest.mark.parametrize("dims", EVENTS)
def test_slabs_are_parts_of_the_whole(dims):
    """Handed the true slabs one by one, each f_i gives what f gives there."""
    f, u = inner(dims, 1.0, 2), draw("u", 3, *EVENTS[dims])
    context = draw("map", 3, 2, *EVENTS[dims][1:])
    value, diagonal = f(u, context)

    def check(slab, target: Tensor, i: int) -> Tensor:
        torch.testing.assert_close(slab(target)[0], value.select(2, i), rtol=0, atol=1e-13)
        torch.testing.assert_close(slab(target)[1], diagonal.select(2, i), rtol=0, atol=1e-13)
        assert slab.dims == dims - 1
        return target

    assert torch.equal(torch.stack(list(f.raster_stack(context).substitute(u, check)), dim=2), u)


@pytest.mark.parametrize("dims", EVENTS)
@pytest.mark.parametrize("size", [0.5, 1.0, 2.0])
def test_solutions_do_not_depend_on_norms(dims, size):
    """Norms far beyond what would make f a contraction."""
    f, v = inner(dims, size), draw("v", 4, *EVENTS[dims])
    with torch.no_grad():
        u, iterations = solve_by_slabs(f.raster_stack(), v, tol=1e-11, max_iterations=200)
        assert (u + f(u)[0] - v).abs().max() < 1e-10
        whole = triangular_fixed_point(lambda u, rows: f(u), v, max_iterations=1000, tol=1e-11)
    assert iterations <= whole.iterations
    torch.testing.assert_close(u, whole.value, rtol=1e-6, atol=1e-6)


def test_rows_that_do_not_settle_are_cut_into_points():
    """Six iterations are too few for a row of twenty points, and enough for the two channels of a point."""
    f, v = inner(2, 2.0), draw("v", 4, 2, 2, 20)
    limits = {"tol": 1e-6, "max_iterations": 6}
    with torch.no_grad():
        u, iterations = solve_by_slabs(f.raster_stack(), v, **limits)
        assert (u + f(u)[0] - v).abs().max() < 1e-5
        assert not triangular_fixed_point(lambda u, rows: f(u), v, **limits, raise_on_failure=False).converged
    assert iterations > 12  # two kinds of iteration for a row, before it is cut


def layer(size: float, **options) -> T.ConvSylvester:
    torch.manual_seed(0)
    made = T.ConvSylvester(2, 8, **options).double()
    made.inner = inner(2, size)
    return made.eval()


@pytest.mark.parametrize("size", [1.0, 2.0])
def test_layers_without_a_constraint_are_inverted(size):
    made, x = layer(size), draw("x", 4, 2, 4, 6)
    with torch.no_grad():
        z, logdet = made(x)
        back, logdet_back = made.inverse(z)
    torch.testing.assert_close(back, x, rtol=0, atol=1e-7)
    torch.testing.assert_close(logdet_back, -logdet, rtol=0, atol=1e-7)
    assert made.last_iterations < 40


def test_what_no_float_can_hold_is_an_error():
    """Norms of hundreds, in float32: verified, or refused."""
    made, x = layer(300.0).float(), draw("x", 4, 2, 8, 8).float()
    with torch.no_grad(), pytest.raises(ef.ConvergenceError, match="ConvSylvester: Expected a residual"):
        made.inverse(made(x)[0])


@pytest.mark.parametrize("size", [1.0, 2.0])
def test_gradients_through_rows(size):
    """By back substitution: each row's gradient is solved for on its own, and handed on to the rows above."""
    made, z = layer(size), draw("z", 2, 2, 3, 3).requires_grad_()
    assert torch.autograd.gradcheck(made.inverse, z, fast_mode=True)
    x, _ = made.inverse(z)
    jacobian = torch.autograd.functional.jacobian(lambda x: made(x[None])[0][0].flatten(), x[0].detach())
    inverse = torch.autograd.functional.jacobian(lambda z: made.inverse(z[None])[0][0].flatten(), z[0].detach())
    product = jacobian.reshape(18, 18) @ inverse.reshape(18, 18)
    torch.testing.assert_close(product, torch.eye(18, dtype=torch.float64), rtol=0, atol=1e-6)


def test_gradients_of_parameters():
    """As central differences have them, along one direction of the last kernel."""
    made, z = layer(1.0), draw("z", 2, 2, 3, 3)
    kernel = made.inner.last.parametrizations.weight.original
    direction, weights = draw("direction", *kernel.shape), draw("weights", *z.shape)

    def loss() -> Tensor:
        return (made.inverse(z)[0] * weights).sum()

    (slope,) = torch.autograd.grad(loss(), kernel)
    values = []
    with torch.no_grad():
        start = kernel.clone()
        for step in (1e-6, -1e-6):
            kernel.copy_(start + step * direction)
            values.append(loss())
    torch.testing.assert_close((slope * direction).sum(), (values[0] - values[1]) / 2e-6, rtol=1e-5, atol=1e-6)
