"""Densities of tables: in the columns' own units, and with whole numbers."""

from __future__ import annotations

import math

import pytest
import torch

import expmflow as ef
from expmflow import transforms as T
from expmflow.distributions import Flow, StandardizedFlow, StandardNormal

F64 = torch.float64


def density(features: int, integers: tuple[int, ...] = ()) -> StandardizedFlow:
    return StandardizedFlow(Flow(T.Chain([T.ActNorm(features)]), StandardNormal((features,))), integers)


def rows(n: int = 500) -> torch.Tensor:
    return torch.randn(n, 2, generator=torch.Generator().manual_seed(0), dtype=F64) * torch.tensor([3.0, 1e-4]) + 7


def test_a_standard_normal_inside_is_the_gaussian_of_the_rows():
    made, x = density(2).double(), rows()
    made.start_from(x)
    known = torch.distributions.Normal(x.mean(0), x.std(0, correction=0)).log_prob(x).sum(1)
    torch.testing.assert_close(made(x), known)
    torch.testing.assert_close(made.log_prob(x), known)


def test_units_change_a_likelihood_by_their_logarithm_alone():
    first, second, x = density(2).double(), density(2).double(), rows()
    first.start_from(x)
    second.start_from(1000 * x)
    torch.testing.assert_close(second(1000 * x), first(x) - 2 * math.log(1000))


def test_large_numbers_that_lie_close_together_stay_apart_in_float32():
    made = density(1)
    x = 1.7e9 + torch.arange(100, dtype=F64).unsqueeze(1)
    made.start_from(x)
    assert made.flow.base._like.dtype == torch.float32
    assert made.mean.dtype == F64
    assert made(x).unique().numel() >= 49  # a parabola has each value twice
    assert 1.7e9 - 200 < float(made.sample(20).mean()) < 1.7e9 + 300


def test_moving_keeps_the_mean_exact():
    made = density(2)
    made.start_from(rows() + 1e9)
    mean = made.mean.clone()
    made = made.to(torch.float32).half().float()
    assert torch.equal(made.mean, mean)
    copy = density(2)
    copy.load_state_dict(made.state_dict())
    assert torch.equal(copy.mean, mean)


class TestWholeNumbers:
    def test_probabilities_add_up_to_at_most_one(self):
        """exp of the bound, over all numbers that there are; near one, as the base is smooth over a unit."""
        torch.manual_seed(0)
        made = density(1, (0,)).double().eval()
        made.start_from(torch.randn(1000, 1, dtype=F64).mul(4).round())
        numbers = torch.arange(-40.0, 41.0, dtype=F64).unsqueeze(1)
        bound = made.elbo(numbers, samples=400)
        assert 0.98 < float(bound.exp().sum()) <= 1.0

    def test_they_are_a_bound_and_take_noise(self):
        made = density(3, (0, 2))
        assert made.is_bound
        assert made.draws[0].shape == (2,)
        assert not density(3).is_bound
        assert density(3).exact
        with pytest.raises(ValueError, match="Expected a table without whole numbers or repeated values"):
            made.log_prob(torch.zeros(1, 3))

    def test_samples_of_them_are_whole(self):
        made = density(2, (1,))
        made.start_from(torch.stack([torch.randn(100), torch.randint(9, (100,)).float()], dim=1))
        x = made.sample(50)
        assert torch.equal(x[:, 1], x[:, 1].round())
        assert not torch.equal(x[:, 0], x[:, 0].round())

    def test_a_flow_gains_nothing_from_the_lattice(self):
        """Of a fair coin, log P is at best −log 2, however sharp the flow may become."""
        made = StandardizedFlow(
            Flow(T.Chain([T.ActNorm(1), T.LinearExp(1, coeff=5.0)]), StandardNormal((1,))), (0,)
        ).double()
        x = torch.randint(2, (512, 1), generator=torch.Generator().manual_seed(0)).double()
        made.start_from(x)
        optimizer = torch.optim.Adam(made.parameters(), lr=0.05)
        for _ in range(60):
            optimizer.zero_grad()
            loss = -made(x).mean()
            loss.backward()
            optimizer.step()
        assert float(loss.detach()) > math.log(2) - 0.05


class TestValuesThatRepeat:
    HALVES = ((0, 0.5),)

    def made(self, rows: torch.Tensor, cells: tuple[tuple[int, float], ...]) -> StandardizedFlow:
        (features,) = rows.shape[1:]
        flow = Flow(T.Chain([T.ActNorm(features), T.LinearExp(features, coeff=5.0)]), StandardNormal((features,)))
        made = StandardizedFlow(flow, (), cells).double()
        made.start_from(rows)
        return made

    def test_cells_are_whole_numbers_in_another_unit(self):
        """Of x / 2 in cells of a half, the density is twice that of whole numbers x."""
        x = torch.randint(9, (200, 1), generator=torch.Generator().manual_seed(0)).double()
        whole = density(1, (0,)).double()
        whole.start_from(x)
        noise = (torch.rand(200, 1, dtype=F64),)
        halves = StandardizedFlow(Flow(T.Chain([T.ActNorm(1)]), StandardNormal((1,))), (), self.HALVES).double()
        halves.start_from(x / 2)
        torch.testing.assert_close(halves(x / 2, noise=noise), whole(x, noise=noise) + math.log(2))

    def test_a_flow_gains_no_more_than_the_width_of_a_cell(self):
        """However sharp a flow becomes, the mean density in a cell is at most 1 / width."""
        x = torch.zeros(512, 1, dtype=F64)
        x[:10] = torch.rand(10, 1, dtype=F64) + 1
        made = self.made(x, ((0, 0.02),))
        optimizer = torch.optim.Adam(made.parameters(), lr=0.1)
        for _ in range(150):
            optimizer.zero_grad()
            (-made(x).mean()).backward()
            optimizer.step()
        assert float(made.elbo(x[-1:], samples=2000).detach()) <= math.log(1 / 0.02)

    def test_samples_lie_whole_cells_from_the_value_that_repeats(self):
        x = torch.rand(300, 2, generator=torch.Generator().manual_seed(0), dtype=F64)
        x[:200, 0] = 0.3
        samples = self.made(x, ((0, 0.1),)).sample(100)
        steps = (samples[:, 0] - 0.3) / 0.1
        torch.testing.assert_close(steps, steps.round(), atol=1e-9, rtol=0)
        assert float(samples[:, 1].mul(10).frac().abs().max()) > 0.1

    def test_it_is_saved_and_loaded(self, tmp_path):
        x = torch.randint(5, (50, 1)).double() / 2
        made = self.made(x, self.HALVES).eval()
        ef.save(made, tmp_path / "flow")
        noise = (torch.rand(50, 1, dtype=F64),)
        torch.testing.assert_close(ef.load(tmp_path / "flow")(x, noise=noise), made(x, noise=noise))

    @pytest.mark.parametrize("cells", [((0, 0.0),), ((2, 1.0),), ((0, 1.0), (0, 2.0))])
    def test_cells_that_are_none_are_refused(self, cells):
        with pytest.raises(ValueError, match=r"^Expected (places|cells)"):
            StandardizedFlow(Flow(T.Chain([T.ActNorm(2)]), StandardNormal((2,))), (), cells)


def test_round_trips_are_in_the_columns_own_units():
    made, x = density(2).double(), rows(5)
    made.start_from(x)
    assert float(made.round_trip_error(x).max()) < 1e-12


def test_places_that_are_none_are_refused():
    for integers in ((2,), (0, 0), (-1,)):
        with pytest.raises(ValueError, match="Expected places of columns below 2, each once"):
            density(2, integers)


class TestActNorm:
    @pytest.mark.parametrize("value", [0.0, 5.0, 1e6, 0.1])
    def test_a_constant_channel_is_shifted_and_no_more(self, value: float):
        layer = ef.transforms.ActNorm(2).train()
        x = torch.stack([torch.randn(64, generator=torch.Generator().manual_seed(0)), torch.full((64,), value)], dim=1)
        z, logdet = layer(x)
        assert float(z.detach()[:, 1].abs().max()) <= 4 * torch.finfo(torch.float32).eps * max(1.0, value)
        assert float(layer.log_scale.detach()[1]) == 0
        assert float(logdet.detach().abs().max()) < 5

    def test_a_first_batch_of_one_row_leaves_likelihoods_sane(self):
        flow = ef.Flow(T.Chain([T.ActNorm(3)]), StandardNormal((3,))).train()
        flow(torch.tensor([[1.0, 2.0, 3.0]]))
        others = flow(torch.tensor([[1.5, 2.0, 2.0], [0.0, 2.5, 3.0]]))
        assert float(others.detach().min()) > -10

    def test_small_scales_are_still_scales(self):
        layer = ef.transforms.ActNorm(1).train()
        x = 1e-5 * torch.randn(100, 1, generator=torch.Generator().manual_seed(0))
        assert float(layer(x)[0].detach().std()) == pytest.approx(1, rel=0.02)


def test_rows_that_it_starts_from_stay_what_they_are():
    x = torch.arange(12, dtype=F64).reshape(6, 2)
    before = x.clone()
    made = density(2, (0, 1))
    made.start_from(x)
    assert torch.equal(x, before)
    torch.testing.assert_close(made.mean, before.mean(0) + 0.5)
