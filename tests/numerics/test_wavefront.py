"""Anti-diagonal by anti-diagonal: the inverse of a corner convolution, its adjoint and its derivatives."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from expmflow.numerics.wavefront import corner_solve
from transform_registry import draw

F64 = torch.float64
SIZES = [(2, 4, 3), (3, 2, 5), (1, 1, 4), (2, 5, 1), (2, 1, 1), (12, 6, 6)]
CORNERS = [(2, 2), (3, 3), (1, 3), (4, 2), (1, 1)]


def given(event, corner):
    channels = event[0]
    taps = 0.3 * draw(f"taps {event} {corner}", *corner, channels, channels) / channels**0.5
    return taps, draw(f"v {event}", 3, *event)


def convolve(taps, y, reverse):
    """y plus what its neighbours in the corner contribute, by torch's convolution."""
    p, q = taps.shape[:2]
    kernel = taps.permute(2, 3, 0, 1).clone()
    kernel[:, :, 0, 0] = torch.eye(kernel.shape[0], dtype=F64)
    if reverse:
        return F.conv2d(F.pad(y, (0, q - 1, 0, p - 1)), kernel)
    return F.conv2d(F.pad(y, (q - 1, 0, p - 1, 0)), kernel.flip(2, 3))


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("corner", CORNERS, ids=str)
@pytest.mark.parametrize("event", SIZES, ids=str)
def test_it_solves_the_convolution(event, corner, reverse):
    taps, v = given(event, corner)
    for layout in (torch.contiguous_format, torch.channels_last):
        y = corner_solve(taps, v.contiguous(memory_format=layout), reverse=reverse)
        torch.testing.assert_close(convolve(taps, y, reverse), v, rtol=0, atol=1e-12)


def test_the_centre_tap_is_not_used():
    taps, v = given((2, 3, 3), (2, 2))
    other = taps.clone()
    other[0, 0] = torch.nan
    assert torch.equal(corner_solve(taps, v), corner_solve(other, v))


def test_nothing_given_is_changed():
    taps, v = given((2, 3, 3), (2, 2))
    before = taps.clone(), v.clone()
    corner_solve(taps, v)
    assert torch.equal(taps, before[0])
    assert torch.equal(v, before[1])


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("event", SIZES[:5], ids=str)
def test_the_adjoint_runs_the_other_way(event, reverse):
    """⟨w, S v⟩ = ⟨Sᵀ w, v⟩, with Sᵀ the solution of the transposed taps in the opposite direction."""
    taps, v = given(event, (2, 3))
    w = draw(f"w {event}", *v.shape)
    there = (w * corner_solve(taps, v, reverse=reverse)).sum()
    back = (corner_solve(taps.mT, w, reverse=not reverse) * v).sum()
    torch.testing.assert_close(there, back)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize(("event", "corner"), [((2, 3, 2), (2, 2)), ((1, 2, 4), (3, 2)), ((2, 1, 1), (2, 2))], ids=str)
def test_derivatives(event, corner, reverse):
    taps, v = (x.requires_grad_() for x in given(event, corner))
    solve = lambda taps, v: corner_solve(taps, v, reverse=reverse)  # noqa: E731
    assert torch.autograd.gradcheck(solve, (taps, v))
    assert torch.autograd.gradgradcheck(solve, (taps, v), fast_mode=True)


def test_torch_func():
    taps, v = given((2, 3, 2), (2, 2))
    several = torch.stack([taps, -taps, 2 * taps])
    torch.testing.assert_close(torch.func.vmap(lambda x: corner_solve(taps, x[None])[0])(v), corner_solve(taps, v))
    expected = torch.stack([corner_solve(t, v) for t in several])
    torch.testing.assert_close(torch.func.vmap(lambda t: corner_solve(t, v))(several), expected)
    expected = torch.stack([corner_solve(t, x[None]) for t, x in zip(several, v, strict=True)])
    torch.testing.assert_close(torch.func.vmap(lambda t, x: corner_solve(t, x[None]))(several, v), expected)

    def total(t, x):
        return corner_solve(t, x[None]).square().sum()

    found = torch.func.vmap(torch.func.grad(total), (None, 0))(taps, v)
    expected = torch.stack([torch.func.grad(total)(taps, x) for x in v])
    torch.testing.assert_close(found, expected)


def test_an_empty_batch():
    taps, v = given((2, 3, 3), (2, 2))
    assert corner_solve(taps, v[:0]).shape == (0, 2, 3, 3)
