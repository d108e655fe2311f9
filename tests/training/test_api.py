"""Training from Python: `ef.train`."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import expmflow as ef
from expmflow import transforms as T
from expmflow.data import Dataset
from expmflow.models import image_flow
from expmflow.training.config import ConfigError
from expmflow.training.run import RunFolder


def flow() -> ef.Flow:
    torch.manual_seed(0)
    return ef.Flow(T.Chain([T.ActNorm(2), T.LinearExp(2)]), ef.distributions.StandardNormal((2,)))


def rows(n: int = 200) -> torch.Tensor:
    mixing = torch.tensor([[2.0, 1.0], [0.0, 0.5]])
    return torch.randn(n, 2, generator=torch.Generator().manual_seed(0)) @ mixing + 3


def test_a_flow_of_one_s_own_is_fitted():
    x = rows(1000)
    best = ef.train(flow(), x, steps=150, lr=0.02, validate_every=50, batch_size=128)
    known = torch.distributions.MultivariateNormal(x.mean(0), x.T.cov()).log_prob(x).mean()
    with torch.no_grad():
        assert float(known - best.log_prob(x).mean()) < 0.1
    assert not best.training


def test_it_is_the_same_every_time_and_goes_on(tmp_path: Path):
    settings = {"lr": 0.01, "batch_size": 32, "checkpoint_every": 2, "validate_every": 2}
    records: list[dict] = []
    whole = ef.train(flow(), rows(), tmp_path / "whole", steps=6, report=records.append, **settings)
    ef.train(flow(), rows(), tmp_path / "parts", steps=3, **settings)
    parts = ef.train(flow(), rows(), tmp_path / "parts", steps=6, **settings)
    for name, value in whole.state_dict().items():
        assert torch.equal(value, parts.state_dict()[name]), name
    assert [r["step"] for r in records if "validation_nll" in r] == [2, 4, 6]
    assert RunFolder(tmp_path / "whole").read_metrics()


def test_nothing_is_left_without_a_folder(here: Path):
    ef.train(flow(), rows(), steps=2)
    assert list(here.iterdir()) == []


def test_images_and_data_sets_with_labels():
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    images, labels = torch.randint(4, (40, 1, 4, 4), generator=generator), torch.randint(2, (40,), generator=generator)
    sizes = {"levels": 1, "subflows": 1, "hidden": 4, "grey_levels": 4}
    plain = ef.train(image_flow((1, 4, 4), **sizes), images, kind="images", steps=2, batch_size=8)
    assert plain(images[:3]).shape == (3,)
    data = Dataset(images[:30], images[30:], images[:0], labels=(labels[:30], labels[30:], labels[:0]), classes=2)
    assert data.kind == "vectors"
    with pytest.raises(ValueError, match=r"Expected vectors of shape \(columns,\); got events of shape \(1, 4, 4\)"):
        ef.train(image_flow((1, 4, 4), **sizes), data, steps=2, batch_size=8)


@pytest.mark.parametrize(
    ("arguments", "settings", "error", "message"),
    [
        ((torch.nn.Linear(2, 2), rows()), {}, TypeError, r"Expected a distributions\.Density to train; got Linear"),
        ((flow(), rows()), {"stpes": 3}, ConfigError, r"train\.stpes: no such key \(did you mean 'steps'\?\)"),
        ((flow(), rows()), {"lr": -1}, ConfigError, r"optim\.lr: .*got -1"),
        ((flow(), torch.zeros(9, 3)), {}, ValueError, r"Expected rows of shape \(2,\), as the model has; got \(3,\)"),
        ((flow(), torch.zeros(2)), {}, ValueError, r"Expected at least two rows \(rows, \*event\); got shape \(2,\)"),
    ],
)
def test_mistakes_are_one_sentence(arguments, settings, error, message):
    with pytest.raises(error, match=message):
        ef.train(*arguments, **settings)


def test_a_table_as_an_array_of_numpy():
    best = ef.train(flow(), rows().numpy(), steps=2)
    assert best.sample(2).shape == (2, 2)
