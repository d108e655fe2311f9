"""`ef.train` with densities that no config describes: what is trained, what goes on, what is refused."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import nn

import expmflow as ef
from cli_runs import run_command
from expmflow import transforms as T
from expmflow.data import Dataset
from expmflow.distributions import Density, StandardNormal, UniformDequantization
from expmflow.distributions.protocol import Noise
from expmflow.training.config import ConfigError


def rows(n: int = 200) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(n, 2, generator=generator, dtype=torch.float64) @ torch.tensor([[2.0, 1.0], [0.0, 0.5]]).double()


def affine(dtype: torch.dtype = torch.float64) -> ef.Flow:
    torch.manual_seed(0)
    return ef.Flow(T.Chain([T.ActNorm(2), T.LinearExp(2)]), StandardNormal((2,))).to(dtype)


def weights(model: nn.Module) -> list[torch.Tensor]:
    return [value.clone() for value in model.state_dict().values()]


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_an_affine_flow_comes_to_the_gaussian_of_the_rows():
    """The best density of the family is known: a Gaussian with mean and covariance of the rows."""
    x, model = rows(), affine()
    records: list[dict] = []
    trained = ef.train(model, x, steps=300, lr=0.03, validation=0.0, validate_every=50, report=records.append)
    with torch.no_grad():
        found = float(-trained(x).mean())
    best = float(-torch.distributions.MultivariateNormal(x.mean(0), torch.cov(x.T, correction=0)).log_prob(x).mean())
    assert best <= found + 1e-9
    assert found == pytest.approx(best, abs=0.01)
    measured = min(record["validation_nll"] for record in records if "validation_nll" in record)
    assert measured == pytest.approx(found, abs=1e-9)


def test_the_model_that_is_given_stays_as_it_is_and_equal_calls_give_equal_weights():
    model = affine()
    before = weights(model)
    first, second = (ef.train(model, rows(), steps=3, batch_size=16) for _ in range(2))
    assert same(weights(model), before)
    assert same(weights(first), weights(second))
    assert not same(weights(first), before)
    assert not first.training
    assert not same(weights(first), weights(ef.train(model, rows(), steps=3, batch_size=16, seed=1)))


def test_nothing_is_left_behind_without_a_folder(here: Path):
    steps: list[int] = []
    ef.train(affine(torch.float32), rows(), steps=2, on_step=steps.append)
    assert steps == [1, 2]
    assert not list(here.iterdir())


class Scaled(Density):
    """A density that no config knows: a normal of any scale."""

    def __init__(self) -> None:
        super().__init__()
        self.log_std = nn.Parameter(torch.zeros(2, dtype=torch.float64))

    @property
    def event_shape(self) -> tuple[int, ...]:
        return (2,)

    def forward(self, x: torch.Tensor, context: object = None, *, noise: Noise = None) -> torch.Tensor:
        return torch.distributions.Normal(0.0, self.log_std.exp()).log_prob(x).sum(1)

    def sample(self, n: int, context: object = None, *, temperature: float = 1.0, noise: Noise = None) -> torch.Tensor:
        return temperature * self.log_std.exp() * torch.randn(n, 2)

    def description(self) -> str:
        return "a normal"


def test_a_run_of_an_unknown_class_goes_on_to_the_same_weights(here: Path):
    settings = {"steps": 6, "lr": 0.1, "batch_size": 20, "checkpoint_every": 2}
    whole = ef.train(Scaled(), rows(), **settings)
    steps: list[int] = []
    with pytest.raises(KeyboardInterrupt):
        ef.train(Scaled(), rows(), **settings, folder="run", on_step=_cut(steps))
    steps.clear()
    resumed = ef.train(Scaled(), rows(), **settings, folder="run", on_step=steps.append)
    assert steps == [3, 4, 5, 6]
    assert same(weights(whole), weights(resumed))
    with pytest.raises(ConfigError, match=r"optim\.lr is 0\.2, and was 0\.1"):
        ef.train(Scaled(), rows(), steps=6, lr=0.2, batch_size=20, folder="run")


def _cut(steps: list[int]):
    def on_step(step: int) -> None:
        steps.append(step)
        if step == 3:
            raise KeyboardInterrupt

    return on_step


def test_what_cannot_be_built_from_a_config_is_said(here: Path):
    ef.train(Scaled(), rows(), steps=1, folder="run")
    with pytest.raises(ConfigError, match=r"one that was given to expmflow.train.*folder="):
        ef.load("run")
    for command in (["evaluate", "run"], ["train", "--resume", "run"], ["train", "moons", "data.name=given"]):
        outcome = run_command(*command)
        assert outcome.code in (1, 2)
        assert "given to expmflow.train" in outcome.err


class Labelled(Scaled):
    def forward(self, x: torch.Tensor, context: object = None, *, noise: Noise = None) -> torch.Tensor:
        assert isinstance(context, torch.Tensor)
        assert context.shape == (len(x), 3)
        assert torch.equal(context.argmax(1).double(), x[:, 0])
        return super().forward(x)


def test_classes_become_one_hot_contexts():
    labels = torch.arange(12) % 3
    x = torch.stack([labels.double(), torch.randn(12).double()], 1)
    data = Dataset(x, x[:6], x[:0], labels=(labels, labels[:6], labels[:0]), classes=3)
    ef.train(Labelled(), data, steps=2, batch_size=4, conditional=True)
    with pytest.raises(ValueError, match="Expected a Dataset with labels for conditional=True; got none"):
        ef.train(Labelled(), x, steps=2, conditional=True)


def test_integers_are_trained_on_with_noise_that_follows_from_the_seed():
    torch.manual_seed(0)
    flow = ef.distributions.DequantizedFlow(
        ef.Flow(T.ActNorm(2), StandardNormal((2,))), UniformDequantization(), levels=4
    )
    x = torch.randint(4, (40, 2), dtype=torch.uint8)
    assert same(*(weights(ef.train(copy.deepcopy(flow), x, steps=2)) for _ in range(2)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": affine().half()}, r"Expected a model with parameters in float32 or float64; got torch\.float16"),
        ({"data": torch.zeros(0, 2)}, "Expected at least two rows"),
        ({"data": torch.tensor([[0.0, float("nan")], [0.0, 1.0]])}, "Expected data to be finite"),
        ({"validation": 1.0}, r"Expected a share of rows for validation from 0 to below 1; got 1\.0"),
        ({"kind": "sounds"}, "Expected kind to be one of vectors, "),
        ({"kind": "images"}, "Expected images of shape"),
        ({"batch_size": 1000}, "Expected a batch of at most 180 rows"),
    ],
)
def test_bad_input_is_refused_and_nothing_is_written(change: dict, message: str, here: Path):
    given = {"model": affine(), "data": rows(), "folder": "run", **change}
    with pytest.raises((ValueError, TypeError), match=message):
        ef.train(**given)
    assert not list(here.iterdir())
