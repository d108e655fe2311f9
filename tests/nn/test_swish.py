"""LipSwish as one function: every derivative is that of its formula, and its input is all that it keeps."""

from __future__ import annotations

import pytest
import torch

from expmflow.nn.swish import _formula, lip_swish
from transform_registry import draw

BETAS = [1e-2, 0.9, 6.0]


def inputs(beta: float) -> tuple[torch.Tensor, torch.Tensor]:
    return draw("x", 3, 4).mul(2).requires_grad_(), torch.tensor(beta, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize("beta", BETAS)
def test_derivatives(beta):
    """The first, the second, and, which nobody needs yet, the third."""
    given, plain = inputs(beta), inputs(beta)
    torch.testing.assert_close(lip_swish(*given), _formula(*plain))
    assert torch.autograd.gradcheck(lip_swish, given)
    assert torch.autograd.gradgradcheck(lip_swish, given)
    found = []
    for function, (x, b) in ((lip_swish, given), (_formula, plain)):
        value = function(x, b)
        for k in range(3):
            value = (value * draw(f"weights {k}", *x.shape)).sum()
            gx, gb = torch.autograd.grad(value, (x, b), create_graph=True)
            value = gx + gb
        found.append((gx, gb))
    torch.testing.assert_close(found[0], found[1])


@pytest.mark.parametrize("beta", BETAS)
def test_second_derivative_without_a_third(beta):
    """As residual blocks take it: the gradient in x, differentiated once."""
    found = []
    for function in (lip_swish, _formula):
        x, b = inputs(beta)
        weights = draw("weights", *x.shape).requires_grad_()
        (gx,) = torch.autograd.grad(function(x, b), x, weights, create_graph=True)
        found.append(torch.autograd.grad((gx * draw("more", *x.shape)).sum(), (x, b, weights)))
    torch.testing.assert_close(found[0], found[1])


def test_function_transforms():
    x, b = inputs(0.9)
    rows = torch.func.vmap(torch.func.grad(lambda row: lip_swish(row, b).sum()))(x)
    torch.testing.assert_close(rows, torch.autograd.grad(lip_swish(x, b).sum(), x)[0])
    many = torch.autograd.grad(lip_swish(x, b), x, torch.eye(12).double().reshape(12, 3, 4), is_grads_batched=True)[0]
    torch.testing.assert_close(many.reshape(12, 12), torch.diag(rows.flatten()))


def test_what_is_kept():
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.numel()) or t, lambda t: t):
        x, b = inputs(0.9)
        lip_swish(x, b)
    assert sum(kept) == x.numel() + 1
