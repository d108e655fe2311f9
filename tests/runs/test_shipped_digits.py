"""The model of digits inside the package: what `expmflow train digits` makes of today's layers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from expmflow import transforms as T
from expmflow.distributions import bits_per_dim
from expmflow.runs.evaluation import Trained, open_run
from expmflow.training.build import resolve
from expmflow.training.config import load_config

DOCS = Path(__file__).parents[2] / "docs/images.md"


@pytest.fixture(scope="module")
def shipped() -> Trained:
    return open_run(Path("digits"))


def test_its_settings_are_those_of_the_preset(shipped: Trained):
    preset = resolve(load_config("digits"), shipped.data())
    for section in ("data", "model", "optim"):
        assert getattr(shipped.config, section) == getattr(preset, section)
    assert (shipped.config.train.steps, shipped.config.train.batch_size) == (800, 64)
    assert shipped.config.model.lipschitz is None


def test_its_likelihood_is_the_documented_one(shipped: Trained):
    bits = bits_per_dim(shipped.log_likelihoods(shipped.data().test), shipped.event_shape)
    assert f"{float(bits.mean()):.3f} bits per dimension" in DOCS.read_text()


def test_digits_come_back_to_a_hundredth_of_a_grey_level(shipped: Trained):
    layers = [layer for layer in shipped.model.modules() if isinstance(layer, T.ConvSylvester)]
    levels = shipped.model.levels
    y = (shipped.data().test.float() + 0.5) / levels - 0.5
    with torch.no_grad():
        back = shipped.model.flow.decode(shipped.model.flow.encode(y))
    assert float((back - y).abs().max()) * levels < 0.01
    assert max(layer.last_iterations for layer in layers) <= 50
