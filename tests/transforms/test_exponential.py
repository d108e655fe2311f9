"""Exponential layers: exp(A)x within the tolerance, fresh, trained, in training and in evaluation."""

from __future__ import annotations

import math

import pytest
import torch

import expmflow as ef
from expmflow import transforms as T
from exponential_cases import CASES
from transform_registry import draw, points, randomise, settle

F32, F64 = torch.float32, torch.float64
FREE_OF_CONTEXT = [name for name in CASES if not name.startswith("graph")]


def error(z: torch.Tensor, layer: T.Transform, x: torch.Tensor, sign: float) -> float:
    """‖z − exp(±A) x‖ / ‖x‖ of the worst row, in units of e^{max(μ, 0)}, by `torch.matrix_exp` in float64."""
    matrix = sign * layer.operator().dense(x.shape[1:]).detach().double()
    exact = x.double().flatten(1) @ torch.matrix_exp(matrix).T
    growth = torch.linalg.eigvalsh((matrix + matrix.T) / 2).max().clamp_min(0).exp()
    off = (z.double().flatten(1) - exact).norm(dim=1) / x.double().flatten(1).norm(dim=1)
    return float((off / growth).max())


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("dtype", [F64, F32], ids=str)
@pytest.mark.parametrize("name", FREE_OF_CONTEXT)
def test_both_directions_meet_the_tolerance(name, dtype, training):
    """1e-6 in float32 and 1e-14 in float64, where the layer was given nothing else; and what the dtype can hold."""
    case = CASES.ready(name)
    layer, x = case.layer.to(dtype).train(training), points(name, case).to(dtype)
    asked = {F64: 1e-14, F32: 1e-6}[dtype] if layer.tol is None else layer.tol
    held = ef.plan_series(1.02 * layer.coeff, asked, dtype).error_bound
    with torch.no_grad():
        for sign, run in ((1.0, layer), (-1.0, layer.inverse)):
            assert error(run(x)[0], layer, x, sign) <= max(asked, held)


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("tol", [1e-2, 1e-5])
@pytest.mark.parametrize("growth", [1, -1, 0], ids=["grows", "shrinks", "turns"])
def test_both_directions_meet_a_coarse_tolerance(growth, tol, training):
    """What exp(A) may lose because it grows, exp(−A) may not, and the other way round."""
    layer = T.LinearExp(5, coeff=6.0, tol=tol).double().train(training)
    matrix = draw("grows", 5, 5)
    definite = growth * (4.5 * torch.eye(5, dtype=F64) + 0.02 * matrix @ matrix.T)
    with torch.no_grad():
        layer.parametrizations.weight.original.copy_(definite if growth else 2 * (matrix - matrix.T))
        settle(layer.train(), draw("x", 8, 5), rounds=30)
        layer.train(training)
        x = draw("x", 8, 5)
        for sign, run in ((1.0, layer), (-1.0, layer.inverse)):
            assert error(run(x)[0], layer, x, sign) <= tol


def test_terms_in_training_follow_the_norm():
    layer, x = T.ConvExp(2, training_tol=2e-4).double(), draw("x", 4, 2, 6, 6)
    weight, terms = layer.parametrizations.kernel.original, []
    for share in (0.02, 0.3, 0.6, 0.95, 2.0):
        with torch.no_grad():
            weight.copy_(draw("kernel", 2, 2, 3, 3))
            layer.parametrizations.kernel[-1].update(weight, rounds=100)
            weight.mul_(share * layer.coeff / layer.parametrizations.kernel[-1].norm(weight))
            z, _ = layer.train()(x)
        assert error(z, layer, x, 1.0) <= 2e-4
        terms.append(layer.plan(x).terms)
        with torch.no_grad():
            assert error(layer.eval()(x)[0], layer, x, 1.0) <= 1e-12  # what `torch.matrix_exp` holds at small norms
    assert terms == [3, 4, 5, 6, 6]


@pytest.mark.parametrize("name", FREE_OF_CONTEXT)
def test_training_plans_compute_no_bounds(name, monkeypatch):
    """A certified bound costs as much as a product."""
    case = CASES.ready(name)

    def refuse(*args):
        raise AssertionError("a bound was computed in training")

    for cls in (ef.ConvOperator, ef.DenseOperator):
        monkeypatch.setattr(cls, "_norm_bound", refuse)
        monkeypatch.setattr(cls, "_log_norm_bound", refuse)
    z, _ = case.layer.train()(points(name, case))
    case.layer.inverse(z)


@pytest.mark.parametrize("name", FREE_OF_CONTEXT)
def test_a_fresh_layer_is_near_the_identity_and_correct(name):
    case = CASES[name]()
    x = points(name, case)
    with torch.no_grad():
        for layer in (case.layer.eval(), case.layer.train()):
            back, _ = layer.inverse(x)  # before anything else
            z, _ = layer(x)
            assert 0 < float((z - x).norm() / x.norm()) < 0.05
            torch.testing.assert_close(layer.inverse(z)[0], x, rtol=0, atol=1e-12)
            torch.testing.assert_close(layer(back)[0], x, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", [name for name in CASES if "skew" in name])
def test_skew_layers_are_orthogonal(name):
    case = CASES.ready(name)
    d = math.prod(case.event)
    with torch.no_grad():
        z, logdet = case.layer(torch.eye(d, dtype=F64).reshape(d, *case.event))
    matrix = z.flatten(1)
    torch.testing.assert_close(matrix @ matrix.T, torch.eye(d, dtype=F64), rtol=0, atol=1e-12)
    torch.testing.assert_close(logdet, torch.zeros(d, dtype=F64), rtol=0, atol=1e-13)
    assert float((matrix - torch.eye(d, dtype=F64)).norm()) > 0.1


@pytest.mark.parametrize("padding", ["zeros", "circular"])
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_skew_convolutions_keep_lengths_at_any_size(dims, padding):
    torch.manual_seed(0)
    layer = T.ConvExp(2, dims=dims, skew=True, padding=padding).double()
    randomise(layer)
    settle(layer, draw("small", 1, 2, *(3,) * dims))
    x = draw("large", 2, 2, *(5,) * dims)
    z, logdet = layer.eval()(x)
    torch.testing.assert_close(z.flatten(1).norm(dim=1), x.flatten(1).norm(dim=1), rtol=1e-12, atol=0)
    assert float(logdet.detach().abs().max()) < 1e-12


def test_reflected_convolutions_cannot_be_skew():
    """Reflection is not symmetric: w − wᵀ of the kernel is not skew as an operator."""
    with pytest.raises(ValueError, match="Expected zeros or circular padding for a skew kernel; got reflect"):
        T.ConvExp(2, skew=True, padding="reflect")


def test_fixed_terms_are_the_papers_series():
    case = CASES.ready("conv-exp")
    layer = T.ConvExp(2, terms=4).double()
    layer.load_state_dict(case.layer.state_dict())
    x = points("conv-exp", case)
    op = case.layer.operator()
    term, total = x, x
    for i in range(1, 5):
        term = op(term) / i
        total = total + term
    for training in (True, False):
        torch.testing.assert_close(layer.train(training)(x)[0], total, rtol=0, atol=1e-13)
    assert error(total.detach(), case.layer, x, 1.0) > 1e-6  # cut off, and seen to be


@pytest.mark.parametrize("kind", ["linear", "conv"])
def test_both_gradients_are_the_same(kind):
    pair = {"linear": ("linear-exp", "linear-exp-recompute"), "conv": ("conv-exp", "conv-exp-recompute")}[kind]
    first, second = (CASES.ready(name).layer for name in pair)
    second.load_state_dict(first.state_dict())
    x = points(pair[0], CASES.ready(pair[0]))
    found = []
    for layer in (first.train(), second.train()):
        start = x.clone().requires_grad_()
        z, logdet = layer(start)
        found.append(torch.autograd.grad(z.square().sum() + logdet.sum(), [start, *layer.parameters()]))
    torch.testing.assert_close(found[0], found[1], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ["conv-exp", "conv-exp-circular", "conv-exp-power"])
def test_other_image_sizes(name):
    """A layer is a kernel: it acts on images of any size, and is inverted there."""
    case = CASES.ready(name)
    for size in [(1, 1), (2, 7), (9, 9)]:
        x = draw("sizes", 2, 2, *size)
        z, _ = case.layer(x)
        torch.testing.assert_close(case.layer.inverse(z)[0], x, rtol=0, atol=1e-11)


def test_logdet_is_the_trace():
    layer = CASES.ready("conv-exp").layer
    x = draw("trace", 2, 2, 6, 5)
    centre = layer.kernel.detach()[:, :, 1, 1].trace()
    torch.testing.assert_close(layer(x)[1].detach(), (30 * centre).expand(2))


def test_a_context_that_is_not_needed_changes_nothing():
    case = CASES.ready("conv-exp")
    x = points("conv-exp", case)
    with torch.no_grad():
        for direction in (case.layer, case.layer.inverse):
            assert torch.equal(direction(x)[0], direction(x, torch.ones(3, 2))[0])
