"""The committed tables: weights beside every row, trained as the table says, that have the likelihood which it states."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import expmflow as ef
from expmflow.data.graphs import MIXTURES
from expmflow.experiments import graph

RESULTS = Path(__file__).parents[2] / "results"
TABLES = {"paper": "graph", "best": "graph-best"}
GRAPHS = 2_000


def rows() -> dict[str, tuple[str, dict]]:
    found = {}
    for preset, table in TABLES.items():
        for row in json.loads((RESULTS / f"{table}.json").read_text())["rows"]:
            found[graph.Row(row["data"], row["model"], row["seed"]).name] = preset, row
    return found


ROWS = rows()


@pytest.mark.parametrize("preset", TABLES)
def test_the_whole_table_is_there(preset):
    cells = {(row.data, row.model) for row in graph.table_rows(preset)}
    assert {(row["data"], row["model"]) for known, row in ROWS.values() if known == preset} == cells
    text = (RESULTS / f"{TABLES[preset]}.md").read_text()
    assert text == graph.results_text([row for known, row in ROWS.values() if known == preset], preset)


@pytest.mark.parametrize("name", ROWS)
def test_a_row_was_trained_and_tested_as_the_table_says(name):
    preset, row = ROWS[name]
    settings = graph.PRESETS[preset]
    assert (row["steps"], row["test_graphs"]) == (settings["steps"], settings["test"])
    trained = json.loads((RESULTS / TABLES[preset] / name / "config.json").read_text())["config"]
    asked = graph.Row(row["data"], row["model"], row["seed"]).config(preset).model_dump(mode="json")
    for config in (trained, asked):
        config["train"].pop("threads")
    assert trained == asked


@pytest.mark.parametrize("name", ROWS)
def test_new_graphs_have_the_likelihood_that_the_table_states(name):
    """Within five standard errors of a smaller sample."""
    preset, row = ROWS[name]
    model, mixture = ef.load(RESULTS / TABLES[preset] / name), MIXTURES[row["data"]]
    graphs = mixture.sample(GRAPHS, torch.Generator().manual_seed(1))
    with torch.no_grad():
        nats = torch.cat([-model.log_prob(part) for part in graphs.split(500)]) / mixture.nodes
    assert abs(float(nats.mean()) - row["nats_per_node"]) < 5 * float(nats.std()) / GRAPHS**0.5
    scale = (row["test_graphs"] / GRAPHS) ** 0.5
    assert row["standard_error"] * scale == pytest.approx(float(nats.std()) / GRAPHS**0.5, rel=0.3)
