"""The demo compares what it says it compares."""

from pathlib import Path

import pytest
import torch

from expmflow import demo
from expmflow.distributions.describe import count_parameters
from expmflow.training.build import build_data, build_model, resolve
from expmflow.training.randomness import Randomness


def test_both_models_have_as_many_parameters():
    counts = {}
    for model in demo.MODELS:
        config = demo.config(model, 0.01)
        config = resolve(config, build_data(config.data, Randomness(0)))
        counts[model] = count_parameters(build_model(config, (1, 8, 8)))
    assert counts["sylvester"] == pytest.approx(counts["coupling"], rel=0.02)


def test_both_models_differ_in_nothing_but_model_and_learning_rate():
    one, other = (demo.config(model, demo.CHOSEN[model]).model_dump() for model in demo.MODELS)
    assert one["data"] == other["data"]
    assert one["train"] == other["train"]
    assert {**one["optim"], "lr": 0} == {**other["optim"], "lr": 0}
    assert all(rate in demo.RATES for rate in demo.CHOSEN.values())


def test_the_demo_leaves_a_comparison_a_report_and_samples(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert demo.main(["--out", str(tmp_path), "--steps", "2", "--importance-samples", "2"]) == 0
    printed = capsys.readouterr().out
    assert "coupling − sylvester" in printed
    assert "is ahead" in printed
    assert (tmp_path / "report.html").stat().st_size > 10_000
    assert (tmp_path / "samples.png").stat().st_size > 1_000


def test_the_paired_difference_is_that_of_the_digits():
    worse, better = torch.tensor([2.0, 3.0, 4.0]), torch.tensor([1.5, 2.5, 3.5])
    outcomes = {
        "sylvester": demo.Outcome(1, better, better, 0.0, 1.0),
        "coupling": demo.Outcome(1, worse, worse, 0.0, 1.0),
    }
    last = demo.comparison(outcomes).splitlines()[-1]
    assert "0.5000 ± 0.0000" in last
    assert last.endswith("sylvester is ahead")


@pytest.mark.parametrize("steps", ["0", "many"])
def test_bad_steps_are_refused(steps: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        demo.main(["--out", str(tmp_path), "--steps", steps])
    assert not list(tmp_path.iterdir())
