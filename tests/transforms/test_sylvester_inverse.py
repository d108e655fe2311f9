"""The inverse of a Sylvester flow: how it converges, what it says when it does not, and its gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import expmflow as ef
from expmflow import transforms as T
from expmflow.numerics.solve import triangular_fixed_point
from sylvester_cases import CASES
from transform_registry import draw, points

F64 = torch.float64


class Steep(nn.Module):
    """f(u) = c sin(k u) / k: a diagonal c cos(k u), of any sign, that changes fast."""

    def __init__(self, c: float, k: float = 1.0) -> None:
        super().__init__()
        self.c, self.k = c, k
        self.calls: list[Tensor] = []

    def forward(self, u: Tensor, context: object = None) -> tuple[Tensor, Tensor]:
        self.calls.append(u.detach().clone())
        return self.c * torch.sin(self.k * u) / self.k, self.c * torch.cos(self.k * u)


def sylvester(inner: nn.Module, **options) -> T.GeneralizedSylvester:
    return T.GeneralizedSylvester(T.Chain([]), inner, **options)


class TestFailure:
    def test_is_raised_with_the_name_the_residual_and_the_iterations(self):
        case = CASES.ready("conv-sylvester")
        x = points("conv-sylvester", case)
        z, _ = case.layer(x)
        case.layer.max_iterations = 2
        with pytest.raises(ef.ConvergenceError) as failure:
            case.layer.inverse(z)
        solution = failure.value.solution
        assert not solution.converged
        assert solution.iterations == 4  # two of each kind
        assert solution.residual > 1e-6
        message = str(failure.value)
        assert message.startswith("ConvSylvester: Expected a residual of at most 1.42109e-14")
        assert "within 4 iterations" in message
        assert f"got {solution.residual:g} in 3 of 3 rows" in message

    def test_names_a_layer_inside_others(self):
        case = CASES.ready("dense-sylvester")
        case.layer.max_iterations = 1
        with pytest.raises(ef.ConvergenceError, match=r"^DenseSylvester: "):
            T.Chain([T.Flip(), T.Inverse(case.layer)])(points("dense-sylvester", case))

    def test_residual_is_that_of_the_solution(self):
        """Verified at the value that is returned, not at the one before it."""
        inner = Steep(0.9)
        z = draw("z", 4, 6)
        layer = sylvester(inner, tol=1e-6)
        with torch.no_grad():
            u, _ = layer.inverse(z)
        assert (u + inner(u)[0] - z).abs().max() <= 1e-6 * z.abs().max().clamp_min(1)


class TestRows:
    def test_converged_rows_are_frozen(self):
        """A row that needs no work gets none: it is evaluated once, and its value is not touched again."""
        inner = Steep(0.5)
        z = torch.stack([torch.zeros(4, dtype=F64), draw("row", 4), 3 * draw("another", 4)])
        with torch.no_grad():
            x, _ = sylvester(inner).inverse(z)
        sizes = [len(call) for call in inner.calls[:-1]]  # the last one is at the solution
        assert sizes[0] == 3
        assert max(sizes[1:]) == 2
        assert sizes == sorted(sizes, reverse=True)
        assert torch.equal(x[0], z[0])

    def test_a_hard_row_does_not_change_an_easy_one(self):
        case = CASES.ready("dense-sylvester")
        z = draw("z", 2, 5)
        z[1] *= 50
        with torch.no_grad():
            together, _ = case.layer.inverse(z)
            alone, _ = case.layer.inverse(z[:1])
        torch.testing.assert_close(together[:1], alone, rtol=0, atol=1e-14)

    @pytest.mark.parametrize("name", ["dense-sylvester-context", "conv-sylvester-context"])
    def test_contexts_go_with_their_rows(self, name):
        """Rows that are still sought keep their own context when others have been found."""
        case = CASES.ready(name)
        x = points(name, case)
        with torch.no_grad():
            z, _ = case.layer(x, case.context)
            back, _ = case.layer.inverse(z, case.context)
        torch.testing.assert_close(back, x, rtol=0, atol=1e-12)

    @pytest.mark.parametrize("gain", [torch.tensor(0.7), torch.rand(4, 2)], ids=["shared", "per row"])
    def test_other_contexts_are_handed_on_as_they_are(self, gain):
        """A tuple, say a graph with its mask: the inner function sees all rows beside it, found or not."""

        class Gain(nn.Module):
            def forward(self, u, context):
                assert context[1] == "and more"
                return 0.5 * context[0] * torch.sin(u), 0.5 * context[0] * torch.cos(u)

        context, layer = (gain.to(F64), "and more"), sylvester(Gain())
        x = draw("x", 4, 2)
        x[1:3] = 0  # found at once
        with torch.no_grad():
            back, _ = layer.inverse(layer(x, context)[0], context)
        torch.testing.assert_close(back, x, rtol=0, atol=1e-13)


class TestFallback:
    """For |diag| beyond ½ dividing by 1 + diag may not converge; the plain iteration does, below 1."""

    def test_plain_iteration_takes_over(self):
        """u₂ + f₂ has slope 0.05, and 1.95 around zero: from afar each step lands as far on the other side."""

        class Kink(nn.Module):
            def forward(self, u, context):
                first, second = u.unbind(1)
                bend = torch.tanh(10 * second)
                value = torch.stack([torch.zeros_like(first), first - 0.95 * second + 0.19 * bend], dim=1)
                return value, torch.stack([torch.zeros_like(first), -0.95 + 1.9 * (1 - bend**2)], dim=1)

        inner, z = Kink(), torch.tensor([[5.0, 5.0], [0.1, 0.1]], dtype=F64)
        layer = sylvester(inner, max_iterations=900)
        layer.check_inner(z)
        with torch.no_grad():
            x, _ = layer.inverse(z)
        assert layer.last_iterations > 900  # the first kind of iteration was not enough
        torch.testing.assert_close(x + inner(x, None)[0], z, rtol=0, atol=1e-13)
        z.requires_grad_()
        assert torch.autograd.gradcheck(layer.inverse, z, fast_mode=True)

    def test_only_unsolved_rows_start_again(self):
        places = []

        def f(u: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
            places.append(rows.tolist())
            wrong = torch.where(rows == 1, -0.9, 0.5)[:, None].to(u)  # row 1 declares what makes it overshoot
            return 0.5 * u, wrong.expand_as(u)

        v = draw("v", 3, 2)
        solution = triangular_fixed_point(f, v, max_iterations=100)
        torch.testing.assert_close(solution.value, v / 1.5, rtol=0, atol=1e-13)
        assert places[0] == [0, 1, 2]
        assert all(rows == [1] for rows in places[5:])
        assert 100 < solution.iterations < 200

    def test_a_step_to_infinity_is_a_step_back_to_the_start(self):
        """1 + diag = 0 is no reason to give up."""

        def f(u: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
            return 0.5 * u, torch.full_like(u, -1.0)

        v = draw("v", 3, 2)
        solution = triangular_fixed_point(f, v, max_iterations=100)
        torch.testing.assert_close(solution.value, v / 1.5, rtol=0, atol=1e-13)
        assert solution.iterations < 100  # rows that are lost are not iterated any more

    def test_what_neither_solves_is_an_error(self):
        with pytest.raises(ef.ConvergenceError, match=r"in 2 of 2 rows"):
            triangular_fixed_point(
                lambda u, rows: (-3 * u, torch.full_like(u, 5.0)), torch.ones(2, 1), max_iterations=20
            )


def test_the_known_diagonal_saves_iterations():
    """In one dimension dividing by 1 + f′ is Newton's method."""
    z = draw("z", 50, 1)
    layer = sylvester(Steep(0.5))
    with torch.no_grad():
        layer.inverse(z)
    plain = ef.fixed_point(lambda u: 0.5 * torch.sin(u), z)
    assert layer.last_iterations <= 8
    assert plain.iterations > 4 * layer.last_iterations


class TestGradients:
    NAMES = (
        "dense-sylvester",
        "dense-sylvester-large-gamma",
        "conv-sylvester-one-channel",
        "generalized-sylvester-chain",
    )

    @pytest.mark.parametrize("name", NAMES)
    def test_in_z_and_in_every_parameter(self, name):
        case = CASES.ready(name)
        with torch.no_grad():
            z, _ = case.layer(points(name, case)[:2])
        names = [key for key, _ in case.layer.named_parameters()]

        def inverse(z: Tensor, *values: Tensor) -> tuple[Tensor, Tensor]:
            return torch.func.functional_call(_Inverse(case.layer), dict(zip(keys, values, strict=True)), (z,))

        keys = [f"layer.{key}" for key in names]
        values = [value.detach().clone().requires_grad_() for value in case.layer.parameters()]
        assert torch.autograd.gradcheck(inverse, (z.requires_grad_(), *values), fast_mode=True)

    @pytest.mark.parametrize("name", ["dense-sylvester-context", "conv-sylvester-context-vector"])
    @pytest.mark.parametrize("frozen", [True, False], ids=["frozen weights", "weights"])
    def test_in_the_context(self, name, frozen):
        case = CASES.ready(name)
        case.layer.requires_grad_(not frozen)
        with torch.no_grad():
            z, _ = case.layer(points(name, case), case.context)
        context = case.context.clone().requires_grad_()
        assert torch.autograd.gradcheck(lambda context: case.layer.inverse(z, context), context, fast_mode=True)

    def test_of_a_row_is_its_own(self):
        """A row whose gradient is 10⁻¹² times that of another is solved as well as alone."""
        case = CASES.ready("dense-sylvester")
        z = draw("z", 2, 5)
        weights = draw("weights", 2, 5) * torch.tensor([[1.0], [1e-12]], dtype=F64)

        def gradient(rows):
            start = z[rows].clone().requires_grad_()
            return torch.autograd.grad((case.layer.inverse(start)[0] * weights[rows]).sum(), start)[0]

        torch.testing.assert_close(gradient([0, 1])[1], gradient([1])[0], rtol=1e-10, atol=0)

    def test_a_second_derivative_is_refused(self):
        case = CASES.ready("dense-sylvester")
        z = draw("z", 2, 5).requires_grad_()
        x, _ = case.layer.inverse(z)
        with pytest.raises(RuntimeError, match="Expected a first derivative through an inverse"):
            torch.autograd.grad(x.square().sum(), z, create_graph=True)

    def test_iterations_are_not_recorded(self):
        """One evaluation at the solution is in the graph, however many were needed to find it."""
        inner = Steep(0.99)
        z = draw("z", 8, 3).requires_grad_()
        sylvester(inner).inverse(z)[0].sum().backward()
        assert len(inner.calls) > 6
        assert torch.isfinite(z.grad).all()


class _Inverse(nn.Module):
    def __init__(self, layer: T.Transform) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, z: Tensor) -> tuple[Tensor, Tensor]:
        return self.layer.inverse(z)
