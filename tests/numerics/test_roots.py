"""Roots of a + gain · tanh(slope · a + offset) − v, and substitution in triangular systems."""

from __future__ import annotations

import pytest
import torch

import expmflow as ef
from expmflow.numerics.roots import substitute, tanh_root
from transform_registry import draw

F64 = torch.float64


@pytest.mark.parametrize("dtype", [torch.float32, F64], ids=str)
@pytest.mark.parametrize("size", [1e-3, 1.0, 30.0, 1e4])
def test_roots_of_any_size(size, dtype):
    """Slopes just above zero included, and offsets where tanh is flat, or as steep as it gets."""
    gain, slope = (size * draw(f"gain {size}", 200)).to(dtype), torch.tanh(draw("slope", 200)).to(dtype)
    gain = torch.where(gain * slope <= -1, -0.999999 / slope, gain)
    v, offset = (size * draw("v", 200)).to(dtype), (3 * draw("offset", 200)).to(dtype)
    a = tanh_root(v, gain, slope, offset)
    assert a.dtype == dtype
    error = (a + gain * torch.tanh(slope * a + offset) - v).abs()
    assert (error <= 16 * torch.finfo(dtype).eps * (v.abs() + gain.abs() * (1 + offset.abs()))).all()


def test_the_flattest_place():
    """At gain · slope = −1 and a tangent of zero, where Newton alone would not move."""
    zero = torch.zeros(1, dtype=F64)
    a = tanh_root(torch.tensor([1e-9], dtype=F64), zero - 1, zero + 1, zero)
    assert abs(float(a - torch.tanh(a)) - 1e-9) < 1e-15
    assert tanh_root(zero, zero - 1, zero + 1, zero).abs() < 1e-4


def test_what_is_not_finite_is_refused():
    one = torch.ones(1, dtype=F64)
    with pytest.raises(ef.ConvergenceError, match=r"Expected a root .* within 400 rounds; got nan left"):
        tanh_root(one * torch.nan, one, one, one)


def strictly_lower(x):
    """Entry k is a steep function of the entries before it."""
    d = x.shape[1]
    inside = 2 * x @ draw("lower", d, d).tril(-1).T
    return torch.sin(inside) + inside / 2 + 1


@pytest.mark.parametrize("d", [1, 2, 7, 20])
def test_substitution_ends_after_as_many_rounds_as_entries(d):
    solution = substitute(strictly_lower, draw("start", 4, d))
    assert solution.iterations <= d + 1
    assert torch.equal(strictly_lower(solution.value), solution.value)
    by_hand = torch.zeros(4, d, dtype=F64)
    for k in range(d):
        by_hand[:, k] = strictly_lower(by_hand)[:, k]
    torch.testing.assert_close(solution.value, by_hand, rtol=1e-12, atol=0)


def test_substitution_stops_when_nothing_moves():
    assert substitute(lambda x: torch.ones_like(x), draw("start", 4, 50)).iterations == 2


def test_infinity_on_the_way_does_no_harm():
    """The third entry is infinite until the second is right."""

    def step(x):
        first, second = torch.full_like(x[:, 0], 2.0), x[:, 0] * 3
        return torch.stack([first, second, 1 / (x[:, 0] - 5) / (x[:, 1] - 2), x.sum(1) * 0 + x[:, 2] + 1], 1)

    solution = substitute(step, torch.tensor([[5.0, 2.0, 1.0, 0.0]], dtype=F64))
    torch.testing.assert_close(solution.value[0, :3], torch.tensor([2.0, 6.0, -1 / 12], dtype=F64))


def test_solutions_that_no_number_holds_are_refused():
    def step(x):
        return torch.cat([torch.full_like(x[:, :1], 1e10), x[:, :-1] ** 4], 1)

    with pytest.raises(ef.ConvergenceError, match="got a relative change of inf"):
        substitute(step, torch.ones(1, 8, dtype=F64))


def test_systems_that_are_not_triangular_are_refused():
    with pytest.raises(ef.ConvergenceError, match="Expected entries that stand still after 4 rounds; got"):
        substitute(lambda x: 2 * x.flip(1) + 1, draw("start", 2, 3))
