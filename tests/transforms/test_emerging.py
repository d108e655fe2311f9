"""Emerging convolutions: what each of the two sees, what they see together, and that no diagonal reaches zero."""

from __future__ import annotations

import pytest
import torch

import expmflow as ef
from expmflow import transforms as T
from expmflow.distributions.describe import count_parameters
from expmflow.numerics import tiles
from transform_registry import draw, randomise

F64 = torch.float64


def ready(channels: int, kernel_size: int = 3) -> T.Emerging:
    torch.manual_seed(0)
    layer = T.Emerging(channels, kernel_size).double()
    randomise(layer)
    return layer


def sees(run, event) -> torch.Tensor:
    """`(d, d)`: whether an output depends on an input."""
    jacobian = torch.autograd.functional.jacobian(lambda x: run(x[None])[0], torch.zeros(event, dtype=F64))
    size = torch.Size(event).numel()
    return jacobian.reshape(size, size) != 0


def offsets(event) -> tuple[torch.Tensor, ...]:
    """How far each output is from each input, along channels, height and width: `(d, d)` each."""
    axes = torch.meshgrid(*(torch.arange(n) for n in event), indexing="ij")
    return tuple(axis.flatten()[:, None] - axis.flatten() for axis in axes)


@pytest.mark.parametrize("kernel_size", [1, 3, 5])
def test_the_first_convolution_sees_what_is_before_it_and_the_second_what_is_after(kernel_size):
    layer, event, reach = ready(3, kernel_size), (3, 4, 5), kernel_size // 2
    channel, down, right = offsets(event)
    for conv, sign in ((layer.first, 1), (layer.second, -1)):
        corner = (sign * down >= 0) & (sign * down <= reach) & (sign * right >= 0) & (sign * right <= reach)
        elsewhere = (down != 0) | (right != 0)
        assert torch.equal(sees(conv, event), corner & (elsewhere | (sign * channel >= 0)))


@pytest.mark.parametrize("kernel_size", [3, 5])
def test_together_they_see_the_whole_square(kernel_size):
    layer, event, reach = ready(2, kernel_size), (2, 5, 6), kernel_size // 2
    _, down, right = offsets(event)
    found = sees(lambda x: layer(x)[0], event)
    square = (down.abs() <= reach) & (right.abs() <= reach)
    assert not (found & ~square).any()
    whole = (found | ~square).all(1).reshape(event)  # outputs that see all of their neighbours
    assert whole[:, reach:-reach, reach:-reach].all()


def test_without_its_convolutions_it_is_its_1x1():
    layer = T.Emerging(4).double()
    with torch.no_grad():
        for conv in (layer.first, layer.second):
            conv.parametrizations.weight.original.zero_()
    x = draw("x", 2, 4, 3, 3)
    torch.testing.assert_close(layer(x), layer.conv1x1(x))


def test_any_size_of_image_with_the_same_weights():
    layer = ready(2)
    for size in ((3, 3), (1, 7), (8, 2), (9, 12)):
        x = draw("x", 2, 2, *size)
        torch.testing.assert_close(layer.inverse(layer(x)[0])[0], x, rtol=0, atol=1e-11)


def test_the_inverse_is_that_of_a_loop_over_pixels():
    layer, v = ready(3).first, draw("v", 2, 3, 4, 3)
    kernel, found = layer.kernel().detach(), torch.zeros_like(v)
    for i in range(4):
        for j in range(3):
            with torch.no_grad():  # what the points so far contribute; this one is still zero
                rest = v[:, :, i, j] - layer(found)[:, :, i, j]
            found[:, :, i, j] = torch.linalg.solve_triangular(kernel[:, :, 1, 1], rest.T, upper=False).T
    torch.testing.assert_close(layer.solve(v), found)


def test_a_diagonal_cannot_pass_through_zero():
    """Steps that push it down forever leave it positive, and the log-determinant finite."""
    layer = T.Emerging(2).double()
    optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
    for _ in range(50):
        optimizer.zero_grad()
        _, logdet = layer(torch.zeros(1, 2, 2, 2, dtype=F64))
        logdet.sum().backward()
        optimizer.step()
    for conv in (layer.first, layer.second):
        assert (conv.kernel()[:, :, 1, 1].diagonal() > 0).all()
    assert torch.isfinite(layer(torch.zeros(1, 2, 2, 2, dtype=F64))[1]).all()
    assert float(logdet.detach()) < -400


def test_diagonals_of_either_sign():
    layer = ready(3)
    layer.first.sign.copy_(torch.tensor([1.0, -1.0, -1.0]))
    layer.second.sign.neg_()
    x = draw("x", 2, 3, 4, 4)
    z, logdet = layer(x)
    back, logdet_back = layer.inverse(z)
    torch.testing.assert_close(back, x, rtol=0, atol=1e-12)
    torch.testing.assert_close(logdet_back, -logdet)
    assert (layer.first.kernel()[:, :, 1, 1].diagonal()[1:] < 0).all()


@pytest.mark.parametrize(("channels", "expected"), [(12, 1_188), (24, 4_680)])
def test_parameters_that_are_not_masked(channels, expected):
    assert count_parameters(T.Emerging(channels)) == expected


def test_second_derivatives_of_the_inverse():
    layer = ready(2)
    z = draw("z", 1, 2, 2, 3).requires_grad_()
    parameters = dict(layer.named_parameters())

    class Backwards(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = layer

        def forward(self, z):
            return self.layer.inverse(z)

    def inverse(z, *values):
        named = {f"layer.{key}": value for key, value in zip(parameters, values, strict=True)}
        return torch.func.functional_call(Backwards(), named, (z,))

    assert torch.autograd.gradgradcheck(inverse, (z, *parameters.values()), fast_mode=True)


def settled(channels):
    """Weights near those that a layer starts with, in evaluation mode."""
    torch.manual_seed(0)
    layer = T.Emerging(channels).double().eval()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(0.1 / channels * torch.randn_like(parameter))
    return layer


def inverse(layer, z):
    with torch.no_grad():
        return layer.inverse(z)


@pytest.mark.parametrize("event", [(3, 8, 8), (12, 4, 6), (2, 5, 3), (1, 1, 1)], ids=str)
def test_what_is_kept_in_evaluation_is_dropped_when_weights_or_sizes_change(event):
    layer, z = settled(event[0]), draw("z", 2, *event)
    before = inverse(layer, z)
    torch.testing.assert_close(inverse(layer, z), before, rtol=0, atol=0)
    torch.testing.assert_close(layer.inverse(z), before, rtol=0, atol=1e-11)  # with gradients: nothing kept
    twice = torch.cat([z, z], -1)
    torch.testing.assert_close(layer(inverse(layer, twice)[0])[0], twice, rtol=0, atol=1e-10)
    for parameter in layer.parameters():
        with torch.no_grad():
            parameter.add_(0.01)
        torch.testing.assert_close(layer(inverse(layer, z)[0])[0], z, rtol=0, atol=1e-10)
    layer.first.sign.neg_()
    torch.testing.assert_close(layer(inverse(layer, z)[0])[0], z, rtol=0, atol=1e-10)


def test_systems_are_made_once(monkeypatch):
    layer, z = settled(3), draw("z", 2, 3, 4, 4)
    inverse(layer, z)
    monkeypatch.setattr(T.Conv1x1, "inverse_matrix", None)  # any new system would fail
    inverse(layer, z)
    with pytest.raises(TypeError):
        layer.inverse(z)


def test_other_weights_for_one_call_are_not_taken_for_the_layers_own():
    """`functional_call`, before and after: each inverts with its own."""
    layer, z = settled(3), draw("z", 2, 3, 4, 4)
    before = inverse(layer, z)
    other = settled(3)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(0.9)
        run = torch.func.functional_call(
            T.Inverse(layer), {f"transform.{k}": v for k, v in other.state_dict().items()}, z
        )
    torch.testing.assert_close(run, inverse(other, z), rtol=0, atol=1e-12)
    torch.testing.assert_close(inverse(layer, z), before, rtol=0, atol=0)


@pytest.mark.parametrize("layer", [T.Emerging(3), T.PeriodicConv(3)], ids=lambda layer: type(layer).__name__)
@pytest.mark.parametrize("size", [(0, 4), (4, 0)], ids=str)
def test_images_without_points_are_refused(layer, size):
    for direction in (layer.forward, layer.inverse):
        with pytest.raises(ValueError, match=r"Expected images of 3 channels; got events \(3, "):
            direction(torch.zeros(2, 3, *size))


def test_the_1x1_is_a_layer_over_channels():
    with pytest.raises(TypeError, match="Expected conv1x1 to be a Conv1x1 or a Householder; got 'lu'"):
        T.Emerging(3, conv1x1="lu")
    layer, x = T.Emerging(3, conv1x1=T.Householder(3)).double(), draw("x", 2, 3, 4, 4)
    torch.testing.assert_close(layer.inverse(layer(x)[0])[0], x, rtol=0, atol=1e-12)


@pytest.mark.parametrize("scale", [1.0, 3.0, 5.0])
def test_weights_that_stretch_cost_no_more_digits_than_one_point_after_the_other(scale, monkeypatch):
    """Systems get ill-conditioned as weights grow, whichever way they are solved; by tiles no faster than by points."""
    torch.manual_seed(0)
    layer = T.Emerging(12).eval()
    with torch.no_grad():
        for conv in (layer.first, layer.second):
            conv.parametrizations.weight.original.mul_(scale * 3)
        x = torch.randn(8, 12, 16, 16)
        z = layer(x)[0]

    def error() -> float:
        layer._tiled = None
        return float((inverse(layer, z)[0] - x).norm() / x.norm())

    by_tiles = error()
    monkeypatch.setattr(tiles, "KEPT_TILE", 1)
    assert by_tiles <= 3 * error()
    assert by_tiles < 1e-3


def stretching(scale: float) -> T.Emerging:
    torch.manual_seed(0)
    layer = T.Emerging(4).eval()
    with torch.no_grad():
        for conv in (layer.first, layer.second):
            conv.parametrizations.weight.original.mul_(scale)
    return layer


@pytest.mark.parametrize("record", [True, False], ids=["with gradients", "without"])
@pytest.mark.parametrize("scale", [30.0, 60.0, 200.0])
def test_an_inverse_that_is_none_is_not_returned(scale, record):
    """Errors grow from point to point, beyond the digits of float32, or beyond its numbers."""
    layer, z = stretching(scale), draw("z", 2, 4, 16, 16).float()
    message = r"^Emerging: Expected a residual of at most 0\.00035 \(relative\); got (\d|inf).* in this precision\.$"
    with torch.set_grad_enabled(record), pytest.raises(ef.ConvergenceError, match=message) as caught:
        layer.inverse(z)
    assert caught.value.solution.residual > 3e-4
    if scale == 30:  # float64 has digits enough
        x, _ = layer.double().inverse(z.double())
        torch.testing.assert_close(layer(x)[0], z.double(), rtol=0, atol=1e-9)


def hard_to_unmix(condition: float) -> T.Emerging:
    """A 1×1 that nearly loses one direction."""
    torch.manual_seed(0)
    left, right = (torch.linalg.qr(torch.randn(4, 4))[0] for _ in range(2))
    start = left @ torch.diag(torch.tensor([1.0, 0.7, 0.5, 1 / condition])) @ right
    return T.Emerging(4, conv1x1=T.Conv1x1(4, "free", start=start)).eval()


@pytest.mark.parametrize("record", [True, False], ids=["with gradients", "without"])
@pytest.mark.parametrize("condition", [1e1, 1e2, 1e3, 3e3])
def test_the_condition_of_the_1x1_counts_once(condition, record):
    """It is undone behind both systems: inside one, what it loses would be stretched from point to point."""
    layer, x = hard_to_unmix(condition), draw("x", 4, 4, 8, 8).float()
    with torch.set_grad_enabled(record):
        z, _ = layer(x)
        found, _ = layer.inverse(z)
        assert (layer(found)[0] - z).abs().max() <= 3.5e-4 * z.abs().max()
    assert (found - x).abs().max() <= 10 * condition * torch.finfo(torch.float32).eps


@pytest.mark.parametrize("record", [True, False], ids=["with gradients", "without"])
@pytest.mark.parametrize("condition", [3e4, 1e6])
def test_a_1x1_that_loses_all_digits_is_not_taken_for_plain(condition, record):
    layer, x = hard_to_unmix(condition), draw("x", 4, 4, 8, 8).float()
    with torch.set_grad_enabled(record):
        z, _ = layer(x)
        with pytest.raises(ef.ConvergenceError, match=r"^Emerging: Expected a residual of at most"):
            layer.inverse(z)


@torch.no_grad()
def test_what_was_kept_does_not_come_back_after_a_refusal():
    layer, z = T.Emerging(3, conv1x1=T.Conv1x1(3, "free")).double().eval(), draw("z", 2, 3, 4, 4)
    before = layer.inverse(z)
    weight = layer.conv1x1.weight
    other = weight[1].clone()
    weight[1] = weight[0]
    for _ in range(2):
        with pytest.raises(ValueError, match=r"^Conv1x1: Expected a matrix that can be inverted; got a singular one"):
            layer.inverse(z)
    weight[1] = other
    torch.testing.assert_close(layer.inverse(z), before)


def test_an_inverse_is_verified_without_a_pass_where_it_is_plain(monkeypatch):
    """A bound on what rounding can do is enough for weights that do not stretch."""
    layer = settled(12).float()
    x = draw("x", 2, 12, 8, 8).float()
    with torch.no_grad():
        z, _ = layer(x)
    monkeypatch.setattr(T.Emerging, "_forward", None)
    torch.testing.assert_close(inverse(layer, z)[0], x, rtol=0, atol=1e-4)


def unequal(spread: float, seed: int) -> T.Emerging:
    """Channels of very different sizes, and a 1×1 of condition 20 that mixes them."""
    torch.manual_seed(seed)
    left, right = (torch.linalg.qr(torch.randn(4, 4))[0] for _ in range(2))
    start = left @ torch.diag(torch.logspace(0, -1.3, 4)) @ right
    layer = T.Emerging(4, conv1x1=T.Conv1x1(4, "free", start=start)).eval()
    with torch.no_grad():
        for conv in (layer.first, layer.second):
            conv.log_diagonal.normal_(0, spread)
            conv.bias.normal_()
    return layer


@torch.no_grad()
@pytest.mark.parametrize("spread", [0.5, 1.0, 2.0, 3.0])
def test_what_is_kept_costs_no_digits(spread):
    """Both systems are solved as one only in bases where rounding does not grow; else one by one, as in training."""
    for seed in range(8):
        layer = unequal(spread, seed)
        x = torch.randn(2, 4, 16, 16)
        z = layer(x)[0]
        exact = layer.double().inverse(z.double())[0]
        layer.float()
        kept, anew = ((found[0] - exact).norm() for found in (layer.eval().inverse(z), layer.train().inverse(z)))
        assert kept <= 8 * anew


def test_a_diagonal_so_small_that_nothing_of_it_is_left_is_no_inverse():
    """Bounds on rounding overflow as well; an inverse that is not finite is not returned for that."""
    for log_diagonal in (-20.0, -40.0, -110.0):
        layer = stretching(10.0)
        with torch.no_grad():
            layer.first.log_diagonal.fill_(log_diagonal)
            z = layer(draw("x", 2, 4, 8, 8).float())[0]
        for record in (True, False):
            with torch.set_grad_enabled(record), pytest.raises(ef.ConvergenceError, match=r"^Emerging: Expected"):
                layer.inverse(z)
