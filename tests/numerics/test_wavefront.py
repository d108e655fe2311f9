"""Anti-diagonal by anti-diagonal, by points and by tiles: inverses of corner convolutions, adjoints, derivatives."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from expmflow.numerics import tiles
from expmflow.numerics.tiles import CornerSystem, solve_tiled, tile_corners
from expmflow.numerics.wavefront import corner_solve, solve_corners
from transform_registry import draw

F64 = torch.float64
SIZES = [(2, 4, 3), (3, 2, 5), (1, 1, 4), (2, 5, 1), (2, 1, 1), (12, 6, 6), (1, 9, 6), (3, 4, 8)]
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


@pytest.mark.parametrize("side", [1, 2, 3, 4, 6])
@pytest.mark.parametrize("corner", CORNERS, ids=str)
@pytest.mark.parametrize("event", [(2, 12, 12), (2, 12, 24), (2, 24, 12)], ids=str)
def test_tiles_of_any_size_give_the_same(event, corner, side, monkeypatch):
    """Two systems in opposite directions, with a centre and a bias: also what one leaves at the border of the other."""
    systems, v = two_systems(event, corner)
    monkeypatch.setattr(tiles, "KEPT_TILE", event[0] * side**2)
    tiled = tile_corners(systems, origin(systems, event))
    assert tiled.kernel.shape[2:] == (side, side)
    torch.testing.assert_close(image_of(systems, solve_tiled(tiled, v)), v, rtol=0, atol=1e-11)


def image_of(systems, x):
    """What the systems solve: the last one comes first."""
    for system in reversed(systems):
        taps = system.inverse @ system.taps
        x = torch.einsum("oi,bihw->bohw", system.inverse.inverse(), convolve(taps, x, system.reverse))
        x = x + system.bias[:, None, None]
    return x


def origin(systems, event):
    return image_of(systems, systems[0].bias.new_zeros(1, *event))[0]


def two_systems(event, corner):
    channels = event[0]
    systems = []
    for reverse in (True, False):
        taps = 0.2 * draw(f"taps {event} {corner} {reverse}", *corner, channels, channels)
        taps[0, 0] += 2 * torch.eye(channels, dtype=F64)
        systems.append(CornerSystem(taps, taps[0, 0].inverse(), draw(f"bias {reverse}", channels), reverse))
    return systems, draw(f"v {event}", 3, *event)


@pytest.mark.parametrize("event", [*SIZES, (48, 4, 4), (3, 16, 16)], ids=str)
def test_with_and_without_gradients_agree(event):
    systems, v = two_systems(event, (2, 2))
    tiled = tile_corners(systems, origin(systems, event))
    torch.testing.assert_close(solve_tiled(tiled, v), solve_corners(systems, v), rtol=0, atol=1e-11)
    assert solve_tiled(tiled, v[:0]).shape == (0, *event)


@pytest.mark.parametrize("event", [(12, 16, 16), (3, 32, 32), (24, 8, 8)], ids=str)
def test_tiles_lose_no_more_digits_than_points(event, monkeypatch):
    systems, v = two_systems(event, (2, 2))
    exact = solve_tiled(tile_corners(systems, origin(systems, event)), v)
    single = [CornerSystem(*(x.float() for x in system[:3]), system.reverse) for system in systems]

    def error():
        found = solve_tiled(tile_corners(single, origin(single, event)), v.float())
        return float((found - exact).norm() / exact.norm())

    by_tiles = error()
    monkeypatch.setattr(tiles, "KEPT_TILE", 1)
    assert by_tiles < 2 * error()


def test_narrow_images_take_the_memory_of_narrow_images(monkeypatch):
    """Whichever side is the long one."""
    sizes = []
    original = torch.Tensor.new_zeros

    def count(self, *shape, **options):
        found = original(self, *shape, **options)
        sizes.append(found.numel())
        return found

    monkeypatch.setattr(torch.Tensor, "new_zeros", count)
    for event in ((2, 300, 2), (2, 2, 300)):
        taps, v = given(event, (2, 2))
        corner_solve(taps, v)
    assert max(sizes) <= 4 * v.numel()


def test_an_empty_batch():
    taps, v = given((2, 3, 3), (2, 2))
    assert corner_solve(taps, v[:0]).shape == (0, 2, 3, 3)
