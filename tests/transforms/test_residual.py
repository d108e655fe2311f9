"""Residual blocks: the norms of their networks, the random log-determinant and its gradient, where draws come from."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor

import expmflow as ef
from expmflow import nn
from expmflow import transforms as T
from expmflow.data import two_moons
from expmflow.nn.constraints import constant_constraints
from expmflow.transforms.residual import _at_least
from residual_cases import CASES
from transform_registry import draw, points, randomise, settle

F64 = torch.float64
BLOCKS = [name for name in CASES if name.startswith("residual-")]


def trained_like(net: torch.nn.Module, event: tuple[int, ...], coeff: float = 0.98, **options) -> T.ResidualBlock:
    """A block whose weights are at their norm limits."""
    torch.manual_seed(0)
    block = T.ResidualBlock(net, coeff, **options).double()
    randomise(block)
    settle(block, draw("settle", 2, *event), rounds=60)
    return block


def stretching(**options) -> T.ResidualBlock:
    """A block on vectors with a Jacobian whose trace is far from zero."""
    torch.manual_seed(0)
    block = T.ResidualBlock(nn.LipschitzMLP(3, (6,)), **options).double()
    with torch.no_grad():
        for linear in (block.net.chain[0], block.net.chain[2]):
            weight = linear.parametrizations.weight.original
            weight.copy_(3 * torch.eye(*weight.shape) + 0.5 * torch.randn_like(weight))
    settle(block, draw("settle", 2, 3), rounds=60)
    return block


def estimating(name: str):
    """A case of the registry with the random log-determinant."""
    case = CASES.ready(name)
    case.layer.logdet = "estimate"
    return case, points(name, case)


REFUSED = {
    "coeff": (lambda: T.ResidualBlock(nn.LipschitzMLP(2), 1.0), "coeff between 0 and 1"),
    "an activation that expands": (
        lambda: T.ResidualBlock(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.GELU())),
        "activations that do not expand",
    ),
    "a network of unknown parts": (lambda: T.ResidualBlock(nn.MLP(2, 2)), "a network of convolutions"),
    "nothing to constrain": (lambda: T.ResidualBlock(torch.nn.Tanh()), "a Lipschitz constant of at most 0.98"),
    "padding": (
        lambda: T.ResidualBlock(torch.nn.Sequential(torch.nn.Conv2d(2, 2, 3, padding=1, padding_mode="replicate"))),
        "padding_mode zeros or circular",
    ),
    "padding that repeats entries": (
        lambda: T.ResidualBlock(
            torch.nn.Sequential(
                torch.nn.Conv2d(2, 2, 1, padding=1, padding_mode="circular"), torch.nn.Conv2d(2, 2, 3, padding=0)
            )
        ),
        "circular padding that keeps the size",
    ),
    "logdet": (lambda: T.ResidualBlock(nn.LipschitzMLP(2), logdet="power"), "logdet to be one of"),
    "rate": (lambda: T.ResidualBlock(nn.LipschitzMLP(2), rate=0.0), "a positive rate"),
    "terms": (lambda: T.ResidualBlock(nn.LipschitzMLP(2), training_terms=0), "training_terms of at least 1"),
    "even kernel": (lambda: nn.LipschitzConvNet(2, 4, kernel_sizes=(2, 3)), "odd kernel_sizes"),
    "one convolution": (lambda: nn.LipschitzConvNet(2, 4, kernel_sizes=(3,)), "at least two convolutions"),
    "hidden": (lambda: nn.LipschitzMLP(2, ()), "at least one hidden layer"),
    "width": (lambda: nn.TriangularConvInner(2, width=0), "width of at least 1"),
}


class TestNorms:
    @pytest.mark.parametrize("name", BLOCKS)
    def test_constants_are_certified_and_reached(self, name):
        """The product of the norms at all frequencies is the coefficient, for weights that would exceed it."""
        layer = CASES.ready(name).layer
        assert layer.lipschitz_bound() == pytest.approx(layer.coeff, rel=1e-9)

    def test_constants_do_not_lag_behind_the_weights(self):
        """Steps so large that one round of power iteration a step would be lost: averages of weights among them."""
        torch.manual_seed(0)
        block = T.ResidualBlock(nn.LipschitzConvNet(2, 12))
        x, average = torch.randn(8, 2, 6, 6), copy.deepcopy(block)
        optimizer = torch.optim.Adam(block.parameters(), lr=0.1)
        for _ in range(10):
            z, logdet = block(x)
            assert block.lipschitz_bound() <= 0.98 * (1 + 1e-5)
            (z.square().sum() / 2 - logdet.sum()).backward()
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            for mean, last in zip(average.parameters(), block.parameters(), strict=True):
                mean.lerp_(last, 0.5)
            average.eval()(x)
        assert average.lipschitz_bound() <= 0.98 * (1 + 1e-5)

    @pytest.mark.parametrize("name", BLOCKS)
    def test_distances_shrink(self, name):
        case = CASES.ready(name)
        x, y = draw("x", 3, *case.event), draw("y", 3, *case.event)
        with torch.no_grad():
            apart = (case.layer._g(x, case.context) - case.layer._g(y, case.context)).flatten(1).norm(dim=1)
        assert (apart <= case.layer.coeff * (x - y).flatten(1).norm(dim=1)).all()

    def test_bound_of_a_convolution_is_that_of_its_matrix(self):
        kernel = draw("kernel", 3, 2, 3, 3)
        constraint = nn.SpectralConstraint(kernel, 1e9)
        units = torch.eye(2 * 24 * 24, dtype=F64).reshape(-1, 2, 24, 24)
        wrapped = torch.nn.functional.pad(units, (1, 1, 1, 1), mode="circular")
        true = torch.linalg.matrix_norm(torch.nn.functional.conv2d(wrapped, kernel).flatten(1), 2)
        assert true <= constraint.norm_bound(kernel) <= 1.05 * true

    @pytest.mark.parametrize("sharpness", [-800.0, -5.0, 0.5, 8.0])
    def test_lipswish_does_not_expand(self, sharpness):
        layer = nn.LipSwish().double()
        with torch.no_grad():
            layer.sharpness.fill_(sharpness)
        x = torch.linspace(-30, 30, 5001, dtype=F64).mul(3.0).requires_grad_()
        beta = torch.nn.functional.softplus(layer.sharpness)
        y = layer(x)
        torch.testing.assert_close(y, x * torch.sigmoid(beta * x) / 1.1)
        (slope,) = torch.autograd.grad(y.sum(), x)
        assert slope.abs().max() <= 1

    @pytest.mark.parametrize("sharpness", [-50.0, -95.0, -104.0, -800.0])
    def test_lipswish_is_linear_where_its_sharpness_vanishes(self, sharpness):
        """Below −103 softplus is zero in float32, and its products with small numbers have no digits before."""
        layer = nn.LipSwish()
        with torch.no_grad():
            layer.sharpness.fill_(sharpness)
        x = torch.tensor([-100.0, -1.0, -1e-3, 0.0, 1e-3, 3.0]).requires_grad_()
        y = layer(x)
        (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        torch.testing.assert_close(y, x / 2.2, rtol=1e-6, atol=0)
        torch.testing.assert_close(slope, torch.full_like(x, 1 / 2.2), rtol=1e-6, atol=0)
        grads = torch.autograd.grad(y.sum() + slope.sum(), [x, layer.sharpness])
        assert all(torch.isfinite(grad).all() for grad in grads)

    def test_convolutions_behind_a_squeeze(self):
        """The first of them sees other channels than the block."""
        parts = torch.nn.Conv2d(4, 5, 1), torch.nn.Tanh(), torch.nn.Conv2d(5, 4, 3, padding=1)
        net = torch.nn.Sequential(torch.nn.PixelUnshuffle(2), *parts, torch.nn.PixelShuffle(2))
        block, x = trained_like(net, (1, 2, 4), logdet="exact").eval(), draw("x", 3, 1, 2, 4)
        z, logdet = block(x)
        back, logdet_back = block.inverse(z)
        torch.testing.assert_close(back, x, rtol=0, atol=1e-12)
        torch.testing.assert_close(logdet_back, -logdet, rtol=0, atol=1e-12)
        for event, message in (((2, 2, 4), "4 channels and 2 axes; got"), ((1, 3, 4), "events that PixelUnshuffle")):
            with pytest.raises(ValueError, match=rf"^ResidualBlock: Expected .*{message}"):
                block(draw("x", 1, *event))

    @pytest.mark.parametrize("first", [(), (torch.nn.Flatten(),)])
    def test_a_network_that_writes_into_its_input(self, first):
        """Activations in place, also in front: neither the block's input nor its Jacobian changes by that."""
        torch.manual_seed(0)
        plain, in_place = (
            torch.nn.Sequential(
                *first,
                torch.nn.ELU(inplace=on),
                torch.nn.Linear(3, 6),
                torch.nn.ReLU(inplace=on),
                torch.nn.Linear(6, 3),
            )
            for on in (False, True)
        )
        in_place.load_state_dict(plain.state_dict())
        expected, block = (T.ResidualBlock(net, logdet="exact").double().eval() for net in (plain, in_place))
        x, scale = draw("x", 4, 3), torch.tensor(2.0, dtype=F64, requires_grad=True)
        before = scale * x
        z, logdet = block(before)
        torch.testing.assert_close((z, logdet), expected(2 * x), rtol=0, atol=1e-12)
        assert torch.equal(before, 2 * x)
        given = z.detach().clone()
        torch.testing.assert_close(block.inverse(given)[0], 2 * x, rtol=0, atol=1e-12)
        assert torch.equal(given, z)

    def test_a_part_that_states_its_constant_counts(self):
        class Half(torch.nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                return x.sin() / 2

            def lipschitz_bound(self) -> float:
                return 0.5

        block = trained_like(torch.nn.Sequential(torch.nn.Linear(3, 3), Half()), (3,), 0.9)
        assert block.lipschitz_bound() == pytest.approx(0.9)
        assert torch.linalg.matrix_norm(block.net[0].weight.detach(), 2) == pytest.approx(1.8)
        alone = T.ResidualBlock(Half(), logdet="exact")
        x = draw("x", 2, 4)
        z, logdet = alone(x)
        torch.testing.assert_close(z, x + x.sin() / 2)
        torch.testing.assert_close(logdet, (x.cos() / 2).log1p().sum(1))
        torch.testing.assert_close(alone.inverse(z)[0], x)

    @pytest.mark.parametrize("name", REFUSED)
    def test_refusals(self, name):
        make, message = REFUSED[name]
        with pytest.raises(ValueError, match=f"^Expected .*{message}.*; got "):
            make()

    def test_a_network_belongs_to_one_block(self):
        net = nn.LipschitzMLP(2)
        T.ResidualBlock(net)
        with pytest.raises(ValueError, match="weights are not constrained yet"):
            T.ResidualBlock(net)

    def test_a_network_that_changes_the_shape(self):
        block = T.ResidualBlock(torch.nn.Sequential(torch.nn.Linear(3, 2)))
        with pytest.raises(ValueError, match=r"^ResidualBlock: Expected a network that gives the shape \(1, 3\) back"):
            block(torch.zeros(1, 3))


class TestEstimate:
    DRAWS = 2000

    def test_probabilities(self):
        """P(N ≥ k), where one minus a sum would have no digits left."""
        assert _at_least(0, 2.0) == 1
        assert _at_least(1, 2.0) == pytest.approx(1 - torch.exp(torch.tensor(-2.0, dtype=F64)).item())
        poisson = torch.distributions.Poisson(torch.tensor(2.0, dtype=F64))
        tail = poisson.log_prob(torch.arange(30, 60, dtype=F64)).exp().sum().item()
        assert _at_least(30, 2.0) == pytest.approx(tail, rel=1e-10)

    def test_mean_is_the_exact_one_and_so_is_that_of_the_gradient(self):
        """Within four standard errors, in every entry; each draw has its own number of terms and its own signs."""
        block = stretching().train()
        x = draw("x", 1, 3)

        def value_and_gradient() -> Tensor:
            start = x.clone().requires_grad_()
            logdet = block(start)[1].sum()
            grads = torch.autograd.grad(logdet, [start, *block.parameters()], materialize_grads=True)
            return torch.cat([logdet.detach().reshape(1), *(grad.flatten() for grad in grads)])

        torch.manual_seed(1)
        drawn = torch.stack([value_and_gradient() for _ in range(self.DRAWS)])
        block.logdet = "exact"
        self.check_mean(drawn, value_and_gradient())

    def test_mean_in_evaluation(self):
        """There the number of terms is drawn for each row: as many draws as rows, with the gradient in each row."""
        block = stretching(evaluation_terms=3).eval()
        x = draw("x", 1, 3)

        def value_and_gradient(rows: int) -> Tensor:
            start = x.repeat(rows, 1).requires_grad_()
            logdet = block(start)[1]
            (grad,) = torch.autograd.grad(logdet.sum(), start)
            return torch.cat([logdet.detach().unsqueeze(1), grad], dim=1)

        torch.manual_seed(1)
        drawn = value_and_gradient(self.DRAWS)
        block.logdet = "exact"
        self.check_mean(drawn, value_and_gradient(1)[0])

    def check_mean(self, drawn: Tensor, exact: Tensor) -> None:
        error, tolerance = (drawn.mean(0) - exact).abs(), 4 * drawn.std(0) / self.DRAWS**0.5
        assert (error <= tolerance + 1e-12).all()
        assert exact[0].abs() > 2 * tolerance[0]  # and it is not nothing
        assert drawn[:, 0].std() > 1e-3

    def test_images(self):
        """The paper's network: rows of one batch that differ in what they draw alone, and the gradient of each."""
        block = trained_like(nn.LipschitzConvNet(2, 6), (2, 4, 3), evaluation_terms=2).eval()
        x = draw("x", 1, 2, 4, 3)

        def value_and_gradient(rows: int) -> Tensor:
            start = x.repeat(rows, 1, 1, 1).requires_grad_()
            logdet = block(start)[1]
            (grad,) = torch.autograd.grad(logdet.sum(), start)
            return torch.cat([logdet.detach().unsqueeze(1), grad.flatten(1)], dim=1)

        torch.manual_seed(0)
        drawn = value_and_gradient(self.DRAWS)
        block.logdet = "exact"
        self.check_mean(drawn, value_and_gradient(1)[0])

    @pytest.mark.parametrize("name", BLOCKS)
    def test_value_is_the_estimate_and_not_what_carries_the_gradient(self, name):
        case, x = estimating(name)
        for training in (True, False):
            case.layer.train(training)
            found = []
            for record in (True, False):
                with (
                    constant_constraints(),
                    T.keyed_draws(case.layer, "a", range(len(x))),
                    torch.set_grad_enabled(record),
                ):
                    found.append(case.layer(x, case.context)[1])
            assert found[0].requires_grad
            assert not found[1].requires_grad
            torch.testing.assert_close(found[0].detach(), found[1], rtol=0, atol=1e-13)

    def test_is_the_power_series(self):
        """With signs known, value and gradient are sums that can be written down."""
        block = trained_like(torch.nn.Sequential(torch.nn.Linear(4, 4)), (4,), 0.8, evaluation_terms=400, rate=1e-9)
        block.eval()
        matrix = block.net[0].weight.detach()
        x = draw("x", 1, 4)
        with T.keyed_draws(block, "a", [0]):
            v = T.residual.signs(block, x)[0]
            logdet = block(x)[1]
        logarithm = torch.zeros(4, 4, dtype=F64)
        power = torch.eye(4, dtype=F64)
        for k in range(1, 401):
            power = power @ matrix
            logarithm -= (-1) ** k / k * power
        torch.testing.assert_close(logdet[0].detach(), v @ logarithm @ v)
        original = block.net[0].parametrizations.weight.original
        neumann = torch.linalg.solve((torch.eye(4, dtype=F64) + matrix).T, v)  # vᵀ(I + J)⁻¹ = Σ (−1)ᵏ vᵀJᵏ
        (expected,) = torch.autograd.grad(neumann @ block.net[0].weight @ v, original)
        (grad,) = torch.autograd.grad(logdet.sum(), original)
        torch.testing.assert_close(grad, expected)
        assert grad.abs().max() > 1e-3

    def test_memory_does_not_grow_with_the_terms(self):
        """What autograd keeps for the backward pass is the same for two terms and for forty."""
        held = []
        for terms in (2, 40):
            block = trained_like(nn.LipschitzConvNet(2, 6), (2, 4, 4), training_terms=terms).train()
            x, sizes = draw("x", 3, 2, 4, 4), []

            def keep(tensor: Tensor, sizes=sizes) -> Tensor:
                sizes.append(tensor.numel())
                return tensor

            with T.keyed_draws(block, "a", range(3)), torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
                z, logdet = block(x)
            (z.sum() + logdet.sum()).backward()
            held.append(sum(sizes))
        assert held[0] == held[1]

    def test_only_the_number_of_terms_is_random_where_the_jacobian_is_diagonal(self):
        """vᵀJᵏv is tr Jᵏ for signs v then; what is left of the noise vanishes behind enough exact terms."""
        block = T.ResidualBlock(torch.nn.Sequential(torch.nn.Linear(3, 3)), 0.8).double()
        with torch.no_grad():
            block.net[0].parametrizations.weight.original.copy_(2 * torch.eye(3))
        x, spread = draw("x", 1, 3), []
        settle(block, x)
        for block.training_terms in (1, 60):
            torch.manual_seed(0)
            with torch.no_grad():
                found = torch.stack([block(x)[1] for _ in range(300)])
            spread.append(found.std())
        assert spread[0] > 0.1
        assert spread[1] < 1e-4
        torch.testing.assert_close(found.mean(), 3 * torch.tensor(1.8, dtype=F64).log(), rtol=0, atol=1e-5)

    def test_importance_samples_are_refused(self):
        """Their exponentials would be biased; of exact log-determinants they are not."""
        block = trained_like(nn.LipschitzConvNet(1, 4), (1, 2, 2))
        flow = ef.Flow(block, ef.distributions.StandardNormal((1, 2, 2)))
        noise = ef.distributions.UniformDequantization()
        model = ef.distributions.DequantizedFlow(flow, noise, levels=4).double().eval()
        x = torch.randint(4, (2, 1, 2, 2), generator=torch.Generator().manual_seed(0))
        assert not block.exact_logdet
        assert not flow.exact
        with pytest.raises(ValueError, match=r"Expected exact log-determinants .*; got random estimates in flow\."):
            model.importance_weighted(x, samples=2)
        block.logdet = "exact"
        assert block.exact_logdet
        assert flow.exact
        assert torch.isfinite(model.importance_weighted(x, samples=2)).all()

    def test_in_inference_mode(self):
        case, x = estimating("residual-conv")
        with torch.inference_mode(), T.keyed_draws(case.layer, "a", range(3)):
            z, logdet = case.layer(x)
            back, logdet_back = case.layer.inverse(z)
        torch.testing.assert_close(back.clone(), x, rtol=0, atol=1e-12)
        torch.testing.assert_close(logdet_back, -logdet, rtol=0, atol=1e-12)


class TestDraws:
    @pytest.mark.parametrize("name", BLOCKS)
    @pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
    def test_do_not_depend_on_the_batch(self, name, training):
        case, x = estimating(name)
        layer = case.layer.train(training)

        def logdet(rows: list[int]) -> Tensor:
            context = None if case.context is None else case.context[rows]
            with torch.no_grad(), constant_constraints(), T.keyed_draws(layer, "seed 3, step 5", rows):
                return layer(x[rows], context)[1]

        whole = logdet([0, 1, 2])
        for rows in ([0], [2, 1], [1, 2]):
            torch.testing.assert_close(logdet(rows), whole[rows], rtol=0, atol=1e-13)

    def test_differ_by_key_layer_and_sample(self):
        blocks = [T.ResidualBlock(nn.LipschitzMLP(40, (8,))).double() for _ in range(2)]
        chain, x = T.Chain(blocks), torch.zeros(2, 40, dtype=F64)

        def signs(key: str, layer: int, rows: list[int]) -> Tensor:
            with T.keyed_draws(chain, key, rows):
                return T.residual.signs(blocks[layer], x[: len(rows)])

        first = signs("a", 0, [0, 1])
        assert torch.equal(first, signs("a", 0, [0, 1]))
        assert set(first.unique().tolist()) == {-1.0, 1.0}
        for other in (signs("b", 0, [0, 1]), signs("a", 1, [0, 1]), signs("a", 0, [1, 0])):
            assert not torch.equal(first, other)
        assert torch.equal(first.flip(0), signs("a", 0, [1, 0]))

    def test_are_the_same_in_both_directions(self):
        """So the log-determinants of a round trip cancel, though each is random."""
        case, x = estimating("residual-conv")
        with torch.no_grad(), T.keyed_draws(case.layer, "a", range(3)):
            z, logdet = case.layer(x)
            back, logdet_back = case.layer.inverse(z)
        torch.testing.assert_close(back, x, rtol=0, atol=1e-12)
        torch.testing.assert_close(logdet_back, -logdet, rtol=0, atol=1e-12)

    def test_global_generator_without_a_key(self):
        case, x = estimating("residual-mlp")
        found = []
        for seed in (0, 0, 1):
            torch.manual_seed(seed)
            found.append(case.layer(x)[1].detach())
        assert torch.equal(found[0], found[1])
        assert not torch.equal(found[0], found[2])

    def test_rows_and_layers_that_are_not_known(self):
        case, x = estimating("residual-mlp")
        with T.keyed_draws(case.layer, "a", range(2)), pytest.raises(ValueError, match=r"Expected 2 rows.*; got 3"):
            case.layer(x)
        with T.keyed_draws(T.Flip(), "a", range(3)), pytest.raises(ValueError, match="Expected a layer of the model"):
            case.layer(x)


class TestInverse:
    @pytest.mark.parametrize("name", BLOCKS)
    def test_failure_is_raised_with_the_name(self, name):
        case = CASES.ready(name)
        case.layer.max_iterations = 2
        with pytest.raises(ef.ConvergenceError, match=r"^ResidualBlock: Expected a residual of at most 1.42109e-14"):
            case.layer.inverse(points(name, case), case.context)

    def test_gradient_in_every_parameter(self):
        case = CASES.ready("residual-mlp")
        with torch.no_grad():
            z, _ = case.layer(points("residual-mlp", case)[:2])
        keys = [f"transform.{key}" for key, _ in case.layer.named_parameters()]

        def inverse(z: Tensor, *values: Tensor) -> tuple[Tensor, Tensor]:
            parameters = dict(zip(keys, values, strict=True))
            return torch.func.functional_call(T.Inverse(case.layer), parameters, (z,))

        values = [value.detach().clone().requires_grad_() for value in case.layer.parameters()]
        assert torch.autograd.gradcheck(inverse, (z.requires_grad_(), *values), fast_mode=True)


class TestTransforms:
    def test_weights_that_constraints_have_not_seen_are_refused_inside(self):
        """Where buffers cannot be written; one pass outside is enough."""
        torch.manual_seed(0)
        block = T.ResidualBlock(nn.LipschitzMLP(3, (4,)), logdet="exact").double().eval()
        x = draw("x", 3)
        for run in (block, block.inverse):
            with torch.no_grad():
                for parameter in block.parameters():
                    parameter.mul_(1.1)
            with pytest.raises(
                ValueError, match=r"^ResidualBlock: Expected a pass outside torch\.func first.*; got none"
            ):
                torch.func.jacrev(lambda v, run=run: run(v[None])[0][0])(x)
            expected = torch.autograd.functional.jacobian(lambda v, run=run: run(v[None])[0][0], x)
            torch.testing.assert_close(torch.func.jacrev(lambda v, run=run: run(v[None])[0][0])(x), expected)

    def test_derivatives_forwards_are_refused(self):
        block, x = estimating("residual-mlp")[0].layer, draw("x", 4)
        with pytest.raises(
            ValueError, match=r"^ResidualBlock: Expected torch\.func\.jacrev.*; got a derivative forwards"
        ):
            torch.func.jacfwd(lambda v: block(v[None])[0][0])(x)


def test_a_flow_learns():
    """Maximum likelihood with random log-determinants, measured with exact ones."""
    torch.manual_seed(0)
    chain = T.Chain([T.ActNorm(2), *(T.ResidualBlock(nn.LipschitzMLP(2, (16, 16))) for _ in range(3))])
    flow = ef.Flow(chain, ef.distributions.StandardNormal((2,)))
    optimizer = torch.optim.Adam(flow.parameters(), lr=0.01)
    x = two_moons(512, torch.Generator().manual_seed(0))

    def exact() -> float:
        with torch.no_grad():
            for layer in list(chain)[1:]:
                layer.logdet = "exact"
            value = -flow.eval()(x).mean()
            for layer in list(chain)[1:]:
                layer.logdet = "estimate"
        flow.train()
        return float(value)

    flow(x)  # ActNorm starts
    before = exact()
    for _ in range(60):
        loss = -flow(x).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert exact() < before - 0.1
    flow(x)
    assert all(layer.lipschitz_bound() <= 0.98 * (1 + 1e-5) for layer in list(chain)[1:])
