"""Every command, end to end, on graphs."""

import csv
import json
from pathlib import Path

import numpy as np
import pytest

from cli_runs import run_command
from expmflow.data.graphs import MIXTURES
from kind_runs import GRAPHS, train_kind


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_kind(tmp_path_factory.mktemp("graphs") / "run", GRAPHS)


def test_training_leaves_pictures(run: Path):
    for path in (run / "samples.png", run / "samples" / "step-00000003.png"):
        assert path.read_bytes().startswith(b"\x89PNG")


def test_evaluation_is_per_node_beside_the_entropy(run: Path):
    found = json.loads(run_command("evaluate", run, "--json").out)
    assert found["nats_per_node"] == pytest.approx(found["nll"] / 4)
    assert found["entropy_per_node"] == MIXTURES["mog-4"].entropy()
    assert found["gap_per_node"] == pytest.approx(found["nats_per_node"] - found["entropy_per_node"])
    assert found["gap_per_node"] > 0
    text = run_command("evaluate", run).out
    assert "gap, nats per node" in text
    assert "bits" not in text


def test_samples_are_the_same_in_every_format(run: Path, tmp_path: Path):
    for name in ("s.npy", "s.csv", "s.png"):
        assert run_command("sample", run, "-n", "3", "--out", tmp_path / name).code == 0
    drawn = np.load(tmp_path / "s.npy")
    assert drawn.shape == (3, 4, 2)
    with open(tmp_path / "s.csv", newline="") as file:
        header, *rows = csv.reader(file)
    assert header == ["graph", "node", "x1", "x2"]
    assert [row[:2] for row in rows] == [[str(g), str(k)] for g in (1, 2, 3) for k in (1, 2, 3, 4)]
    np.testing.assert_array_equal(np.array(rows)[:, 2:].astype(np.float32), drawn.reshape(12, 2))
    assert run_command("sample", run, "-n", "3").out == (tmp_path / "s.csv").read_text()
    assert (tmp_path / "s.png").read_bytes().startswith(b"\x89PNG")


def test_scores_of_graphs(run: Path, tmp_path: Path):
    assert run_command("sample", run, "-n", "3", "--out", tmp_path / "s.npy").code == 0
    np.save(tmp_path / "far.npy", np.full((1, 4, 2), 1e3))
    outcome = run_command("score", run, tmp_path / "s.npy", tmp_path / "far.npy")
    rows = list(csv.DictReader(outcome.out.splitlines()))
    assert [row["row"] for row in rows] == ["1", "2", "3", "1"]
    assert rows[-1] | {"flagged": "1", "file": str(tmp_path / "far.npy")} == rows[-1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("evaluate", "RUN", "--importance-samples", "5"), "Expected a density known by a bound"),
        (("sample", "RUN", "--classes", "1"), "Expected a conditional model for --classes"),
        (("score", "RUN", "table.csv"), "Expected a .npy file of graphs, of shape (graphs, 4, 2); got table.csv."),
        (("score", "RUN", "missing.npy"), "Expected the file missing.npy; got none."),
        (("score", "RUN", "x.npy"), "Expected floats of shape (graphs, 4, 2) in x.npy; got float64 of shape (2, 3)."),
        (("score", "RUN", "x.npy", "--fit"), "Expected a model of images or binary images"),
    ],
)
def test_mistakes_are_one_sentence(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], message: str
):
    monkeypatch.chdir(tmp_path)
    np.save("x.npy", np.zeros((2, 3)))
    outcome = run_command(*(str(run) if a == "RUN" else a for a in arguments))
    assert outcome.code == 1
    assert message in outcome.err


def test_mixtures_are_described():
    text = " ".join(run_command("data", "mog-9").out.split())
    assert "9, around 9 centres" in text
    assert f"{MIXTURES['mog-9'].entropy():.4f}" in text
