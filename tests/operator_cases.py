"""One registry of operators: every test that holds for all of them runs over `CASES`.

A case is a function of the dtype that returns a fresh operator and the shape of an event. Parameters are leaves with a
gradient; norms are about 1, events small enough for a dense matrix. Here are the matrices, the functions, and the
operators made of operators.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

import conv_cases
import expmflow as ef
import graph_cases
from operator_registry import Cases, draw, parameter

CASES = Cases(conv_cases.CASES | graph_cases.CASES)

# --- matrices ---------------------------------------------------------------------------------------------------------


@CASES.add("dense")
def _(dtype: torch.dtype):
    return ef.DenseOperator(parameter("dense", 6, 6, dtype=dtype, size=0.3)), (6,)


@CASES.add("dense-1x1")
def _(dtype: torch.dtype):
    return ef.DenseOperator(parameter("dense-1x1", 1, 1, dtype=dtype, size=0.7)), (1,)


@CASES.add("dense-zero")
def _(dtype: torch.dtype):
    return ef.DenseOperator(torch.zeros(3, 3, dtype=dtype, requires_grad=True)), (3,)


@CASES.add("dense-skew")
def _(dtype: torch.dtype):
    matrix = draw("dense-skew", 4, 4, dtype=dtype)
    return ef.DenseOperator((0.4 * (matrix - matrix.T)).requires_grad_()), (4,)


@CASES.add("dense-batched")
def _(dtype: torch.dtype):
    return ef.DenseOperator(parameter("dense-batched", 3, 4, 4, dtype=dtype, size=0.4)), (4,)


@CASES.add("dense-constant")
def _(dtype: torch.dtype):
    return ef.DenseOperator(torch.full((30, 30), 1 / 33, dtype=dtype, requires_grad=True)), (30,)


@CASES.add("dense-positive")
def _(dtype: torch.dtype):
    return ef.DenseOperator((0.05 * draw("dense-positive", 30, 30, dtype=dtype).abs()).requires_grad_()), (30,)


@CASES.add("dense-alternating")
def _(dtype: torch.dtype):
    signs = 1.0 - 2 * (torch.arange(30, dtype=dtype) % 2)
    return ef.DenseOperator((torch.outer(signs, signs) / 33).requires_grad_()), (30,)


# --- functions --------------------------------------------------------------------------------------------------------


def roll(x: Tensor) -> Tensor:
    return 0.5 * x.roll(1, dims=-1)


@CASES.add("function-bare")
def _(dtype: torch.dtype):
    return ef.FunctionOperator(roll), (5,)


@CASES.add("function-bounded")
def _(dtype: torch.dtype):
    return ef.FunctionOperator(roll, trace=0.0, norm_bound=0.5, log_norm_bound=0.5), (2, 3)


@CASES.add("function-zero")
def _(dtype: torch.dtype):
    return ef.FunctionOperator(torch.zeros_like, trace=0.0, norm_bound=0.0), (3,)


@CASES.add("function-parameters")
def _(dtype: torch.dtype):
    left = parameter("function-parameters0", 3, 3, dtype=dtype, size=0.4)
    right = parameter("function-parameters1", 4, 4, dtype=dtype, size=0.4)
    return (
        ef.FunctionOperator(
            lambda x: left @ x @ right,
            [left, right],
            trace=lambda shape: left.trace() * right.trace(),
            norm_bound=lambda shape: torch.linalg.matrix_norm(left) * torch.linalg.matrix_norm(right),
        ),
        (3, 4),
    )


@CASES.add("function-unused-parameter")
def _(dtype: torch.dtype):
    unused = torch.ones(2, dtype=dtype, requires_grad=True)
    return ef.FunctionOperator(roll, [unused], norm_bound=0.5), (4,)


@CASES.add("function-frozen-parameter")
def _(dtype: torch.dtype):
    frozen = 0.3 * draw("function-frozen-parameter", 4, 4, dtype=dtype)
    gain = parameter("function-frozen-gain", 4, dtype=dtype, size=1.0)
    return ef.FunctionOperator(lambda x: gain * (x @ frozen), [frozen, gain]), (4,)


@CASES.add("function-module")
def _(dtype: torch.dtype):
    module = torch.nn.Conv1d(2, 2, 3, padding=1, bias=False, dtype=dtype)
    with torch.no_grad():
        module.weight.copy_(0.3 * draw("function-module", 2, 2, 3, dtype=dtype))
    return ef.FunctionOperator(module, list(module.parameters()), norm_bound=2.0), (2, 5)


# --- operators made of operators --------------------------------------------------------------------------------------


def made_from(name: str, *sources: str) -> Callable[[Callable[..., ef.LinearOperator]], None]:
    """Register what a function makes of other cases' operators, on the last one's events."""

    def register(make: Callable[..., ef.LinearOperator]) -> None:
        def build(dtype: torch.dtype):
            operators, events = zip(*(CASES[source](dtype) for source in sources), strict=True)
            return make(*operators), events[-1]

        CASES.add(name)(build)

    return register


made_from("adjoint-dense", "dense")(lambda op: op.adjoint())
made_from("adjoint-conv-reflect", "conv2d-3x3-reflect")(lambda op: op.adjoint())
made_from("adjoint-conv-groups", "conv2d-3x3-groups-circular")(lambda op: -op.adjoint())
made_from("adjoint-graph-asymmetric", "graph-asymmetric")(lambda op: op.adjoint())
made_from("adjoint-graph-sparse", "graph-edges-weighted")(lambda op: 0.5 * op.adjoint())
made_from("adjoint-function", "function-parameters")(lambda op: op.adjoint())
made_from("scaled-dense", "dense-batched")(lambda op: -0.7 * op)
made_from("scaled-function", "function-parameters")(lambda op: op * -0.7)
made_from("scaled-function-by-tensor", "function-parameters")(
    lambda op: torch.tensor(-0.7, dtype=op.parameters[0].dtype, requires_grad=True) * op
)
made_from("scaled-twice", "function-bounded")(lambda op: 2.0 * (-op))
made_from("sum-dense", "dense", "dense")(lambda a, b: 0.5 * a + b.adjoint())
made_from("sum-dense-batched", "dense-skew", "dense-batched")(lambda a, b: a - 0.5 * b)
made_from("sum-conv-and-function", "function-zero", "conv2d-1x3-zeros")(lambda a, b: a + b)
made_from("sum-skew-conv", "conv2d-3x3-circular", "conv2d-3x3-circular")(lambda a, b: 0.5 * (a - b.adjoint()))
made_from("sum-of-sums", "conv1d-3-zeros", "conv1d-3-circular", "conv1d-3-reflect")(lambda a, b, c: a + (b + c) * 0.5)
