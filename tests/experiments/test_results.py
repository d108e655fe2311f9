"""The committed tables: beside every row weights that were trained as it says, and have the likelihood it states."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import expmflow as ef
from expmflow.data.graphs import MIXTURES
from expmflow.experiments import graph
from expmflow.training.config import Config, TrainConfig, parse_config

RESULTS = Path(__file__).parents[2] / "results"
TABLES = {"paper": "graph", "best": "graph-best", "clipped": "graph-clipped"}
GRAPHS = 2_000


def rows_of(preset: str) -> list[dict]:
    return json.loads((RESULTS / f"{TABLES[preset]}.json").read_text())["rows"]


def name_of(row: dict) -> str:
    return graph.Row(row["data"], row["model"], row["seed"]).name


ROWS = [pytest.param(preset, row, id=f"{preset}-{name_of(row)}") for preset in TABLES for row in rows_of(preset)]


@pytest.mark.parametrize("preset", ["paper", "best"])
def test_every_cell_of_the_table_is_there(preset):
    cells = {(row.data, row.model) for row in graph.table_rows(preset)}
    assert {(row["data"], row["model"]) for row in rows_of(preset)} == cells


@pytest.mark.parametrize("preset", TABLES)
def test_the_text_is_that_of_the_rows(preset):
    assert (RESULTS / f"{TABLES[preset]}.md").read_text() == graph.results_text(rows_of(preset), preset)


def without_threads(config: Config) -> TrainConfig:
    return config.train.model_copy(update={"threads": None})


@pytest.mark.parametrize(("preset", "row"), ROWS)
def test_a_row_was_trained_and_tested_as_the_table_says(preset, row):
    name, settings = name_of(row), graph.PRESETS[preset]
    assert (row["steps"], row["test_graphs"]) == (settings["steps"], settings["test"])
    written = json.loads((RESULTS / TABLES[preset] / name / "config.json").read_text())["config"]
    configs = parse_config(written), graph.Row(row["data"], row["model"], row["seed"]).config(preset)
    trained, asked = (config.model_copy(update={"train": without_threads(config)}) for config in configs)
    assert trained == asked


@pytest.mark.parametrize(("preset", "row"), ROWS)
def test_new_graphs_have_the_likelihood_that_the_table_states(preset, row):
    """Within five standard errors of a smaller sample."""
    model, mixture = ef.load(RESULTS / TABLES[preset] / name_of(row)), MIXTURES[row["data"]]
    graphs = mixture.sample(GRAPHS, torch.Generator().manual_seed(1))
    with torch.no_grad():
        nats = torch.cat([-model.log_prob(part) for part in graphs.split(500)]) / mixture.nodes
    assert abs(float(nats.mean()) - row["nats_per_node"]) < 5 * float(nats.std()) / GRAPHS**0.5
    scale = (row["test_graphs"] / GRAPHS) ** 0.5
    assert row["standard_error"] * scale == pytest.approx(float(nats.std()) / GRAPHS**0.5, rel=0.3)
