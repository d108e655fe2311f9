"""What the paper proves of Sylvester flows: Theorems 2 and 3, Remarks 1 and 2."""

from __future__ import annotations

import pytest
import scipy.linalg
import torch
from torch import Tensor, nn

from expmflow import transforms as T
from expmflow.nn import ConvInner, DenseInner
from expmflow.testing import check_transform
from sylvester_cases import CASES
from transform_registry import draw, points, randomise, settle

F64 = torch.float64


class Inner(nn.Module):
    """f(u) = u Aᵀ + c tanh(u), with the diagonal that it has, or one that it only declares."""

    def __init__(self, matrix: Tensor, c: float = 0.0, declared: float = 0.0) -> None:
        super().__init__()
        self.matrix = matrix
        self.c = c
        self.declared = declared

    def forward(self, u: Tensor, context: object = None) -> tuple[Tensor, Tensor]:
        slope = self.c * (1 - torch.tanh(u) ** 2)
        return u @ self.matrix.T + self.c * torch.tanh(u), self.matrix.diagonal() + slope + self.declared


def sylvester(inner: nn.Module, features: int = 4) -> T.GeneralizedSylvester:
    torch.manual_seed(0)
    return T.GeneralizedSylvester(T.Householder(features), inner).double()


LOWER = 0.5 * draw("lower", 4, 4).tril(-1)
ORDER = [2, 0, 3, 1]


class TestTheorem2:
    """A triangular Jacobian, in some order, with a diagonal above −1."""

    @pytest.mark.parametrize("name", CASES)
    def test_our_inner_functions_pass(self, name):
        case = CASES.ready(name)
        u, _ = case.layer.basis(points(name, case))
        case.layer.check_inner(u.detach(), case.context)

    @pytest.mark.parametrize("name", ["dense-sylvester", "conv-sylvester"])
    def test_the_order_is_the_declared_one(self, name):
        """Rows, then columns, then channels of an image; none depends on a later one, each on some earlier one."""
        case = CASES.ready(name)
        u = points(name, case)[:1]
        jacobian = torch.autograd.functional.jacobian(lambda u: case.layer.inner(u)[0], u)
        jacobian = jacobian.reshape(*case.event, *case.event)
        axes = [*range(1, len(case.event)), 0]
        jacobian = jacobian.permute(*axes, *(len(case.event) + axis for axis in axes))
        d = u.numel()
        matrix = jacobian.reshape(d, d)
        assert (matrix.triu(1) == 0).all()
        assert (matrix.tril(-1).abs().amax(1)[1:] > 0).all()

    @pytest.mark.parametrize("context", [None, draw("context", 3, 2)], ids=["none", "per row"])
    def test_any_order_passes(self, context):
        for matrix in (LOWER, LOWER.T, LOWER[ORDER][:, ORDER]):
            sylvester(Inner(matrix, 0.5)).check_inner(draw("u", 3, 4), context)

    def test_cycles_are_refused(self):
        for matrix in (LOWER + LOWER.T, torch.roll(torch.eye(4, dtype=F64), 1, 0) * 0.1):
            with pytest.raises(
                ValueError, match=r"Expected a Jacobian that is triangular in some order; got a cycle in"
            ):
                sylvester(Inner(matrix - torch.diag(matrix.diagonal()))).check_inner(draw("u", 3, 4))

    @pytest.mark.parametrize("c", [-1.0, -1.5])
    def test_diagonals_at_or_below_minus_one_are_refused(self, c):
        u = draw("u", 3, 4)
        u[1, 2] = 0.0  # where the slope of tanh is 1
        with pytest.raises(ValueError, match=r"Expected a diagonal greater than -1; got -1"):
            sylvester(Inner(LOWER, c)).check_inner(u)
        sylvester(Inner(LOWER, -0.999)).check_inner(u)

    @pytest.mark.parametrize("off", [1e-3, -0.5])
    def test_diagonals_that_are_not_the_jacobians_are_refused(self, off):
        with pytest.raises(ValueError, match="Expected the declared diagonal to be the Jacobian's; got another"):
            sylvester(Inner(LOWER, 0.5, declared=off)).check_inner(draw("u", 3, 4))

    def test_each_row_is_looked_at(self):
        """Only the last row is where the diagonal is too small."""
        u = torch.full((3, 4), 5.0, dtype=F64)
        sylvester(Inner(LOWER, -1.5)).check_inner(u)
        u[2, 0] = 0.0
        with pytest.raises(ValueError, match="Expected a diagonal greater than -1"):
            sylvester(Inner(LOWER, -1.5)).check_inner(u)


class Original(nn.Module):
    """R̃ h(R u + b) with upper triangular R, R̃ and h = tanh (van den Berg et al., 2018)."""

    def __init__(self, r: Tensor, r_tilde: Tensor, b: Tensor) -> None:
        super().__init__()
        self.r, self.r_tilde, self.b = (nn.Parameter(tensor) for tensor in (r, r_tilde, b))

    def forward(self, u: Tensor, context: object = None) -> tuple[Tensor, Tensor]:
        h = torch.tanh(u @ self.r.T + self.b)
        return h @ self.r_tilde.T, self.r.diagonal() * self.r_tilde.diagonal() * (1 - h**2)


def triangular(name: str) -> Tensor:
    """Upper triangular, with a diagonal below 1 in size: the product of two stays above −1/‖h′‖ = −1."""
    matrix = draw(name, 4, 4).triu()
    return matrix.triu(1) + torch.diag(0.9 * torch.tanh(matrix.diagonal()))


R, R_TILDE, B = triangular("r"), triangular("r tilde"), draw("b", 4)


def test_theorem_3_the_original_flow_is_a_special_case():
    """z = x + Qᵀ R̃ h(R Q x + b) is the generalized flow with W = Q and f = R̃ h(R · + b)."""
    layer = sylvester(Original(R, R_TILDE, B))
    q, x = layer.basis.matrix(), draw("x", 5, 4)
    layer.check_inner(x)
    z, logdet = layer(x)
    h = torch.tanh(x @ q.T @ R.T + B)
    torch.testing.assert_close(z, x + h @ R_TILDE.T @ q, rtol=0, atol=1e-13)
    torch.testing.assert_close(logdet, torch.log1p((1 - h**2) * R.diagonal() * R_TILDE.diagonal()).sum(1))
    check_transform(layer, x)


def test_remark_1_an_invertible_matrix_adds_nothing_to_the_original_flow():
    """W = R_W Q_W turns x + W⁻¹ R̃ h(R W x + b) into the original flow with R′ = R R_W and R̃′ = R_W⁻¹ R̃."""
    w = draw("w", 4, 4)
    x = draw("x", 5, 4)
    with_w = x + torch.linalg.solve(w, (torch.tanh(x @ w.T @ R.T + B) @ R_TILDE.T).T).T
    r_w, q_w = (torch.from_numpy(part) for part in scipy.linalg.rq(w.numpy()))
    r, r_tilde = R @ r_w, torch.linalg.solve_triangular(r_w, R_TILDE, upper=True)
    for triangle in (r, r_tilde):
        torch.testing.assert_close(triangle, triangle.triu(), rtol=0, atol=1e-13)
    torch.testing.assert_close(r.diagonal() * r_tilde.diagonal(), R.diagonal() * R_TILDE.diagonal())  # as bounded
    torch.testing.assert_close(q_w @ q_w.T, torch.eye(4, dtype=F64), rtol=0, atol=1e-13)
    original = x + torch.tanh(x @ q_w.T @ r.T + B) @ r_tilde.T @ q_w
    torch.testing.assert_close(original, with_w, rtol=0, atol=1e-12)


class Residual(T.Transform):
    """u ↦ u + f(u), inverted by substitution in the basis of a Sylvester layer without a basis change."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.flow = T.GeneralizedSylvester(T.Chain([]), inner)

    def _forward(self, x, context):
        value, diagonal = self.flow.inner(x, context)
        return x + value, torch.log1p(diagonal).flatten(1).sum(1)

    def _inverse(self, z, context):
        return self.flow.inverse(z, context)


BASES = {
    "exp(M)Q": (lambda: T.Chain([T.Householder(3), T.ConvExp(3)]), lambda: ConvInner(3, 6), (3, 4, 4)),
    "conv1x1": (lambda: T.Conv1x1(3), lambda: ConvInner(3, 6), (3, 4, 4)),
    "exp(M)": (lambda: T.LinearExp(4), lambda: DenseInner(4, 8), (4,)),
}


@pytest.mark.parametrize("name", BASES)
def test_remark_2_a_basis_change_a_residual_function_and_the_inverse_basis_change(name):
    torch.manual_seed(0)
    make_basis, make_inner, event = BASES[name]
    basis, inner = make_basis(), make_inner()
    layer = T.GeneralizedSylvester(basis, inner).double()
    randomise(layer)
    x = draw("remark 2", 3, *event)
    settle(layer, x)
    layer.eval()
    composed = T.Chain([basis, Residual(inner), T.Inverse(basis)]).eval()
    for direction, other in ((layer, composed), (layer.inverse, composed.inverse)):
        z, logdet = direction(x)
        twin, twin_logdet = other(x)
        torch.testing.assert_close(z, twin, rtol=0, atol=1e-10)
        torch.testing.assert_close(logdet, twin_logdet, rtol=0, atol=1e-10)
    assert (layer(x)[0] - x).abs().max() > 0.1
