"""Linear maps over channels: what their parameters stand for."""

from __future__ import annotations

import pytest
import torch

from expmflow import transforms as T
from expmflow.transforms.conv1x1 import reflections_product
from transform_registry import draw, randomise

F64 = torch.float64


@pytest.mark.parametrize("count", [1, 2, 5, 8])
def test_the_product_of_reflections_is_formed_at_once(count):
    """As one after the other: H₁ H₂ … H_k with H = I − 2 v vᵀ / ‖v‖²."""
    vectors = draw("vectors", 5, count)
    expected = torch.eye(5, dtype=F64)
    for v in vectors.T:
        expected = expected @ (torch.eye(5, dtype=F64) - 2 * torch.outer(v, v) / (v @ v))
    torch.testing.assert_close(reflections_product(vectors), expected, rtol=0, atol=1e-13)


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_reflections_are_orthogonal_and_have_the_sign_of_their_number(count):
    layer = T.Householder(4, count).double()
    q = layer.matrix().detach()
    torch.testing.assert_close(q @ q.T, torch.eye(4, dtype=F64), rtol=0, atol=1e-13)
    assert float(torch.linalg.det(q)) == pytest.approx((-1) ** count)


def test_the_length_of_a_reflections_vector_does_not_matter():
    vectors = draw("vectors", 4, 3)
    torch.testing.assert_close(
        reflections_product(vectors), reflections_product(vectors * torch.tensor([1e-3, 5.0, 1e6]))
    )


@pytest.mark.parametrize("parametrization", ["lu", "free"])
def test_a_1x1_convolution_starts_as_a_rotation(parametrization):
    layer = T.Conv1x1(6, parametrization).double()
    w = layer.matrix().detach()
    torch.testing.assert_close(w @ w.T, torch.eye(6, dtype=F64), rtol=0, atol=1e-5)
    assert float(layer.log_abs_det().detach().abs()) < 1e-5
    assert (w - torch.eye(6, dtype=F64)).norm() > 0.5


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, F64], ids=str)
def test_a_matrix_that_has_become_singular_is_not_inverted(dtype):
    """Exactly, and but for rounding; one that is only small is inverted."""
    layer, x = T.Conv1x1(4, "free").to(dtype), draw("x", 2, 4, 3, 3).to(dtype)
    layer.weight.mul_(1e-9)
    torch.testing.assert_close(layer.inverse(layer(x)[0])[0], x)
    layer.weight[2] = 0.3 * layer.weight[0] - 0.7 * layer.weight[1]
    message = r"^Conv1x1: Expected a matrix that can be inverted; got a singular one\.$"
    with pytest.raises(ValueError, match=message):
        layer.inverse(x)
    layer.weight[2] = 0
    with pytest.raises(ValueError, match=message):
        layer.inverse(x)


@pytest.mark.parametrize("parametrization", ["lu", "free"])
def test_a_1x1_convolution_starts_where_it_is_told(parametrization):
    start = draw("start", 4, 4)
    layer = T.Conv1x1(4, parametrization, start=start)
    torch.testing.assert_close(layer.matrix().detach(), start, rtol=0, atol=1e-12)
    with torch.no_grad():
        start.zero_()
    assert float(layer.matrix().detach().norm()) > 1
    with pytest.raises(ValueError, match=r"Expected a start that can be inverted; got a singular matrix\."):
        T.Conv1x1(4, parametrization, start=start)
    with pytest.raises(ValueError, match=r"Expected a start of shape \(3, 3\); got \(4, 4\)\."):
        T.Conv1x1(3, parametrization, start=start)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("parametrization", ["lu", "free"])
def test_a_1x1_convolution_is_its_matrix_at_every_point(parametrization, layout):
    layer = T.Conv1x1(3, parametrization).double()
    randomise(layer)
    x, w = draw("image", 2, 3, 4, 5).contiguous(memory_format=layout), layer.matrix()
    expected = torch.einsum("oi,bihw->bohw", w, x)
    torch.testing.assert_close(layer(x)[0], expected)
    torch.testing.assert_close(layer.inverse_matrix() @ w, torch.eye(3, dtype=F64), rtol=0, atol=1e-12)
    torch.testing.assert_close(layer.log_abs_det(), torch.linalg.slogdet(w)[1])


def test_the_factors_of_lu_stay_triangular():
    """Entries on the wrong side of a factor do not matter, and get no gradient."""
    layer = T.Conv1x1(4).double()
    randomise(layer)
    before = layer.matrix().detach()
    with torch.no_grad():
        layer.lower.add_(torch.ones(4, 4, dtype=F64).triu())
        layer.upper.add_(torch.ones(4, 4, dtype=F64).tril())
    torch.testing.assert_close(layer.matrix().detach(), before)
    layer.matrix().square().sum().backward()
    assert (layer.lower.grad.triu() == 0).all()
    assert (layer.upper.grad.tril() == 0).all()


def test_the_sign_of_the_determinant_is_kept():
    """LU with positive diagonals and fixed signs cannot pass through a singular matrix."""
    layer = T.Conv1x1(4).double()
    sign = torch.linalg.slogdet(layer.matrix().detach())[0]
    for _ in range(5):
        randomise(layer)
        assert torch.linalg.slogdet(layer.matrix().detach())[0] == sign
