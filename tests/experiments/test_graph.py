"""`expmflow reproduce graph`: rows that are cut and resumed, and a table that says what was run."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from cli_runs import Outcome, run_command
from expmflow.data.graphs import MIXTURES
from expmflow.data.kinds import graphs as kind_of_graphs
from expmflow.experiments import graph
from expmflow.training.checkpoint import newest_checkpoint
from expmflow.training.run import RunFolder

TINY = {"steps": 2, "decay_every": 5, "test": 60}
ROW = "mog-4-gnf-exp-0"


@pytest.fixture(autouse=True)
def _tiny(monkeypatch):
    monkeypatch.setattr(graph, "PRESETS", {"laptop": TINY, "paper": TINY, "best": TINY, "clipped": TINY})
    monkeypatch.setattr(kind_of_graphs, "DRAWN_GRAPHS", 256)
    monkeypatch.setattr(graph, "entropies", lambda: {"mog-4": 3.632, "mog-9": 4.26, "mog-16": 4.755, "mog-ring": 4.053})


def reproduce(folder: Path, *arguments: str) -> Outcome:
    places = ("--runs", folder / "runs", "--results", folder / "results", "--threads", "1")
    return run_command("reproduce", "graph", *arguments, *places)


def rows(folder: Path, name: str = "graph-laptop") -> list[dict]:
    return json.loads((folder / "results" / f"{name}.json").read_text())["rows"]


def weights(folder: Path, row: str = ROW) -> dict[str, torch.Tensor]:
    found = newest_checkpoint(folder / "runs" / "graph" / "laptop" / row / "checkpoints")
    assert found is not None
    return found.tensors["model"]


class TestTable:
    def test_has_three_models_on_four_data_sets_and_further_seeds(self):
        cells = {(data, model) for data in MIXTURES for model in graph.MODELS}
        laptop, paper = graph.table_rows("laptop"), graph.table_rows("paper")
        assert {(row.data, row.model) for row in laptop} == cells
        assert len(laptop) == 12
        assert paper[:12] == laptop
        assert {(row.data, row.model, row.seed) for row in paper[12:]} == {
            *(("mog-4", model, seed) for model in graph.MODELS for seed in (1, 2)),
            *(("mog-16", "gnf-exp", seed) for seed in (1, 2)),
        }
        assert len({row.name for row in paper}) == len(paper) == 20

    def test_every_row_has_a_config_and_a_number_of_the_paper(self):
        for row in graph.table_rows("paper"):
            config = row.config("paper", threads=1)
            assert (config.data.name, config.model.network) == (row.data, row.model)
            assert (config.train.seed, config.train.steps, config.data.samples) == (row.seed, 2, 60)
            value, error = graph.PAPER[row.data][row.model]
            assert value > graph.entropies()[row.data]
            assert 0 < error < 0.1


class TestReproduce:
    def test_a_row_is_trained_tested_and_written(self, tmp_path: Path):
        outcome = reproduce(tmp_path, "--only", ROW)
        assert outcome.code == 0, outcome.err
        (row,) = rows(tmp_path)
        assert (row["data"], row["model"], row["seed"], row["steps"], row["test_graphs"]) == (
            "mog-4",
            "gnf-exp",
            0,
            2,
            60,
        )
        assert math.isfinite(row["nats_per_node"])
        assert row["standard_error"] > 0
        assert row["command"] == f"expmflow reproduce graph --preset laptop --only {ROW}"
        text = (tmp_path / "results" / "graph-laptop.md").read_text()
        assert f"| {row['nats_per_node']:.4f} ± {row['standard_error']:.4f} |" in text
        assert "times 0.1 every 5 steps" in text
        assert f"{row['nats_per_node']:.4f} nats per node (paper 3.68)" in outcome.err
        self.check_evaluate(tmp_path, row)

    def check_evaluate(self, folder: Path, row: dict) -> None:
        """The weights beside the table, and the run itself, give the same number."""
        for place in (folder / "results" / "graph-laptop" / ROW, folder / "runs" / "graph" / "laptop" / ROW):
            outcome = run_command("evaluate", place, "--json")
            assert outcome.code == 0, outcome.err
            found = json.loads(outcome.out)
            assert found["nll"] / 4 == pytest.approx(row["nats_per_node"], rel=1e-12)
            assert found["nll_standard_error"] / 4 == pytest.approx(row["standard_error"], rel=1e-9)
            assert found["rows"] == 60

    def test_rows_are_added_one_by_one_and_never_run_twice(self, tmp_path: Path, monkeypatch):
        assert reproduce(tmp_path, "--only", "mog-4-coupling").code == 0
        (first,) = rows(tmp_path)
        seen: list[int] = []
        save = graph.GraphTable.save

        def saving(table: graph.GraphTable, path: Path, found: list[dict], preset: str) -> None:
            save(table, path, found, preset)
            seen.append(len(rows(tmp_path)))
            lines = (tmp_path / "results" / "graph-laptop.md").read_text().splitlines()
            assert sum(line.startswith("| mog-") for line in lines) == seen[-1]

        monkeypatch.setattr(graph.GraphTable, "save", saving)
        outcome = reproduce(
            tmp_path, "--only", "mog-ring-coupling", "--only", "mog-4-coupling", "--only", "mog-4-gnf-0"
        )
        assert outcome.code == 0, outcome.err
        assert seen == [2, 3]
        assert "mog-4-coupling-0: done already" in outcome.err
        found = rows(tmp_path)
        assert [(row["data"], row["model"]) for row in found] == [
            ("mog-4", "coupling"),
            ("mog-4", "gnf"),
            ("mog-ring", "coupling"),
        ]  # in the order of the table, whenever they were run
        assert found[0] == first

    def test_a_row_that_was_cut_goes_on(self, tmp_path: Path, monkeypatch):
        for place, lengths in (("whole", (4,)), ("parts", (2, 4))):
            for steps in lengths:
                monkeypatch.setitem(graph.PRESETS, "laptop", {**TINY, "steps": steps})
                (tmp_path / place / "results" / "graph-laptop.json").unlink(missing_ok=True)
                assert reproduce(tmp_path / place, "--only", ROW).code == 0
        whole, parts = weights(tmp_path / "whole"), weights(tmp_path / "parts")
        assert all(torch.equal(value, parts[name]) for name, value in whole.items())
        (one,), (other,) = rows(tmp_path / "whole"), rows(tmp_path / "parts")
        # the better of the weights that were validated is tested: at 2 steps there is one validation more
        steps = [m["step"] for m in RunFolder(tmp_path / "parts/runs/graph/laptop" / ROW).read_metrics() if "best" in m]
        assert steps == [2, 4]
        assert one["nats_per_node"] == pytest.approx(other["nats_per_node"], abs=0.2)

    def test_of_several_processes_one_tests_and_writes(self, tmp_path: Path, monkeypatch):
        monkeypatch.setenv("RANK", "1")
        outcome = reproduce(tmp_path, "--only", ROW)
        assert (outcome.code, outcome.out, outcome.err) == (0, "", "")
        assert not (tmp_path / "results").exists()
        assert weights(tmp_path)  # it has trained all the same

    def test_a_row_that_fails_leaves_the_others(self, tmp_path: Path, monkeypatch):
        train = graph.GraphTable.train

        def failing(table: graph.GraphTable, row: graph.Row, *arguments, **options):
            if row.model == "gnf":
                raise KeyboardInterrupt
            return train(table, row, *arguments, **options)

        monkeypatch.setattr(graph.GraphTable, "train", failing)
        outcome = reproduce(tmp_path, "--only", "mog-4")
        assert outcome.code == 130
        assert [row["model"] for row in rows(tmp_path)] == ["coupling"]

    def test_the_papers_length_has_a_table_of_its_own(self, tmp_path: Path):
        assert reproduce(tmp_path, "--preset", "paper", "--only", "mog-4-coupling-2").code == 0
        (row,) = rows(tmp_path, "graph")
        assert row["seed"] == 2
        assert not (tmp_path / "results" / "graph-laptop.json").exists()
        assert (tmp_path / "results" / "graph" / "mog-4-coupling-2" / "model.safetensors").exists()

    def test_seeds_are_averaged(self):
        row = {
            "data": "mog-4",
            "model": "gnf",
            "standard_error": 0.001,
            "paper": 3.69,
            "paper_error": 0.016,
            "steps": 9,
        }
        row |= {"training_seconds": 5, "command": "…", "threads": 1}
        found = [row | {"seed": seed, "nats_per_node": nats} for seed, nats in enumerate((3.70, 3.72, 3.68))]
        assert "seeds |" not in graph.results_text(found[:1], "paper")
        last = graph.results_text(found, "paper").splitlines()[-1]
        assert "| mog-4 | gnf | 3 seeds | 3.632 | 3.69 ± 0.016 | **3.7000** ± 0.0200 | 0.068 |" in last

    def test_the_best_models_have_a_table_of_their_own(self, tmp_path: Path):
        assert [row.name for row in graph.table_rows("best")] == [
            f"{data}-sorted-0" for data in ("mog-4", "mog-ring", "mog-9", "mog-16")
        ]
        assert reproduce(tmp_path, "--preset", "best", "--only", "mog-ring").code == 0
        (row,) = rows(tmp_path, "graph-best")
        assert (row["model"], row["paper"]) == ("sorted", graph.PAPER["mog-ring"]["gnf-exp"][0])
        text = (tmp_path / "results" / "graph-best.md").read_text()
        assert "its best model, gnf-exp" in text
        assert "Adam at 0.002, times 0.3" in text
        assert reproduce(tmp_path, "--preset", "best", "--only", "mog-ring").err.startswith("mog-ring-sorted-0: done")

    def test_clipped_gradients_have_a_table_of_their_own(self, tmp_path: Path):
        name = "mog-16-gnf-exp-0"
        assert [row.name for row in graph.table_rows("clipped")] == ["mog-16-gnf-0", name]
        clipped, paper = (graph.Row("mog-16", "gnf-exp", 0).config(preset) for preset in ("clipped", "paper"))
        assert clipped == paper.model_copy(update={"optim": paper.optim.model_copy(update={"clip": graph.CLIP})})
        assert reproduce(tmp_path, "--preset", "clipped", "--only", name).code == 0
        (row,) = rows(tmp_path, "graph-clipped")
        assert row["command"] == f"expmflow reproduce graph --preset clipped --only {name}"
        assert "a norm of 5,000" in (tmp_path / "results" / "graph-clipped.md").read_text()


class TestDryRun:
    def test_lists_the_rows_and_writes_nothing(self, tmp_path: Path):
        outcome = reproduce(tmp_path, "--dry-run")
        assert outcome.code == 0
        assert [line.partition(":")[0] for line in outcome.out.splitlines()] == [
            row.name for row in graph.table_rows("laptop")
        ]
        assert list(tmp_path.iterdir()) == []

    def test_knows_what_is_done(self, tmp_path: Path):
        reproduce(tmp_path, "--only", "mog-4-coupling")
        outcome = reproduce(tmp_path, "--dry-run", "--only", "mog-4")
        done, *others = outcome.out.splitlines()
        assert done.startswith("mog-4-coupling-0: done, in ")
        assert others == ["mog-4-gnf-0: 2 steps", "mog-4-gnf-exp-0: 2 steps"]


class TestRefusals:
    @pytest.mark.parametrize("names", [("mog-5",), ("mog-4", "mog-4-gcn"), ("gnf",)])
    def test_names_of_no_row(self, tmp_path: Path, names):
        outcome = reproduce(tmp_path, *(part for name in names for part in ("--only", name)))
        assert outcome.code == 1
        assert outcome.err.startswith("Expected --only to begin the name of a row (mog-4-coupling-0, ")
        assert outcome.err.endswith(f"; got {names[-1]}.")
        assert list(tmp_path.iterdir()) == []

    def test_a_preset_that_is_none(self, tmp_path: Path):
        outcome = reproduce(tmp_path, "--preset", "huge")
        assert outcome.code == 2
        assert "huge" in outcome.err

    def test_an_experiment_that_is_none(self):
        outcome = run_command("reproduce", "tables")
        assert outcome.code == 2
        assert "tables" in outcome.err

    @pytest.mark.parametrize("text", ["{", "[]", '{"rows": [{"data": "mog-4"}]}', '{"rows": 3}', "\x00"])
    def test_results_that_are_damaged(self, tmp_path: Path, text):
        """And they are left as they are."""
        path = tmp_path / "results" / "graph-laptop.json"
        path.parent.mkdir()
        path.write_text(text)
        outcome = reproduce(tmp_path, "--only", ROW)
        assert outcome.code == 1
        assert outcome.err.startswith(f"Expected the rows of a table in {path}; got: ")
        assert path.read_text() == text

    def test_results_of_another_table(self, tmp_path: Path):
        path = tmp_path / "results" / "graph-laptop.json"
        path.parent.mkdir()
        path.write_text('{"rows": [{"data": "mog-5", "model": "gnf", "seed": 0}]}')
        outcome = reproduce(tmp_path, "--only", ROW)
        assert outcome.code == 1
        assert outcome.err == f"Expected rows of the table in {path}; got mog-5-gnf-0."
