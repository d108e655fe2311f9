"""The mixtures of Gaussians on graphs: densities that are known, and entropies that follow from them."""

from __future__ import annotations

import functools
import math

import pytest
import torch
from torch import Tensor

from expmflow.data.graphs import MIXTURES, Mixture

F64 = torch.float64
ENTROPIES = {"mog-4": 3.632, "mog-9": 4.260, "mog-16": 4.755, "mog-ring": 4.053}  # nats per node
SMALL = ("mog-4", "mog-ring")
NEAR = Mixture(((0.0, 0.0), (0.5, 0.0), (0.0, 1.0)))  # so close that all orders count


def seeded(number: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(number)


@functools.cache
def entropy(name: str) -> float:
    return MIXTURES[name].entropy()


def rotation(angle: float) -> Tensor:
    cos, sin = math.cos(angle), math.sin(angle)
    return torch.tensor([[cos, sin], [-sin, cos]], dtype=F64)


def by_permanent(x: Tensor, centres: Tensor) -> Tensor:
    """log p for any N: per(φ(x_i − c_j)) / N!, the permanent by a recursion over sets of centres."""
    nodes = len(centres)
    density = (-0.5 * (x[:, :, None] - centres).square().sum(-1)).exp() / (2 * math.pi)
    ways = {0: x.new_ones(len(x))}
    for i in range(nodes):
        longer: dict[int, Tensor] = {}
        for used, value in ways.items():
            for j in range(nodes):
                if not used >> j & 1:
                    more = value * density[:, i, j]
                    longer[used | 1 << j] = longer.get(used | 1 << j, 0) + more
        ways = longer
    return ways[2**nodes - 1].log() - math.lgamma(nodes + 1)


class TestCentres:
    @pytest.mark.parametrize(("name", "side"), [("mog-4", 2), ("mog-9", 3), ("mog-16", 4), ("mog-ring", 2)])
    def test_a_square_lattice_of_spacing_ten_from_minus_five(self, name, side):
        values = [-5.0 + 10 * k for k in range(side)]
        assert sorted(MIXTURES[name].centres) == [(a, b) for a in values for b in values]
        assert MIXTURES[name].nodes == side**2
        assert MIXTURES[name].turned == (name == "mog-ring")


class TestDraws:
    @pytest.mark.parametrize("name", MIXTURES)
    def test_are_a_function_of_the_generator(self, name):
        mixture, state = MIXTURES[name], torch.get_rng_state()
        drawn = mixture.sample(7, seeded(3))
        assert drawn.shape == (7, mixture.nodes, 2)
        assert drawn.dtype == torch.float32
        assert torch.equal(drawn, mixture.sample(7, seeded(3)))
        assert not torch.equal(drawn, mixture.sample(7, seeded(4)))
        assert torch.equal(torch.get_rng_state(), state)
        generator = seeded(3)
        first, second = mixture.sample(7, generator), mixture.sample(7, generator)
        assert torch.equal(first, drawn)
        assert not torch.equal(first, second)

    def test_none_and_fewer(self):
        assert MIXTURES["mog-4"].sample(0, seeded()).shape == (0, 4, 2)
        with pytest.raises(ValueError, match="Expected the number of graphs of at least 0; got -1"):
            MIXTURES["mog-4"].sample(-1, seeded())

    @pytest.mark.parametrize("name", ["mog-4", "mog-9", "mog-16"])
    def test_have_one_node_at_each_centre_in_any_order_with_unit_noise(self, name):
        mixture, n = MIXTURES[name], 4000
        drawn, centres = mixture.sample(n, seeded()).double(), torch.tensor(mixture.centres, dtype=F64)
        nearest = (drawn[:, :, None] - centres).square().sum(-1).argmin(2)
        whole = (nearest.sort(1).values == torch.arange(mixture.nodes)).all(1)
        assert whole.all()  # ten apart, five of them from the border between two
        shares = torch.nn.functional.one_hot(nearest, mixture.nodes).double().mean(0)
        spread = (1 / mixture.nodes / n) ** 0.5
        assert (shares - 1 / mixture.nodes).abs().max() < 5 * spread
        noise = (drawn - centres[nearest]).flatten(0, 1)
        torch.testing.assert_close(noise.T.cov(), torch.eye(2, dtype=F64), rtol=0, atol=0.06)
        torch.testing.assert_close(noise.mean(0), torch.zeros(2, dtype=F64), rtol=0, atol=0.04)

    def test_of_the_ring_are_turned_by_any_angle(self):
        drawn = MIXTURES["mog-ring"].sample(4000, seeded()).double()
        angle = torch.atan2(drawn[:, 0, 1], drawn[:, 0, 0])
        for k in range(1, 9):  # all moments of a uniform angle vanish, the square's own (k = 4, 8) too
            assert (k * angle).cos().mean().abs() < 0.05
            assert (k * angle).sin().mean().abs() < 0.05
        radius = drawn.square().sum(-1).mean()
        assert float(radius) == pytest.approx(50 + 2, rel=0.01)


class TestDensity:
    def test_equals_the_permanent(self):
        x = 3 * torch.randn(20, 3, 2, generator=seeded(), dtype=F64)
        centres = torch.tensor(NEAR.centres, dtype=F64)
        torch.testing.assert_close(NEAR.log_prob(x), by_permanent(x, centres), rtol=0, atol=1e-12)
        graphs = MIXTURES["mog-4"]
        x, centres = graphs.sample(20, seeded()).double(), torch.tensor(graphs.centres, dtype=F64)
        torch.testing.assert_close(graphs.log_prob(x), by_permanent(x, centres), rtol=0, atol=1e-12)

    @pytest.mark.parametrize("spread", [1.0, 1.5])
    def test_of_the_ring_is_the_mean_over_all_angles(self, spread):
        """A full turn at many more angles, that do not fall on those of the quadrature."""
        graphs = MIXTURES["mog-ring"]
        x = spread * graphs.sample(3, seeded()).double()
        centres, many = torch.tensor(graphs.centres, dtype=F64), 301
        turned = [by_permanent(x, centres @ rotation(0.1 + 2 * math.pi * k / many)) for k in range(many)]
        expected = torch.stack(turned).logsumexp(0) - math.log(many)
        torch.testing.assert_close(graphs.log_prob(x), expected, rtol=0, atol=1e-8)

    def test_integrates_to_one(self):
        """By importance sampling, from one wide Gaussian for all nodes."""
        n, width = 200_000, 1.6
        x = width * torch.randn(n, 3, 2, generator=seeded(), dtype=F64)
        log_q = -0.5 * (x / width).square().sum((1, 2)) - 6 * math.log(width) - 3 * math.log(2 * math.pi)
        weights = (NEAR.log_prob(x) - log_q).exp()
        error = float(weights.std()) / n**0.5
        assert error < 0.01
        assert float(weights.mean()) == pytest.approx(1, abs=4 * error)

    @pytest.mark.parametrize("name", SMALL)
    def test_does_not_change_with_the_order_of_the_nodes(self, name):
        x = MIXTURES[name].sample(5, seeded()).double()
        expected = MIXTURES[name].log_prob(x)
        torch.testing.assert_close(MIXTURES[name].log_prob(x[:, [2, 0, 3, 1]]), expected, rtol=0, atol=1e-12)

    @pytest.mark.parametrize("angle", [0.01, 0.3, 0.7, math.pi / 2, 2.0, -1.0])
    def test_of_the_ring_does_not_change_with_the_angle(self, angle):
        graphs = MIXTURES["mog-ring"]
        x = graphs.sample(50, seeded()).double()
        torch.testing.assert_close(graphs.log_prob(x @ rotation(angle)), graphs.log_prob(x), rtol=0, atol=1e-9)

    def test_of_the_others_does(self):
        graphs = MIXTURES["mog-4"]
        x = graphs.sample(5, seeded()).double()
        assert (graphs.log_prob(x @ rotation(0.7)) - graphs.log_prob(x)).abs().min() > 1

    def test_in_float32(self):
        for name in SMALL:
            x = MIXTURES[name].sample(20, seeded())
            found = MIXTURES[name].log_prob(x)
            assert found.dtype == torch.float32
            torch.testing.assert_close(found.double(), MIXTURES[name].log_prob(x.double()), rtol=0, atol=1e-3)

    def test_of_too_many_nodes_is_refused(self):
        with pytest.raises(ValueError, match="Expected at most 6 nodes, for a sum over all orders; got 9"):
            MIXTURES["mog-9"].log_prob(torch.zeros(1, 9, 2))

    def test_of_another_number_of_nodes_is_refused(self):
        for shape in ((2, 3, 2), (2, 4, 3), (4, 2)):
            with pytest.raises(ValueError, match=r"Expected graphs of shape \(batch, 4, 2\); got"):
                MIXTURES["mog-4"].log_prob(torch.zeros(shape))

    def test_of_turned_centres_that_a_quarter_turn_changes_is_refused(self):
        """The quadrature goes over a quarter turn."""
        with pytest.raises(ValueError, match="Expected centres that a quarter turn leaves in place; got"):
            Mixture(((1.0, 0.0), (0.0, 1.0)), turned=True)
        Mixture(((1.0, 0.0), (0.0, 1.0), (-1.0, 0.0), (0.0, -1.0), (0.0, 0.0)), turned=True)


class TestEntropy:
    @pytest.mark.parametrize("name", MIXTURES)
    def test_is_that_of_the_paper(self, name):
        assert entropy(name) == pytest.approx(ENTROPIES[name], abs=6e-4)

    @pytest.mark.parametrize("name", SMALL)
    def test_is_the_mean_surprise_of_samples(self, name):
        n, graphs = 3000, MIXTURES[name]
        surprise = -graphs.log_prob(graphs.sample(n, seeded(7)).double()) / graphs.nodes
        error = float(surprise.std()) / n**0.5
        assert error < 0.015
        assert entropy(name) == pytest.approx(float(surprise.mean()), abs=4 * error)

    def test_is_the_mean_surprise_of_nine_nodes(self):
        graphs, n = MIXTURES["mog-9"], 2000
        centres = torch.tensor(graphs.centres, dtype=F64)
        surprise = -by_permanent(graphs.sample(n, seeded(7)).double(), centres) / 9
        assert graphs.entropy() == pytest.approx(float(surprise.mean()), abs=4 * float(surprise.std()) / n**0.5)

    def test_of_the_ring_is_that_of_the_square_and_of_its_angle(self):
        """Turning adds the entropy of the angle, less what noise and the square's symmetry hide, to four nodes."""
        square, ring = entropy("mog-4"), entropy("mog-ring")
        # a Gaussian angle of deviation 1/√(Σ|c|²) in a quarter turn: log(π/2) − ½ log(2πe / 200)
        gain = math.log(math.pi / 2) - 0.5 * math.log(2 * math.pi * math.e / 200)
        assert ring == pytest.approx(square + gain / 4, abs=5e-3)

    def test_does_not_depend_on_the_state_of_torch(self):
        torch.manual_seed(1)
        first = MIXTURES["mog-ring"].entropy(500)
        torch.manual_seed(2)
        assert MIXTURES["mog-ring"].entropy(500) == first
