"""The committed tables: beside every row weights that were trained as it says, and have the likelihood it states."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

import expmflow as ef
from expmflow.data.graphs import MIXTURES
from expmflow.distributions.describe import count_parameters
from expmflow.experiments import graph
from expmflow.experiments.experiment import Experiment
from expmflow.experiments.images import ImageTable
from expmflow.experiments.page import BEGIN, END, page_text, update_page
from expmflow.experiments.registry import EXPERIMENTS
from expmflow.experiments.table import seconds_words
from expmflow.experiments.vae import VAE_TABLE
from expmflow.experiments.values import Values
from expmflow.training.build import build_model
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


IMAGE_TABLES = [
    pytest.param(table, preset, table.results_file(RESULTS, preset), id=f"{table.name}-{preset}")
    for table in EXPERIMENTS.values()
    if isinstance(table, ImageTable)
    for preset in table.presets
    if table.results_file(RESULTS, preset).exists()
]
IMAGE_ROWS = [
    pytest.param(table, preset, row, id=f"{given.id}-{table.row_name(row)}")
    for given in IMAGE_TABLES
    for table, preset, path in [given.values]
    for row in table.load(path)
]


WITH_DIFFERENCES = [
    *IMAGE_TABLES,
    *(
        pytest.param(VAE_TABLE, preset, VAE_TABLE.results_file(RESULTS, preset), id=f"vae-{preset}")
        for preset in VAE_TABLE.presets
        if VAE_TABLE.results_file(RESULTS, preset).exists()
    ),
]


@pytest.mark.parametrize(("table", "preset", "path"), WITH_DIFFERENCES)
def test_the_text_of_a_table_with_differences_is_that_of_its_rows(table: Experiment, preset: str, path: Path):
    contents = json.loads(path.read_text())
    assert path.with_suffix(".md").read_text() == table.text(contents, preset)
    assert contents["differences"] == table.more(contents["rows"], path.with_suffix(""), preset)["differences"]


@pytest.mark.parametrize(("table", "preset", "row"), IMAGE_ROWS)
def test_an_image_row_is_what_its_images_say(table: ImageTable, preset: str, row: dict):
    """Means and errors of the likelihoods beside it; sizes and steps of the preset."""
    (asked,) = (r for r in table.rows(preset) if r.name == table.row_name(row))
    config = asked.config(preset)
    assert (row["steps"], row["batch_size"]) == (config.train.steps, config.train.batch_size)
    assert row["parameters"] == count_parameters(build_model(config, (3, 32, 32)))
    tried = {float(rate): nll or float("inf") for rate, nll in row["tried"].items()}
    assert row["lr"] == (min(tried, key=tried.__getitem__) if tried else config.optim.lr)
    measured = Values.load(table.results_file(RESULTS, preset).with_suffix(""), asked.name).measures()
    for name, value in measured.items():
        assert value is row[name] is None or row[name] == pytest.approx(value, abs=1e-5)


def test_the_page_has_the_numbers_of_all_tables():
    text = (RESULTS / "README.md").read_text()
    assert text.partition(BEGIN)[2].partition(END)[0].strip() == page_text(RESULTS).strip()


def section(title: str) -> str:
    return (RESULTS / "README.md").read_text().partition(f"## {title}\n")[2].partition("\n## ")[0]


def test_the_numbers_in_the_words_on_image_tables_are_printed_by_the_tables():
    """Those of three digits or more, rounded as they are there."""
    pages = [path.with_suffix(".md").read_text() for _, _, path in (given.values for given in IMAGE_TABLES)]
    printed = {float(number) for page in pages for number in re.findall(r"\d+\.\d+", page)}
    quoted = re.findall(r"\d+\.\d{3,}", section("The image tables, and what of them came out"))
    assert len(quoted) > 10
    missing = [n for n in quoted if not any(abs(value - float(n)) <= 0.5001e-3 for value in printed)]
    assert not missing


def test_the_differences_in_the_words_on_the_vae_table_are_printed_by_it():
    """Ours, and the paper's in brackets behind it, of the same two rows."""
    lines = [line.split(" | ") for line in (RESULTS / "vae.md").read_text().splitlines() if line.count(" | ") == 6]
    printed = {
        tuple(abs(float(cell.partition(" ±")[0])) for cell in (ours, paper))
        for _, _, _, paper, ours, *_ in lines
        if paper[0] in "+-" and "---" not in paper
    }
    quoted = re.findall(r"(\d+\.\d)\d?(?: ± 0\.\d+)? \((\d\.\d)", section("The VAE table, and what of it came out"))
    assert len(quoted) >= 7
    for pair in quoted:
        numbers = tuple(map(float, pair))
        assert any(all(abs(a - b) <= 0.051 for a, b in zip(numbers, those, strict=True)) for those in printed), (
            f"{pair} in no line"
        )


def test_the_timings_are_those_of_the_benchmarks():
    """And the paper's beside them: ours and the difference."""
    text = (RESULTS.parent / "benchmarks" / "README.md").read_text().partition("<!-- begin papermodels -->")[2]
    measured = {}
    for line in text.partition("<!-- end papermodels -->")[0].splitlines():
        name, *cells = line.strip("| ").split(" | ")
        if "growth 63" in name and cells[0] != "–":
            measured[name.partition(",")[0]] = [cells[k].strip("*") for k in (0, 1, 4, 5)]
    names = {"emerging": "Emerging", "woodbury": "Woodbury", "convexp": "convolution exponential"}
    assert set(measured) == set(names)
    for name, (*training, paper, ours) in measured.items():
        for measure, pair in (("training", training), ("sampling", (paper, ours))):
            line = f"| {names[name]} | {measure}, % | {pair[0]} | {pair[1]} | {float(pair[1]) - float(pair[0]):+.1f} |"
            assert line in section("Timings")


def test_a_page_is_brought_up_to_date(tmp_path: Path):
    assert not update_page(tmp_path)
    (tmp_path / "graph.json").write_text((RESULTS / "graph.json").read_text())
    (tmp_path / "README.md").write_text(f"before\n{BEGIN}old\n{END}after\n")
    assert update_page(tmp_path)
    text = (tmp_path / "README.md").read_text()
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert "old" not in text
    assert "| mog-4, gnf-exp | nats per node | 3.680 ± 0.017 | 3.683 ± 0.014 | +0.003 |" in text
    assert "| mog-ring, the data | entropy, nats per node | 4.050 ± 0.001 | 4.053 | +0.003 |" in text
    ours = [line.split(" | ")[3] for line in text.splitlines() if line.count(" | ") == 4]
    assert not any(cell.endswith(" 0.000") for cell in ours)  # an error has at least one digit that says something
    assert update_page(tmp_path)
    assert (tmp_path / "README.md").read_text() == text


def test_the_words_on_seconds_count_the_rows_that_were_timed_again():
    """Nothing says what the machine did meanwhile: the table of VAEs has steps that take longer than in training."""
    rows: list[dict] = [{"threads": 1}, {"threads": 2, "timed_threads": 1}]
    assert seconds_words(rows[:1]) == "Seconds are those of training, with threads: 1."
    assert "with threads: 1 or 2. Those of a step were measured again afterwards for 1 of the 2 rows" in seconds_words(
        rows
    )
    assert "for each row, with threads: 1;" in seconds_words(rows[1:])
