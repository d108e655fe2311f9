"""Randomness, schedules and averages are the functions that they claim to be."""

import math

import pytest
import torch

from expmflow.data.kinds.images import shifted
from expmflow.data.kinds.vectors import jittered
from expmflow.distributions import Draw
from expmflow.runs.typicality import Typicality
from expmflow.training.config import OptimConfig
from expmflow.training.distributed import Processes
from expmflow.training.optimizer import Average, build_optimizer, learning_rate
from expmflow.training.randomness import Randomness


def test_an_epoch_is_a_permutation_and_epochs_differ() -> None:
    orders = [Randomness(0).order(epoch, 50) for epoch in range(3)]
    for order in orders:
        assert torch.equal(order.sort().values, torch.arange(50))
    assert not torch.equal(orders[0], orders[1])


def test_the_batches_of_an_epoch_share_no_sample() -> None:
    batches = torch.cat([Randomness(3).batch(step, 50, 10) for step in range(5)])
    assert torch.equal(batches.sort().values, torch.arange(50))
    assert torch.equal(Randomness(3).batch(7, 50, 10), Randomness(3).order(1, 50)[20:30])


@pytest.mark.parametrize(("kind", "mean", "variance"), [("uniform", 0.5, 1 / 12), ("normal", 0.0, 1.0)])
def test_noise(kind, mean, variance) -> None:
    noise = Randomness(1).noise(kind, (200, 50), "noise", 7)
    assert float(noise.mean()) == pytest.approx(mean, abs=0.03)
    assert float(noise.var()) == pytest.approx(variance, rel=0.05)
    assert torch.equal(noise, Randomness(1).noise(kind, (200, 50), "noise", 7))
    for other in (Randomness(2).noise(kind, (200, 50), "noise", 7), Randomness(1).noise(kind, (200, 50), "noise", 8)):
        assert not torch.equal(noise, other)


@pytest.mark.parametrize("kind", ["uniform", "normal"])
def test_noise_of_rows_is_a_function_of_each_row(kind) -> None:
    rows, draws = torch.arange(12).reshape(3, 2, 2), (Draw(kind, (2, 2)), Draw(kind, (5,)))
    noise, other = Randomness(4).row_draws(draws, rows, "x")
    assert noise.shape == rows.shape
    assert other.shape == (3, 5)
    assert torch.cat([noise.flatten(), other.flatten()]).unique().numel() == 12 + 15
    picked = [2, 0, 2]
    assert torch.equal(Randomness(4).row_draws(draws, rows[picked].to(torch.uint8), "x")[0], noise[picked])
    assert not torch.isclose(Randomness(5).row_draws(draws, rows, "x")[0], noise).any()
    assert Randomness(4).row_draws(draws, rows[:0], "x")[0].shape == (0, 2, 2)


def test_parts_of_a_batch_make_the_whole() -> None:
    rows = torch.arange(12)
    assert torch.equal(torch.cat([Processes(rank, 3).slice(rows) for rank in range(3)]), rows)
    with pytest.raises(ValueError, match="Expected a batch that 5 processes can share; got 12"):
        Processes(0, 5).slice(rows)


def test_learning_rate() -> None:
    config = OptimConfig(lr=1.0, warmup=4, decay=0.5)
    rates = [learning_rate(config, step, steps_per_epoch=6) for step in (0, 1, 3, 5, 6, 12)]
    assert rates == [0.25, 0.5, 1.0, 1.0, 0.5, 0.25]
    squared = OptimConfig(lr=1.0, warmup=4, warmup_power=2)
    assert [learning_rate(squared, step, steps_per_epoch=6) for step in (0, 1, 3, 9)] == [1 / 16, 1 / 4, 1.0, 1.0]


@pytest.mark.parametrize("optimizer", ["adam", "adamax"])
def test_eps_is_what_the_config_says(optimizer) -> None:
    """A gradient far below eps moves a weight by far less than the learning rate."""
    for eps, moved in ((1e-8, 0.1), (1.0, 1e-5)):
        net = torch.nn.Linear(1, 1, bias=False)
        before = net.weight.detach().clone()
        net.weight.grad = torch.full_like(net.weight, 1e-4)
        build_optimizer(net, OptimConfig(optimizer=optimizer, lr=0.1, eps=eps)).step()
        torch.testing.assert_close(before - net.weight.detach(), torch.full_like(before, moved), rtol=1e-2, atol=0)


def test_weight_decay_shrinks_matrices_alone() -> None:
    net = torch.nn.Linear(2, 1)
    before = [p.detach().clone() for p in net.parameters()]
    for parameter in net.parameters():
        parameter.grad = torch.zeros_like(parameter)
    build_optimizer(net, OptimConfig(lr=0.1, weight_decay=0.5)).step()
    torch.testing.assert_close(net.weight.detach(), 0.95 * before[0])
    assert torch.equal(net.bias.detach(), before[1])


def test_jitter_has_the_covariance_of_the_rows() -> None:
    train = torch.randn(500, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).cumsum(1)
    uniform = torch.rand(200_000, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    moved = jittered(torch.zeros(len(uniform), 3, dtype=torch.float64), uniform, 0.5, train)
    torch.testing.assert_close(torch.cov(moved.T), 0.25 * torch.cov(train.T), rtol=0.03, atol=0.01)


def test_images_are_shifted_by_whole_pixels() -> None:
    """By all shifts up to the largest; the edges are copies."""
    images = torch.arange(2 * 5 * 6, dtype=torch.uint8).reshape(1, 2, 5, 6).expand(9, -1, -1, -1)
    moves = torch.cartesian_prod(*2 * [torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64)])
    found = shifted(images, moves, 1, images)
    padded = torch.nn.functional.pad(images[:1].double(), (1, 1, 1, 1), mode="replicate").to(torch.uint8)
    expected = [padded[:, :, 1 - dy : 6 - dy, 1 - dx : 7 - dx] for dy in (-1, 0, 1) for dx in (-1, 0, 1)]
    assert torch.equal(found, torch.cat(expected))
    every = OptimConfig(lr=1.0, decay=0.1, decay_every=10)
    assert learning_rate(every, 25, steps_per_epoch=6) == pytest.approx(0.01)


def test_average_of_a_constant_is_the_constant_and_of_a_jump_lies_between() -> None:
    model = torch.nn.Linear(2, 1)
    average = Average(model, 0.5)
    start = model.weight.detach().clone()
    average.update(model, 100)
    assert torch.allclose(average.values["weight"], start)
    with torch.no_grad():
        model.weight.add_(1.0)
    average.update(model, 100)
    assert torch.allclose(average.values["weight"], start + 0.5)


def test_scores_are_measured_on_rows_whose_likelihood_can_be_told() -> None:
    nll = torch.tensor([1.0, 2.0, 3.0, math.inf], dtype=torch.float64)
    found = Typicality.of(nll)
    assert found == Typicality.of(nll[:3])
    assert found.mean == 2
    assert float(found.score(nll)[3]) > found.threshold
    with pytest.raises(ValueError, match=r"Expected at least two rows with finite likelihoods .*; got 1"):
        Typicality.of(nll[2:])
