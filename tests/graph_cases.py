"""Graph convolutions for the registry: dense, batched, masked, sparse, by edges."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
from torch import Tensor

import expmflow as ef
from heat_cases import star
from operator_registry import Cases, draw, parameter

CASES = Cases()

_RING = torch.tensor([[0, 1, 1, 2, 2, 3, 3, 0], [1, 0, 2, 1, 3, 2, 0, 3]])


def thetas(name: str, features: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return (
        parameter(name + "0", features, features, dtype=dtype, size=0.4),
        parameter(name + "1", features, features, dtype=dtype, size=0.4),
    )


def weights(name: str, *shape: int, dtype: torch.dtype, symmetric: bool = True, density: float = 1.0) -> Tensor:
    """Non-negative weights without self-loops."""
    values = draw(name, *shape, dtype=dtype)
    values = values.abs() * (values.abs() > 1 - density)
    values = values + values.mT if symmetric else values
    return values * (1 - torch.eye(shape[-1], dtype=dtype))


def adjacency(name: str) -> Callable[[Callable[[torch.dtype], Tensor]], Callable[[torch.dtype], Tensor]]:
    """Register the graph convolution of an adjacency with two features."""

    def register(make: Callable[[torch.dtype], Tensor]) -> Callable[[torch.dtype], Tensor]:
        def build(dtype: torch.dtype):
            matrix = make(dtype)
            return ef.GraphConvOperator(*thetas(name, 2, dtype), matrix), (matrix.shape[-1], 2)

        CASES.add(name)(build)
        return make

    return register


@adjacency("graph-dense")
def _(dtype: torch.dtype) -> Tensor:
    return (weights("graph-dense", 5, 5, dtype=dtype) > 0.8).to(dtype)


@adjacency("graph-weighted")
def _(dtype: torch.dtype) -> Tensor:
    return weights("graph-weighted", 5, 5, dtype=dtype).requires_grad_()


@adjacency("graph-self-loops")
def _(dtype: torch.dtype) -> Tensor:
    return weights("graph-self-loops", 4, 4, dtype=dtype) + torch.diag(torch.tensor([0.0, 1.0, 0.5, 0.0], dtype=dtype))


@adjacency("graph-isolated-nodes")
def _(dtype: torch.dtype) -> Tensor:
    keep = torch.tensor([1.0, 0.0, 1.0, 1.0, 0.0], dtype=dtype)
    return weights("graph-isolated-nodes", 5, 5, dtype=dtype) * keep * keep[:, None]


@adjacency("graph-asymmetric")
def _(dtype: torch.dtype) -> Tensor:
    return weights("graph-asymmetric", 4, 4, dtype=dtype, symmetric=False)


@adjacency("graph-asymmetric-sink")
def _(dtype: torch.dtype) -> Tensor:
    matrix = weights("graph-asymmetric-sink", 4, 4, dtype=dtype, symmetric=False)
    matrix[1] = 0  # a node with edges towards it and none from it
    return matrix


@adjacency("graph-empty")
def _(dtype: torch.dtype) -> Tensor:
    return torch.zeros(3, 3, dtype=dtype)


@adjacency("graph-batched")
def _(dtype: torch.dtype) -> Tensor:
    return weights("graph-batched", 3, 4, 4, dtype=dtype)


@adjacency("graph-batched-asymmetric")
def _(dtype: torch.dtype) -> Tensor:
    return weights("graph-batched-asymmetric", 2, 4, 4, dtype=dtype, symmetric=False)


@adjacency("graph-sparse")
def _(dtype: torch.dtype) -> Tensor:
    return weights("graph-sparse", 6, 6, dtype=dtype, density=0.4).to_sparse()


@adjacency("graph-sparse-csr-asymmetric")
def _(dtype: torch.dtype) -> Tensor:
    matrix = weights("graph-sparse-csr-asymmetric", 4, 4, dtype=dtype, symmetric=False, density=0.5)
    return csr(matrix + torch.diag(torch.tensor([0.5, 0.0, 0.0, 1.0], dtype=dtype)))


def csr(matrix: Tensor) -> Tensor:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Sparse CSR tensor support is in beta state")
        return matrix.to_sparse_csr()


@CASES.add("graph-masked")
def _(dtype: torch.dtype):
    mask = torch.tensor([[True, True, False, False], [True, True, True, True], [True, True, True, False]])
    graph = weights("graph-masked", 3, 4, 4, dtype=dtype)
    return ef.GraphConvOperator(*thetas("graph-masked", 2, dtype), graph, mask=mask), (4, 2)


@CASES.add("graph-masked-shared")
def _(dtype: torch.dtype):
    mask = torch.tensor([[True, False, True], [True, True, True]])
    graph = weights("graph-masked-shared", 3, 3, dtype=dtype) + torch.eye(3, dtype=dtype)
    return ef.GraphConvOperator(*thetas("graph-masked-shared", 1, dtype), graph, mask=mask), (3, 1)


@CASES.add("graph-masked-contractive")
def _(dtype: torch.dtype):
    mask = torch.tensor([[True, True, False], [True, True, True]])
    theta0 = (-2 * torch.eye(2, dtype=dtype)).requires_grad_()
    theta1 = (0.5 * torch.eye(2, dtype=dtype)).requires_grad_()
    return ef.GraphConvOperator(theta0, theta1, torch.ones(3, 3, dtype=dtype), mask=mask), (3, 2)


@CASES.add("graph-theta-per-row")
def _(dtype: torch.dtype):
    theta0 = parameter("graph-theta-per-row0", 3, 2, 2, dtype=dtype, size=0.4)
    theta1 = parameter("graph-theta-per-row1", 3, 2, 2, dtype=dtype, size=0.4)
    return ef.GraphConvOperator(theta0, theta1, weights("graph-theta-per-row", 4, 4, dtype=dtype)), (4, 2)


@CASES.add("graph-theta-per-row-mixed")
def _(dtype: torch.dtype):
    theta0 = parameter("graph-theta-per-row-mixed0", 2, 2, dtype=dtype, size=0.4)
    theta1 = parameter("graph-theta-per-row-mixed1", 2, 2, 2, dtype=dtype, size=0.4)
    graph = weights("graph-theta-per-row-mixed", 2, 3, 3, dtype=dtype, symmetric=False)
    mask = torch.tensor([[True, True, False], [True, True, True]])
    return ef.GraphConvOperator(theta0, theta1, graph, mask=mask), (3, 2)


@CASES.add("graph-theta-per-row-sparse")
def _(dtype: torch.dtype):
    theta0 = parameter("graph-theta-per-row-sparse0", 2, 2, 2, dtype=dtype, size=0.4)
    theta1 = parameter("graph-theta-per-row-sparse1", 2, 2, dtype=dtype, size=0.4)
    return ef.GraphConvOperator.from_edge_index(theta0, theta1, _RING, 4), (4, 2)


@CASES.add("graph-edges")
def _(dtype: torch.dtype):
    return ef.GraphConvOperator.from_edge_index(*thetas("graph-edges", 3, dtype), _RING, 4), (4, 3)


@CASES.add("graph-edges-weighted")
def _(dtype: torch.dtype):
    # weights with a gradient, parallel edges, a self-loop, one direction only, and two isolated nodes
    edges = torch.tensor([[0, 0, 1, 2, 2, 3], [1, 1, 0, 2, 3, 0]])
    weight = draw("graph-edges-weighted", 6, dtype=dtype).abs().requires_grad_()
    return ef.GraphConvOperator.from_edge_index(*thetas("graph-edges-weighted", 2, dtype), edges, 6, weight), (6, 2)


@CASES.add("graph-edges-none")
def _(dtype: torch.dtype):
    return ef.GraphConvOperator.from_edge_index(*thetas("graph-edges-none", 2, dtype), _RING[:, :0], 3), (3, 2)


@CASES.add("graph-laplacian")
def _(dtype: torch.dtype):
    one = torch.ones(1, 1, dtype=dtype)
    return ef.GraphConvOperator(-one, one, weights("graph-laplacian", 5, 5, dtype=dtype)), (5, 1)


@CASES.add("graph-hub")
def _(dtype: torch.dtype):
    return ef.GraphConvOperator.from_edge_index(*thetas("graph-hub", 1, dtype), star(70), 70), (70, 1)


@CASES.add("graph-hub-weighted")
def _(dtype: torch.dtype):
    # directed, so that the adjoint adds other rows
    edges = star(40)[:, :60]
    weight = draw("graph-hub-weighted", 60, dtype=dtype).abs().requires_grad_()
    return ef.GraphConvOperator.from_edge_index(*thetas("graph-hub-weighted", 1, dtype), edges, 40, weight), (40, 1)


@CASES.add("graph-hub-diffusion")
def _(dtype: torch.dtype):
    theta0, theta1 = -torch.ones(1, 1, dtype=dtype), torch.ones(1, 1, dtype=dtype, requires_grad=True)
    return ef.GraphConvOperator.from_edge_index(theta0.requires_grad_(), theta1, star(50), 50), (50, 1)
