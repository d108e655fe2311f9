"""Bad input is refused before any work, as `Expected …; got …`."""

from __future__ import annotations

import pytest
import torch

import expmflow as ef

NAN, INF = float("nan"), float("inf")
ONE = torch.ones(1, 1)
KERNEL = torch.ones(2, 2, 3, 3)
EDGES = torch.tensor([[0, 1], [1, 0]])


def conv(*shape, **options):
    return ef.ConvOperator(torch.ones(shape), **options)


def graph(adjacency, **options):
    return ef.GraphConvOperator(ONE, ONE, adjacency, **options)


def edges(edge_index=EDGES, nodes=2, weight=None, theta=ONE):
    return ef.GraphConvOperator.from_edge_index(theta, theta, edge_index, nodes, weight)


def with_value(value, *shape):
    tensor = torch.ones(shape)
    tensor.view(-1)[-1] = value
    return tensor


CONSTRUCTION = {
    # convolutions
    "more outputs than inputs": (ValueError, lambda: conv(4, 2, 3, 3)),
    "more inputs than outputs": (ValueError, lambda: conv(2, 4, 3, 3)),
    "channels against groups": (ValueError, lambda: conv(4, 4, 3, groups=2)),
    "no channels": (ValueError, lambda: conv(0, 0, 3)),
    "even kernel": (ValueError, lambda: conv(2, 2, 2, 2)),
    "one even side": (ValueError, lambda: conv(2, 2, 3, 4)),
    "empty kernel": (ValueError, lambda: conv(2, 2, 0)),
    "no spatial axis": (ValueError, lambda: conv(2, 2)),
    "four spatial axes": (ValueError, lambda: conv(1, 1, 3, 3, 3, 3)),
    "unknown padding": (ValueError, lambda: conv(1, 1, 3, padding="same")),
    "groups of zero": (ValueError, lambda: conv(1, 1, 3, groups=0)),
    "fractional groups": (TypeError, lambda: conv(2, 1, 3, groups=2.0)),
    "dilation of zero": (ValueError, lambda: conv(1, 1, 3, dilation=0)),
    "fractional dilation": (TypeError, lambda: conv(1, 1, 3, dilation=1.5)),
    "fractional dilation of an axis": (TypeError, lambda: conv(1, 1, 3, 3, dilation=(1, 1.5))),
    "too many dilations": (ValueError, lambda: conv(1, 1, 3, dilation=(1, 1))),
    "integer kernel": (TypeError, lambda: ef.ConvOperator(KERNEL.long())),
    "complex kernel": (TypeError, lambda: ef.ConvOperator(KERNEL.to(torch.complex64))),
    "kernel as an array": (TypeError, lambda: ef.ConvOperator(KERNEL.numpy())),
    "NaN in the kernel": (ValueError, lambda: ef.ConvOperator(with_value(NAN, 1, 1, 3))),
    "infinity in the kernel": (ValueError, lambda: ef.ConvOperator(with_value(-INF, 1, 1, 3))),
    # matrices
    "oblong matrix": (ValueError, lambda: ef.DenseOperator(torch.ones(2, 3))),
    "vector as matrix": (ValueError, lambda: ef.DenseOperator(torch.ones(3))),
    "matrices of four axes": (ValueError, lambda: ef.DenseOperator(torch.ones(1, 1, 2, 2))),
    "integer matrix": (TypeError, lambda: ef.DenseOperator(torch.ones(2, 2, dtype=torch.int64))),
    "complex matrix": (TypeError, lambda: ef.DenseOperator(torch.ones(2, 2, dtype=torch.complex128))),
    "matrix as a list": (TypeError, lambda: ef.DenseOperator([[1.0]])),
    "NaN in the matrix": (ValueError, lambda: ef.DenseOperator(with_value(NAN, 2, 2))),
    "infinity in the matrix": (ValueError, lambda: ef.DenseOperator(with_value(INF, 2, 2))),
    # graphs
    "oblong adjacency": (ValueError, lambda: graph(torch.ones(2, 3))),
    "adjacency of one axis": (ValueError, lambda: graph(torch.ones(3))),
    "adjacency of four axes": (ValueError, lambda: graph(torch.ones(1, 1, 2, 2))),
    "batched sparse adjacency": (ValueError, lambda: graph(torch.ones(2, 2, 2).to_sparse())),
    "negative weight": (ValueError, lambda: graph(with_value(-1.0, 2, 2))),
    "negative sparse weight": (ValueError, lambda: graph(with_value(-1.0, 2, 2).to_sparse())),
    "NaN weight": (ValueError, lambda: graph(with_value(NAN, 2, 2))),
    "infinite sparse weight": (ValueError, lambda: graph(with_value(INF, 2, 2).to_sparse())),
    "integer adjacency": (TypeError, lambda: graph(torch.ones(2, 2, dtype=torch.int64))),
    "boolean adjacency": (TypeError, lambda: graph(torch.ones(2, 2, dtype=torch.bool))),
    "adjacency of another dtype": (TypeError, lambda: graph(torch.ones(2, 2, dtype=torch.float64))),
    "adjacency as a list": (TypeError, lambda: graph([[1.0]])),
    "adjacency on another device": (ValueError, lambda: graph(torch.ones(2, 2, device="meta"))),
    "mask of numbers": (TypeError, lambda: graph(torch.ones(2, 2), mask=torch.ones(1, 2))),
    "mask of wrong size": (ValueError, lambda: graph(torch.ones(2, 2), mask=torch.ones(1, 3, dtype=torch.bool))),
    "mask of wrong batch": (ValueError, lambda: graph(torch.ones(3, 2, 2), mask=torch.ones(1, 2, dtype=torch.bool))),
    "mask of one axis": (ValueError, lambda: graph(torch.ones(2, 2), mask=torch.ones(2, dtype=torch.bool))),
    "mask beside sparse": (ValueError, lambda: graph(torch.ones(2, 2).to_sparse(), mask=torch.ones(1, 2).bool())),
    "thetas of two batches": (
        ValueError,
        lambda: ef.GraphConvOperator(torch.ones(2, 1, 1), torch.ones(3, 1, 1), ONE),
    ),
    "thetas and graphs of two batches": (
        ValueError,
        lambda: ef.GraphConvOperator(torch.ones(2, 1, 1), ONE, torch.ones(3, 1, 1)),
    ),
    "theta and mask of two batches": (
        ValueError,
        lambda: ef.GraphConvOperator(torch.ones(2, 1, 1), ONE, ONE, mask=torch.ones(3, 1, dtype=torch.bool)),
    ),
    "oblong theta": (ValueError, lambda: ef.GraphConvOperator(torch.ones(1, 2), ONE, ONE)),
    "thetas of two sizes": (ValueError, lambda: ef.GraphConvOperator(torch.eye(2), ONE, ONE)),
    "thetas of two dtypes": (TypeError, lambda: ef.GraphConvOperator(ONE, ONE.double(), ONE)),
    "integer theta": (TypeError, lambda: ef.GraphConvOperator(ONE.long(), ONE, ONE)),
    "NaN in theta": (ValueError, lambda: ef.GraphConvOperator(ONE, with_value(NAN, 1, 1), ONE)),
    "edge out of range": (ValueError, lambda: edges(torch.tensor([[0], [2]]))),
    "negative edge": (ValueError, lambda: edges(torch.tensor([[0], [-1]]))),
    "edges of wrong shape": (ValueError, lambda: edges(torch.zeros(3, 2, dtype=torch.int64))),
    "edges as floats": (TypeError, lambda: edges(torch.zeros(2, 2))),
    "edges as a list": (TypeError, lambda: edges([[0, 1], [1, 0]])),
    "too few weights": (ValueError, lambda: edges(weight=torch.ones(1))),
    "negative edge weight": (ValueError, lambda: edges(weight=with_value(-0.5, 2))),
    "NaN edge weight": (ValueError, lambda: edges(weight=with_value(NAN, 2))),
    "integer edge weight": (TypeError, lambda: edges(weight=torch.ones(2, dtype=torch.int64))),
    "edge weight of another dtype": (TypeError, lambda: edges(weight=torch.ones(2).double())),
    "negative number of nodes": (ValueError, lambda: edges(EDGES[:, :0], -1)),
    "fractional number of nodes": (TypeError, lambda: edges(nodes=2.0)),
    # functions
    "no callable": (TypeError, lambda: ef.FunctionOperator(3)),
    "integer parameter": (TypeError, lambda: ef.FunctionOperator(abs, [torch.ones(1, dtype=torch.int32)])),
    "number as parameter": (TypeError, lambda: ef.FunctionOperator(abs, [1.0])),
    "NaN parameter": (ValueError, lambda: ef.FunctionOperator(abs, [with_value(NAN, 1)])),
    "negative norm bound": (ValueError, lambda: ef.FunctionOperator(abs, norm_bound=-1.0)),
    "NaN norm bound": (ValueError, lambda: ef.FunctionOperator(abs, norm_bound=NAN)),
    "NaN log-norm bound": (ValueError, lambda: ef.FunctionOperator(abs, log_norm_bound=NAN)),
    # algebra
    "factor of letters": (TypeError, lambda: "2" * ef.DenseOperator(ONE)),
    "factor with axes": (ValueError, lambda: torch.ones(2) * ef.DenseOperator(ONE)),
    "sum with a number": (TypeError, lambda: ef.DenseOperator(ONE) + 1),
    "sum of two batch sizes": (
        ValueError,
        lambda: ef.DenseOperator(torch.ones(2, 1, 1)) + ef.DenseOperator(torch.ones(3, 1, 1)),
    ),
    "sum of two dtypes": (TypeError, lambda: ef.DenseOperator(ONE) + ef.DenseOperator(ONE.double())),
}

DENSE = ef.DenseOperator(torch.eye(2))
REFLECT = ef.ConvOperator(torch.ones(1, 1, 5), "reflect")
DILATED = ef.ConvOperator(torch.ones(1, 1, 3, 3), "reflect", dilation=(1, 3))
PER_ROW = ef.DenseOperator(torch.ones(3, 2, 2))

INPUTS = {
    "integers": (TypeError, DENSE, torch.ones(1, 2, dtype=torch.int64)),
    "complex numbers": (TypeError, DENSE, torch.ones(1, 2, dtype=torch.complex64)),
    "booleans": (TypeError, DENSE, torch.ones(1, 2, dtype=torch.bool)),
    "another dtype": (TypeError, DENSE, torch.ones(1, 2, dtype=torch.float64)),
    "another device": (ValueError, DENSE, torch.ones(1, 2, device="meta")),
    "a list": (TypeError, DENSE, [[1.0, 2.0]]),
    "a scalar": (ValueError, DENSE, torch.tensor(1.0)),
    "wrong size": (ValueError, DENSE, torch.ones(1, 3)),
    "no batch": (ValueError, DENSE, torch.ones(2)),
    "wrong batch": (ValueError, PER_ROW, torch.ones(2, 2)),
    "channel mismatch": (ValueError, ef.ConvOperator(KERNEL), torch.ones(1, 3, 4, 4)),
    "missing axis": (ValueError, ef.ConvOperator(KERNEL), torch.ones(1, 2, 4)),
    "missing batch": (ValueError, ef.ConvOperator(KERNEL), torch.ones(2, 4, 4)),
    "too small to reflect": (ValueError, REFLECT, torch.ones(1, 1, 2)),
    "too small to reflect, dilated": (ValueError, DILATED, torch.ones(1, 1, 5, 3)),
    "no pixels": (ValueError, ef.ConvOperator(KERNEL), torch.ones(1, 2, 0, 3)),
    "no pixels on the torus": (ValueError, ef.ConvOperator(KERNEL, "circular"), torch.ones(1, 2, 0, 3)),
    "wrong nodes": (ValueError, graph(torch.ones(3, 3)), torch.ones(1, 2, 1)),
    "wrong features": (ValueError, graph(torch.ones(3, 3)), torch.ones(1, 3, 2)),
    "wrong number of graphs": (ValueError, graph(torch.ones(2, 3, 3)), torch.ones(3, 3, 1)),
    "function that loses the shape": (ValueError, ef.FunctionOperator(lambda x: x[..., :1]), torch.ones(1, 2)),
    "function that loses the dtype": (TypeError, ef.FunctionOperator(lambda x: x.double()), torch.ones(1, 2)),
    "function that returns no tensor": (TypeError, ef.FunctionOperator(lambda x: 0), torch.ones(1, 2)),
}

SENTENCE = r"(?s)^Expected .+; got .+\.$"


@pytest.mark.parametrize("name", CONSTRUCTION)
def test_construction(name):
    error, make = CONSTRUCTION[name]
    with pytest.raises(error, match=SENTENCE):
        make()


@pytest.mark.parametrize("name", INPUTS)
def test_input(name):
    error, op, x = INPUTS[name]
    with pytest.raises(error, match=SENTENCE):
        op(x)
    with pytest.raises(error, match=SENTENCE):
        op.adjoint()(x)
    with pytest.raises(error, match=SENTENCE):
        ef.expm_apply(op, x, terms=2)


@pytest.mark.parametrize("method", ["trace", "norm_bound", "log_norm_bound", "dense"])
@pytest.mark.parametrize(
    ("op", "event"), [(DENSE, (3,)), (REFLECT, (1, 2)), (ef.ConvOperator(KERNEL), (3, 4, 4)), (graph(ONE), (2, 1))]
)
def test_event_shape(op, event, method):
    with pytest.raises(ValueError, match=SENTENCE):
        getattr(op, method)(event)


def test_unchecked_construction_skips_the_values_only_on_request():
    kernel = with_value(NAN, 1, 1, 3)
    assert torch.isnan(ef.ConvOperator(kernel, validate=False).kernel).any()
