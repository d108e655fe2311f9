"""Settings that follow the number of rows of a table."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from cli_runs import run_command
from expmflow.data import Dataset
from expmflow.training.build import resolve
from expmflow.training.config import load_config, parse_config
from expmflow.training.sections import ConfigError


def table(rows: int, integers: tuple[int, ...] | None = ()) -> Dataset:
    x = torch.randn(rows, 3, generator=torch.Generator().manual_seed(0))
    return Dataset(x, x[:5], x[:5], integers=integers)


def test_few_rows_have_small_batches_and_frequent_validations():
    found = [resolve(load_config("table"), table(rows)) for rows in (30, 150, 1000, 5000, 50_000)]
    batches = [each.train.batch_size for each in found]
    assert batches == sorted(batches)
    assert batches[0] <= 30
    assert batches[-1] == 256
    intervals = [each.train.validate_every for each in found]
    assert all(20 <= interval <= 100 for interval in intervals)
    assert (intervals[0], intervals[-1]) == (20, 100)
    assert all(each.train.patience == 10 for each in found)
    decay = [each.optim.weight_decay for each in found]
    assert decay == sorted(decay, reverse=True)
    assert [each.model.hidden for each in found] == sorted(each.model.hidden for each in found)


def test_what_is_given_stays():
    config = load_config("table", ["train.batch_size=7", "model.hidden=5", "optim.weight_decay=0.5"])
    found = resolve(config, table(100))
    assert (found.train.batch_size, found.model.hidden, found.optim.weight_decay) == (7, 5, 0.5)


def test_a_resolved_config_is_resolved():
    once = resolve(load_config("table"), table(100, integers=(1,)))
    assert once.model.integers == [1]
    again = resolve(parse_config(json.loads(once.model_dump_json())), table(100, integers=(1,)))
    assert again == once


def test_other_vectors_are_left_as_they_are():
    config = load_config("moons")
    assert resolve(config, table(100, integers=None)).train == config.train
    assert resolve(config, table(100, integers=None)).model.integers is None


def test_whole_numbers_that_the_data_has_not_are_refused():
    with pytest.raises(ConfigError, match=r"Expected model\.integers=\[\], as the data has; got \[1\]\."):
        resolve(load_config("table", ["model.integers=[1]"]), table(100))


def test_a_table_of_strangers_trains_end_to_end(here: Path):
    """Units of all sizes, whole numbers, a column of words that is left out, and semicolons between them."""
    generator = np.random.default_rng(0)
    lines = ["when;kind;count;size"]
    for k in range(120):
        when, count, size = 1.7e9 + generator.normal() * 50, generator.poisson(4), 1e-5 * generator.normal()
        lines.append(f"{when:.3f};{'ab'[k % 2]};{count};{size:.9e}")
    (here / "t.csv").write_text("\n".join(lines))
    refused = run_command("train", "table", "data.path=t.csv")
    assert refused.code == 1
    assert "kind has 'a' in line 2" in refused.err
    assert "data.drop=[kind]" in refused.err
    settings = ("data.drop=[kind]", "train.steps=40", "train.validate_every=20")
    trained = run_command("train", "table", "data.path=t.csv", *settings, "--out", "run")
    assert trained.code == 0, trained.err
    assert "that of a Gaussian of full covariance" in trained.err
    sampled = run_command("sample", "run", "-n", "30")
    header, *rows = [line.split(",") for line in sampled.out.splitlines()]
    assert header == ["when", "count", "size"]
    values = np.array(rows, dtype=float)
    assert (values[:, 1] == values[:, 1].round()).all()
    assert abs(values[:, 0].mean() - 1.7e9) < 100
    assert np.unique(values[:, 0]).size == 30
    scored = run_command("score", "run", "t.csv")  # the file still has the column that was left out
    assert scored.code == 0, scored.err
    assert len(scored.out.splitlines()) == 121
    assert run_command("evaluate", "run").out.count("−ELBO") >= 1
    assert run_command("report", "run").code == 0
    assert run_command("train", "--resume", "run", "train.steps=60").code == 0
