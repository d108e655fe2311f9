"""`expm_apply` refuses bad input before any work, as `Expected …; got …`."""

from __future__ import annotations

import math

import pytest
import torch

import expmflow as ef

NAN, INF = math.nan, math.inf
OP = ef.DenseOperator(torch.eye(2))
X = torch.ones(1, 2)

OPTIONS = {
    "negative tol": (ValueError, {"tol": -1e-6}),
    "NaN tol": (ValueError, {"tol": NAN}),
    "infinite tol": (ValueError, {"tol": INF}),
    "tol of letters": (TypeError, {"tol": "small"}),
    "tol as a switch": (TypeError, {"tol": True}),
    "no terms": (ValueError, {"terms": 0}),
    "negative terms": (ValueError, {"terms": -3}),
    "fractional terms": (TypeError, {"terms": 6.0}),
    "terms as a switch": (TypeError, {"terms": True}),
    "both tol and terms": (ValueError, {"tol": 1e-6, "terms": 6}),
    "unknown gradient": (ValueError, {"gradient": "none"}),
    "NaN time": (ValueError, {"t": NAN}),
    "infinite time": (ValueError, {"t": -INF}),
    "NaN among times": (ValueError, {"t": [0.0, NAN]}),
    "infinite time tensor": (ValueError, {"t": torch.tensor(INF)}),
    "times with two axes": (ValueError, {"t": torch.ones(2, 2)}),
    "no times": (ValueError, {"t": []}),
    "complex time": (TypeError, {"t": torch.tensor(1j)}),
    "integer time tensor": (TypeError, {"t": torch.tensor(1)}),
    "time of letters": (TypeError, {"t": "1"}),
    "times of letters": (TypeError, {"t": ["1", "2"]}),
    "complex times": (TypeError, {"t": [0.5, torch.tensor(1j)]}),
    "a vector among times": (ValueError, {"t": [0.5, torch.ones(2)]}),
    "time as a switch": (TypeError, {"t": True}),
}
SENTENCE = r"(?s)^Expected .+; got .+\.$"


@pytest.mark.parametrize("name", OPTIONS)
def test_options(name):
    error, options = OPTIONS[name]
    with pytest.raises(error, match=SENTENCE):
        ef.expm_apply(OP, X, **options)


@pytest.mark.parametrize("op", [torch.eye(2), None, lambda x: x])
def test_an_operator_is_expected(op):
    with pytest.raises(TypeError, match=SENTENCE):
        ef.expm_apply(op, X)


INPUTS = {
    "a list": (TypeError, [[1.0, 2.0]]),
    "nothing": (TypeError, None),
    "integers": (TypeError, torch.ones(1, 2, dtype=torch.int64)),
    "complex numbers": (TypeError, torch.ones(1, 2, dtype=torch.complex64)),
    "another device": (ValueError, torch.ones(1, 2, device="meta")),
    "wrong size": (ValueError, torch.ones(1, 3)),
    "a scalar": (ValueError, torch.tensor(1.0)),
}


@pytest.mark.parametrize("autocast", [False, True], ids=["", "autocast"])
@pytest.mark.parametrize("name", INPUTS)
def test_input(name, autocast):
    error, x = INPUTS[name]
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast), pytest.raises(error, match=SENTENCE):
        ef.expm_apply(OP, x)


def test_another_dtype():
    """Refused; except under autocast, where precisions meet."""
    with pytest.raises(TypeError, match=SENTENCE):
        ef.expm_apply(OP, X.double())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert ef.expm_apply(OP, X.double()).dtype == torch.float32


def test_before_any_work():
    calls = []
    op = ef.FunctionOperator(lambda x: calls.append(1) or x, norm_bound=1.0)
    for _, options in OPTIONS.values():
        with pytest.raises((ValueError, TypeError)):
            ef.expm_apply(op, X, **options)
    assert len(calls) <= 1  # the function is looked at once, and no series is started


@pytest.mark.parametrize("value", [NAN, INF])
def test_values_that_became_bad_after_construction(value):
    """An optimizer may write NaN into a parameter."""
    matrix, kernel = torch.eye(2), torch.ones(1, 1, 3)
    operators = [(ef.DenseOperator(matrix), X), (ef.ConvOperator(kernel), torch.ones(1, 1, 4))]
    matrix[0, 0] = kernel[0, 0, 0] = value
    for op, x in operators:
        with pytest.raises(ValueError, match=SENTENCE):
            ef.expm_apply(op, x)
