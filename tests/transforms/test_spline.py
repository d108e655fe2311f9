"""Rational-quadratic splines: increasing, smooth, the identity outside, and undone by their inverse to rounding."""

from __future__ import annotations

import pytest
import torch

from expmflow import transforms as T
from expmflow.transforms.spline import LEAST, Spline
from transform_registry import draw

F64 = torch.float64


def params(spline: Spline, *shape: int, scale: float = 1.0) -> tuple[torch.Tensor, ...]:
    """The same for all entries of that shape."""
    drawn = scale * draw(f"spline {scale}", spline.params_per_entry)
    return tuple(value.expand(shape) for value in drawn)


@pytest.mark.parametrize("scale", [0.3, 3.0, 30.0])
@pytest.mark.parametrize("bins", [2, 3, 8])
def test_round_trip_and_slopes(bins, scale):
    spline, x = Spline(bins), torch.linspace(-7, 7, 701, dtype=F64).requires_grad_()
    given = params(spline, 701, scale=scale)
    z, log_slope = spline.forward(x, given)
    assert (z.diff() > 0).all()
    (slope,) = torch.autograd.grad(z.sum(), x)
    torch.testing.assert_close(slope.log(), log_slope, rtol=0, atol=1e-9)
    back, log_back = spline.inverse(z.detach(), given)
    rounding = 1e-14 * (1 + 1 / slope)
    assert ((back - x).abs() <= rounding).all()
    torch.testing.assert_close(log_back, -log_slope, rtol=0, atol=1e-8)


def test_outside_it_is_the_identity_and_the_slope_is_continuous_there():
    spline = Spline(4, bound=2.0)
    x = torch.tensor([-30.0, -2.0, 2.0, 5.0], dtype=F64)
    z, log_slope = spline.forward(x, params(spline, 4))
    assert torch.equal(z, x)
    assert (log_slope == 0).all()
    near = torch.tensor([-2 + 1e-9, 2 - 1e-9], dtype=F64)
    z, log_slope = spline.forward(near, params(spline, 2))
    torch.testing.assert_close(z, near, rtol=0, atol=1e-8)
    assert (log_slope.abs() < 1e-6).all()


def test_parameters_of_zero_are_the_identity():
    spline, x = Spline(5), torch.linspace(-6, 6, 25, dtype=F64)
    z, log_slope = spline.forward(x, tuple(torch.zeros(14, 25, dtype=F64)))
    torch.testing.assert_close(z, x, rtol=0, atol=1e-14)
    torch.testing.assert_close(log_slope, torch.zeros_like(x), rtol=0, atol=1e-14)


@pytest.mark.parametrize("value", [-5.0, 5.0, 0.0, 100.0])
def test_gradients_are_finite_at_the_ends_and_outside(value):
    layer = T.MaskedAutoregressive(2, 4, transformer="spline")
    x = torch.full((3, 2), value).requires_grad_()
    for direction in (layer, layer.inverse):
        z, logdet = direction(x)
        grads = torch.autograd.grad(z.sum() + logdet.sum(), [x, *layer.parameters()], materialize_grads=True)
        assert all(torch.isfinite(grad).all() for grad in grads)


def test_more_pieces_than_fit_are_refused():
    with pytest.raises(ValueError, match="fewer than 1000 components; got 1000"):
        T.MaskedAutoregressive(2, 4, transformer="spline", components=1000)


def test_no_piece_vanishes():
    widths, heights, slopes = Spline(4)._pieces(tuple(draw("pieces", 11, 50) * 100))
    assert (widths >= 10 * LEAST * 0.999).all()
    assert (heights >= 10 * LEAST * 0.999).all()
    assert (slopes >= LEAST).all()
    torch.testing.assert_close(widths.sum(0), torch.full((50,), 10.0, dtype=F64))
