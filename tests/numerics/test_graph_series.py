"""Exponentials of convolutions on undirected sparse graphs: the same promise by fewer products, the same gradients."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import expmflow as ef
from expmflow.numerics import graph_series
from expmflow.numerics.graph_series import apply_graph_series, has_graph_series
from reference import expm_product, graph_matrix, normalised_adjacency

NODES, FEATURES = 12, 3
NORMS = [0.0, 1e-3, 0.5, 3.0, 10.0, 50.0]
DEFAULT = {torch.float64: 1e-14, torch.float32: 1e-6}


def graph(*, symmetric: bool = True) -> Tensor:
    """Weights of a random graph with a self-loop and a node without edges."""
    weights = torch.rand(NODES, NODES, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    weights = torch.triu(weights * (weights > 0.6))
    weights[3, 3], weights[5], weights[:, 5] = 0.7, 0, 0
    return weights + weights.T if symmetric else weights


def edges_of(adjacency: Tensor) -> tuple[Tensor, Tensor]:
    places = adjacency.nonzero().T
    return places, adjacency[places[0], places[1]]


def operator(theta0: Tensor, theta1: Tensor, adjacency: Tensor) -> ef.GraphConvOperator:
    edge_index, weight = edges_of(adjacency)
    return ef.GraphConvOperator.from_edge_index(theta0, theta1, edge_index, len(adjacency), weight.to(theta0.dtype))


def general() -> tuple[Tensor, Tensor]:
    theta0, theta1 = torch.randn(2, FEATURES, FEATURES, generator=torch.Generator().manual_seed(1)).double()
    return theta0, theta1


def skew() -> tuple[Tensor, Tensor]:
    theta0, theta1 = general()
    return theta0 - theta0.T, theta1 - theta1.T


def diffusion() -> tuple[Tensor, Tensor]:
    """Minus the Laplacian: what the power series loses most digits on."""
    return -torch.eye(FEATURES).double(), torch.eye(FEATURES).double()


def far_from_normal() -> tuple[Tensor, Tensor]:
    theta0, theta1 = general()
    return theta0.triu() + theta0.triu(1), theta1.triu(1)


def alone() -> tuple[Tensor, Tensor]:
    """Neighbours do not count."""
    return general()[0], torch.zeros(FEATURES, FEATURES).double()


KINDS = {f.__name__: f for f in (general, skew, diffusion, far_from_normal, alone)}


def with_norm(kind: str, norm: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    thetas = torch.stack(KINDS[kind]())
    theta0, theta1 = (thetas * norm / torch.linalg.matrix_norm(thetas, ord=2).sum()).to(dtype)
    return theta0, theta1


@pytest.mark.parametrize("dtype", DEFAULT)
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("kind", KINDS)
def test_certificate(kind, norm, dtype):
    """error ≤ tol · e^{max(μ, 0)} · ‖x‖, or what the power series can hold, by no more products than it takes."""
    op = operator(*with_norm(kind, norm, dtype), graph())
    assert has_graph_series(op)
    event = (NODES, FEATURES)
    x = torch.randn(2, *event, generator=torch.Generator().manual_seed(2)).to(dtype)
    rounded = op.graph.matmul(torch.eye(NODES, dtype=dtype)[None])[0].double()  # Â as this very operator holds it
    exact = expm_product(graph_matrix(op.theta0.double(), op.theta1.double(), rounded), x.double().flatten(1))
    growth = math.exp(max(float(op.log_norm_bound(event)), 0.0))
    for tol in (None, 1e-2, 1e-5):
        plan = ef.plan_series(op.norm_bound(event), tol, dtype, log_norm=op.log_norm_bound(event))
        allowed = max(DEFAULT[dtype] if tol is None else tol, plan.error_bound)
        off = (ef.expm_apply(op, x, tol=tol).double().flatten(1) - exact).norm(dim=1)
        assert bool((off <= allowed * growth * x.double().flatten(1).norm(dim=1)).all())
        assert products(op, x, tol) <= max(plan.products, 1)


@pytest.mark.parametrize("dtype", DEFAULT)
@pytest.mark.parametrize("norm", [0.02, 0.05, 0.12, 0.5, 1.0, 5.0, 30.0])
@pytest.mark.parametrize("kind", KINDS)
def test_at_tolerance_zero_the_error_is_the_stated_one(kind, norm, dtype):
    """On random, constant and alternating features, in extended precision: what the power series' plan states."""
    op = operator(*with_norm(kind, norm, dtype), graph())
    event, generator = (NODES, FEATURES), torch.Generator().manual_seed(3)
    signs = 1.0 - 2 * (torch.arange(NODES * FEATURES) % 2).reshape(event)
    x = torch.stack([torch.randn(event, generator=generator), torch.ones(event), signs]).to(dtype)
    rounded = op.graph.matmul(torch.eye(NODES, dtype=dtype)[None])[0].double()
    exact = expm_product(graph_matrix(op.theta0.double(), op.theta1.double(), rounded), x.flatten(1))
    log_norm = op.log_norm_bound(event)
    plan = ef.plan_series(op.norm_bound(event), 0.0, dtype, log_norm=log_norm)
    size = plan.error_bound * math.exp(max(float(log_norm), 0.0)) * x.double().flatten(1).norm(dim=1)
    for values in (x, x.clone().requires_grad_()):
        off = (ef.expm_apply(op, values, tol=0.0).detach().double().flatten(1) - exact).norm(dim=1)
        assert bool((off <= size).all())


def products(op: ef.GraphConvOperator, x: Tensor, tol: float | None) -> int:
    """With the adjacency, that a call takes."""
    asked = max(DEFAULT[x.dtype] if tol is None else tol, torch.finfo(x.dtype).eps / 2)
    return len(graph_series._coefficients(op, asked, 0, x.dtype)) - 1


def test_diffusion_takes_the_root_of_what_the_power_series_takes():
    x = torch.ones(1, NODES, FEATURES, dtype=torch.float64)
    for t, most in ((20.0, 40), (80.0, 80), (320.0, 160)):
        op = operator(*with_norm("diffusion", 2 * t, torch.float64), graph())
        assert most / 2 < products(op, x, None) <= most
        assert ef.plan_series(op.norm_bound(x.shape[1:]), None, torch.float64).products > 10 * most


@pytest.mark.parametrize("kind", KINDS)
def test_coefficients_are_those_of_the_exponential(kind):
    """Σ_k T_k(λ) C_k = exp(θ0 + λθ1), between the points at which it was computed too; and they fall as promised."""
    theta0, theta1 = with_norm(kind, 3.0, torch.float64)
    op = operator(theta0, theta1, graph())
    coefficients = graph_series._coefficients(op, 1e-14, 0, torch.float64)
    for angle in torch.linspace(0, math.pi, 23, dtype=torch.float64):
        waves = torch.cos(angle * torch.arange(len(coefficients)))
        found = (waves[:, None, None] * coefficients).sum(0)
        torch.testing.assert_close(found, torch.matrix_exp(theta0 + angle.cos() * theta1), rtol=0, atol=1e-12)
    half = float(torch.linalg.matrix_norm(theta1)) / 2
    for k, coefficient in enumerate(coefficients):
        bound = 2 * math.exp(float(torch.linalg.matrix_norm(theta0)) + half**2 / (k + 1)) * half**k / math.factorial(k)
        assert float(torch.linalg.matrix_norm(coefficient, ord=2)) <= bound + 1e-14


@pytest.mark.parametrize("gradient", ["autograd", "recompute"])
def test_gradients_are_those_of_the_dense_graph(gradient):
    """In x, θ0, θ1, the time, and each edge by itself: a directed step away from an undirected graph."""
    adjacency = graph()
    edge_index, weight = edges_of(adjacency)
    theta0, theta1 = with_norm("general", 2.0, torch.float64)
    inputs = [torch.randn(2, NODES, FEATURES).double(), theta0, theta1, torch.tensor(0.7).double()]
    g = torch.randn(2, NODES, FEATURES).double()

    def gradients(sparse: bool) -> list[Tensor]:
        x, a, b, t, w = (value.clone().requires_grad_() for value in (*inputs, weight))
        if sparse:
            op = ef.GraphConvOperator.from_edge_index(a, b, edge_index, NODES, w)
            assert has_graph_series(op)
        else:
            op = ef.GraphConvOperator(a, b, torch.zeros_like(adjacency).index_put(tuple(edge_index), w))
        z = ef.expm_apply(op, x, t, gradient=gradient if sparse else "autograd")
        return [z.detach(), *torch.autograd.grad((z * g).sum(), (x, a, b, t, w))]

    for found, expected in zip(gradients(sparse=True), gradients(sparse=False), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_second_derivatives():
    edge_index, _ = edges_of(graph()[:5, :5])
    theta0, theta1 = torch.randn(2, 2, 2).double().requires_grad_().unbind()
    x = torch.randn(1, 5, 2).double().requires_grad_()

    def apply(x: Tensor, theta0: Tensor, theta1: Tensor) -> Tensor:
        op = ef.GraphConvOperator.from_edge_index(theta0, theta1, edge_index, 5)
        return ef.expm_apply(op, x, gradient="autograd")

    assert torch.autograd.gradgradcheck(apply, (x, theta0, theta1))


@pytest.mark.parametrize("recording", [False, True])
def test_each_graph_of_the_batch_may_have_its_own_matrices(recording):
    theta0, theta1 = (torch.randn(3, 2, 2).double() for _ in range(2))
    adjacency, x = graph(), torch.randn(3, NODES, 2).double().requires_grad_(recording)
    together = ef.expm_apply(operator(theta0, theta1, adjacency), x)
    for k in range(3):
        alone = ef.expm_apply(operator(theta0[k], theta1[k], adjacency), x[k : k + 1])
        torch.testing.assert_close(together[k : k + 1], alone, rtol=0, atol=1e-12)


def test_forwards_and_backwards():
    op = operator(*with_norm("general", 3.0, torch.float64), graph())
    x = torch.randn(4, NODES, FEATURES).double()
    torch.testing.assert_close(ef.expm_apply(-op, ef.expm_apply(op, x)), x, rtol=0, atol=1e-12)


def test_fixed_terms_are_the_papers_series():
    op = operator(*with_norm("general", 3.0, torch.float64), graph())
    x = torch.randn(1, NODES, FEATURES).double()
    torch.testing.assert_close(ef.expm_apply(op, x, terms=2), x + op(x) + op(op(x)) / 2)


class TestWhereItDoesNotHold:
    def test_directed_graphs_have_the_power_series(self):
        theta0, theta1 = with_norm("general", 2.0, torch.float64)
        op = operator(theta0, theta1, graph(symmetric=False))
        assert not has_graph_series(op)
        x = torch.randn(1, NODES, FEATURES).double()
        matrix = graph_matrix(theta0, theta1, normalised_adjacency(graph(symmetric=False)))
        torch.testing.assert_close(ef.expm_apply(op, x).flatten(1), expm_product(matrix, x.flatten(1)))

    def test_an_edge_that_changes_is_noticed(self):
        """Â is written into; the operator has answered before."""
        op = operator(*with_norm("general", 1.0, torch.float64), graph())
        assert has_graph_series(op)
        op.graph.values[1] *= 1.5
        assert not has_graph_series(op)

    def test_norms_beyond_all_measure_have_the_power_series(self):
        op = operator(*with_norm("diffusion", 4000.0, torch.float64), graph())
        x = torch.rand(1, NODES, FEATURES).double()
        assert apply_graph_series(op, x, None, keep=True) is None
        z = ef.expm_apply(op, x, tol=1e-3)
        assert bool((z >= -1e-3 * x.norm()).all())  # heat stays heat
        assert float(z.norm()) <= float(x.norm())

    def test_what_overflows_has_the_power_series(self):
        op = operator(torch.eye(1).double() * 800, torch.eye(1).double(), graph())
        assert apply_graph_series(op, torch.ones(1, NODES, 1).double(), None, keep=True) is None

    def test_matrices_that_are_not_finite_are_refused(self):
        theta0, theta1 = with_norm("general", 1.0, torch.float64)
        op = operator(theta0, theta1, graph())
        theta1[0, 0] = math.nan
        for learns in (False, True):
            x = torch.ones(1, NODES, FEATURES).double().requires_grad_(learns)
            with pytest.raises(ValueError, match="Expected the operator's parameters to be finite"):
                ef.expm_apply(op, x)

    @pytest.mark.parametrize("nodes", [0, 1, 2])
    def test_graphs_without_edges_multiply_by_a_matrix(self, nodes):
        theta0, theta1 = torch.randn(2, 2, 2).double()
        op = ef.GraphConvOperator.from_edge_index(theta0, theta1, torch.zeros(2, 0, dtype=torch.int64), nodes)
        x = torch.randn(3, nodes, 2).double()
        torch.testing.assert_close(ef.expm_apply(op, x), x @ torch.matrix_exp(theta0), rtol=0, atol=1e-13)


def test_what_was_found_out_is_kept_while_the_weights_stay(monkeypatch):
    theta0, theta1 = with_norm("general", 1.0, torch.float64)
    op = operator(theta0, theta1, graph())
    x, calls = torch.randn(1, NODES, FEATURES).double(), []
    compute = graph_series._coefficients
    monkeypatch.setattr(graph_series, "_coefficients", lambda *a: calls.append(a) or compute(*a))
    first = ef.expm_apply(op, x)
    assert torch.equal(ef.expm_apply(op, x), first)
    assert len(calls) == 1
    theta0.mul_(2.0)
    assert not torch.equal(ef.expm_apply(op, x), first)
    assert len(calls) == 2


def test_a_call_in_inference_mode_leaves_nothing_behind_that_training_cannot_use():
    graph_series._interpolation.cache_clear()
    theta0, theta1 = with_norm("general", 1.0, torch.float64)
    x = torch.randn(1, NODES, FEATURES).double()
    with torch.inference_mode():
        ef.expm_apply(operator(theta0.clone(), theta1.clone(), graph()), x)
    op = operator(theta0.requires_grad_(), theta1.requires_grad_(), graph())
    with torch.inference_mode():
        ef.expm_apply(op, x)
    for values in (x, x.clone().requires_grad_()):
        ef.expm_apply(op, values).sum().backward()
    assert bool(theta1.grad.isfinite().all())


def test_the_input_is_not_written_to():
    op = operator(*with_norm("general", 3.0, torch.float64), graph())
    for batch in (1, 3):
        x = torch.randn(batch, NODES, FEATURES).double()
        before = x.clone()
        z = ef.expm_apply(op, x)
        assert torch.equal(x, before)
        assert z.data_ptr() != x.data_ptr()
