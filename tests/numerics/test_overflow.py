"""A result that no number of the dtype can hold is refused in one sentence."""

from __future__ import annotations

import math

import pytest
import torch

import expmflow as ef
from heat_cases import star

MESSAGE = r"^Expected exp\(tA\) x within the range of torch\.float(32|64); got a result that overflows"
OPERATORS = {
    "dense": lambda: (ef.DenseOperator(90 * torch.eye(2)), (2,)),
    "convolution": lambda: (ef.ConvOperator(torch.full((1, 1, 3), 50.0)), (1, 8)),
    "graph": lambda: (ef.GraphConvOperator(50 * torch.eye(1), 50 * torch.eye(1), torch.ones(3, 3)), (3, 1)),
    "sparse graph": lambda: (ef.GraphConvOperator.from_edge_index(*2 * [90 * torch.eye(1)], star(5), 5), (5, 1)),
    "function": lambda: (ef.FunctionOperator(lambda x: 90 * x, norm_bound=90.0), (2,)),
}


@pytest.mark.parametrize("gradient", ["recompute", "autograd"])
@pytest.mark.parametrize("name", OPERATORS)
def test_results_that_overflow(name, gradient):
    op, event = OPERATORS[name]()
    x = torch.ones(2, *event)
    for values in (x, x.clone().requires_grad_()):
        for t in (1.0, torch.tensor(1.0), [0.5, 1.0]):
            with pytest.raises(ValueError, match=MESSAGE):
                ef.expm_apply(op, values, t, gradient=gradient)
    assert bool(ef.expm_apply(op, x, -0.01).isfinite().all())


def test_large_inputs_and_fixed_terms():
    op = ef.DenseOperator(torch.eye(2, dtype=torch.float64))
    with pytest.raises(ValueError, match=MESSAGE):
        ef.expm_apply(op, torch.full((1, 2), 1e308, dtype=torch.float64))
    with pytest.raises(ValueError, match=MESSAGE):
        ef.expm_apply(op, torch.full((1, 2), 1e308, dtype=torch.float64), terms=3)
    z = ef.expm_apply(op, torch.full((1, 2), 1e307, dtype=torch.float64))
    assert float(z[0, 0]) == pytest.approx(1e307 * math.e)


def test_what_comes_in_not_finite_goes_out_so():
    """No overflow, so nothing is said here: `Flow` names the layer where it began."""
    op = ef.DenseOperator(torch.eye(2))
    z = ef.expm_apply(op, torch.tensor([[math.nan, 1.0], [1.0, 2.0]]))
    assert bool(z[0].isnan().any())
    assert bool(z[1].isfinite().all())
    assert ef.expm_apply(op, torch.ones(0, 2)).shape == (0, 2)
