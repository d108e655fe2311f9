"""Columns keep their names, from the file to the samples and the scores."""

import csv
import json
from pathlib import Path

import numpy as np
import pytest

import expmflow as ef
from cli_runs import TINY, Outcome, run_command
from expmflow.runs.evaluation import open_run
from expmflow.training.run import RunFolder

NAMES = ("height", "width [mm]", "mass, dry")
ROWS = np.random.default_rng(0).normal(size=(200, 3)) * [1, 10, 100]


def write(path: Path, order: tuple[int, ...] = (0, 1, 2), names: tuple[str, ...] | None = NAMES) -> Path:
    with open(path, "w", newline="") as file:
        writer = csv.writer(file)
        if names is not None:
            writer.writerow([names[k] for k in order])
        writer.writerows(ROWS[:, order].tolist())
    return path


def train(table: Path, folder: Path, *settings: str) -> Outcome:
    return run_command("train", "table", f"data.path={table}", *TINY[1:], *settings, "--out", folder)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("named")
    outcome = train(write(folder / "t.csv"), folder / "run")
    assert outcome.code == 0, outcome.err
    return folder / "run"


def test_a_run_remembers_the_names(run: Path, tmp_path: Path):
    assert json.loads((run / "config.json").read_text())["names"] == list(NAMES)
    assert open_run(run).names == open_run(run).data().names == NAMES
    ef.save_pretrained(run, tmp_path / "copy")
    assert open_run(tmp_path / "copy").names == NAMES


def test_samples_have_them_as_header(run: Path, tmp_path: Path):
    assert run_command("sample", run, "-n", "5", "--out", tmp_path / "s.csv").code == 0
    with open(tmp_path / "s.csv", newline="") as file:
        header, *rows = csv.reader(file)
    assert tuple(header) == NAMES
    assert len(rows) == 5
    assert run_command("score", run, tmp_path / "s.csv").code == 0


def test_scores_do_not_depend_on_the_order_of_named_columns(run: Path, tmp_path: Path):
    straight = run_command("score", run, write(tmp_path / "a.csv"))
    turned = run_command("score", run, write(tmp_path / "b.csv", order=(2, 0, 1)))
    unnamed = run_command("score", run, write(tmp_path / "c.csv", names=None))
    np.save(tmp_path / "d.npy", ROWS)
    array = run_command("score", run, tmp_path / "d.npy")
    assert straight.code == 0
    assert straight.out == turned.out == unnamed.out == array.out
    misplaced = run_command("score", run, write(tmp_path / "e.csv", order=(2, 0, 1), names=None))
    assert misplaced.out != straight.out


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ("height,width [mm],weight", "got no mass, dry and weight besides."),
        ("height,width [mm]", "got no mass, dry."),
        ('height,width [mm],"mass, dry",age', "got age besides."),
    ],
)
def test_columns_of_another_table_are_one_sentence(run: Path, tmp_path: Path, header: str, message: str):
    table = tmp_path / "t.csv"
    width = len(next(csv.reader([header])))
    table.write_text(f"{header}\n{','.join(['1'] * width)}\n")
    outcome = run_command("score", run, table)
    assert outcome.code == 1
    assert outcome.err == f"Expected the columns height, width [mm], mass, dry in {table}; {message}"


def test_data_are_described_by_name(tmp_path: Path):
    table = tmp_path / "[b]t.csv"
    table.write_text("[red],same\n1,7\n3,7\n")
    outcome = run_command("data", table)
    assert "[red]" in outcome.out
    assert "leave them out: data.drop=[same]." in outcome.err


def test_a_run_goes_on_with_its_own_columns_only(tmp_path: Path):
    table = write(tmp_path / "t.csv")
    assert train(table, tmp_path / "run").code == 0
    write(table, order=(2, 0, 1))
    for outcome in (train(table, tmp_path / "run", "train.steps=8"), run_command("evaluate", tmp_path / "run")):
        assert outcome.code in (1, 2)
        assert "Expected the columns height, width [mm], mass, dry" in outcome.err
        assert "got mass, dry, height, width [mm]." in outcome.err
    write(table, names=None)
    assert train(table, tmp_path / "run", "train.steps=8").code == 0
    assert RunFolder(tmp_path / "run").read_names() == NAMES


def test_a_run_from_before_there_were_names_is_opened_and_goes_on(tmp_path: Path):
    table = write(tmp_path / "t.csv")
    assert train(table, tmp_path / "run").code == 0
    config = tmp_path / "run" / "config.json"
    values = json.loads(config.read_text())
    del values["names"]
    config.write_text(json.dumps(values))
    assert run_command("sample", tmp_path / "run").out.startswith("x1,x2,x3\n")
    assert run_command("score", tmp_path / "run", write(tmp_path / "u.csv", names=("a", "b", "c"))).code == 0
    assert train(table, tmp_path / "run", "train.steps=8").code == 0
    assert open_run(tmp_path / "run").names == NAMES


@pytest.mark.parametrize("names", [3, "abc", [1, 2, 3], {"a": 1}, ["a", "b"], ["a", "b", "b"]])
def test_damaged_names_are_one_sentence(run: Path, tmp_path: Path, names: object):
    copy = tmp_path / "copy"
    ef.save_pretrained(run, copy)
    values = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**values, "names": names}))
    outcome = run_command("sample", copy)
    assert outcome.code == 1
    assert outcome.err.startswith(("Expected names of columns in ", "Expected a name for each column of the run in "))
