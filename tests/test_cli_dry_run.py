"""`--dry-run`: of every command, and nothing is written."""

import re
from pathlib import Path

import pytest
import torch

import expmflow as ef
from cli_runs import TINY, run_command, train_tiny
from expmflow.cli.measure import estimate, peak_bytes, size_text, time_text
from expmflow.distributions.describe import count_parameters


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_tiny(tmp_path_factory.mktemp("runs") / "tiny")


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def lines(text: str) -> dict[str, str]:
    """What stands behind each name."""
    *described, last = text.splitlines()
    assert last == "nothing was written"
    return dict(re.split(" +", line, maxsplit=1) for line in described)


COMMANDS = {
    "train": ("train", "moons", *TINY),
    "evaluate": ("evaluate", "RUN", "--split", "validation"),
    "sample": ("sample", "RUN", "-n", "5000", "--out", "s.csv"),
    "score": ("score", "RUN", "t.csv", "--out", "scores.csv"),
    "report": ("report", "RUN"),
    "data": ("data", "t.csv"),
}
EXPECTED = {
    "train": {"data": "240 rows of shape (2,): 192 for training, 24 for validation, 24 for test"},
    "evaluate": {"rows": "24 for validation, of shape (2,)", "writes": "nothing but what it prints"},
    "sample": {"rows": "5000 samples, of shape (2,)", "writes": "s.csv"},
    "score": {
        "rows": "1 of t.csv, of shape (2,)",
        "writes": "scores.csv",
    },
    "report": {"writes": "RUN/report.html"},
    "data": {"reads": "t.csv, 8 B"},
}


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_can_be_tried(command: str, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "t.csv").write_text("a,b\n1,2\n")
    before = contents(run)
    outcome = run_command(*(str(run) if a == "RUN" else a for a in COMMANDS[command]), "--dry-run")
    assert outcome.code == 0, outcome.err
    found = lines(outcome.out)
    for name, text in EXPECTED[command].items():
        assert found[name] == text.replace("RUN", str(run))
    parameters = f"{count_parameters(ef.load(run)):,}"
    if command in ("train", "evaluate", "sample", "score"):
        assert found["parameters"] == parameters
        assert re.match(r"about [\d.]+ [kM]?B: ", found["memory"])
        assert re.match(r"about [\d.e-]+ s", found["time"])
    if command == "report":
        assert found["run"].endswith(f"{run}; its data: moons; {parameters} parameters")
        assert re.match(r"about [\d.]+ [kM]?B, ", found["memory"])
        assert re.match(r"about [\d.e-]+ s", found["time"])
    assert contents(run) == before
    assert list(tmp_path.iterdir()) == [tmp_path / "t.csv"]


@pytest.mark.parametrize(
    "settings",
    [
        "{data: {name: mog-4, samples: 500}, model: {kind: graph, subflows: 1, hidden: 4}, train: {batch_size: 8}}",
        "{data: {name: digits}, model: {kind: image, levels: 1, subflows: 1, growth: 4, depth: 1, conditional: true}, "
        "train: {batch_size: 8}}",
    ],
    ids=["graphs", "images with classes"],
)
def test_other_kinds_of_data_can_be_tried(settings: str, tmp_path: Path):
    (tmp_path / "config.yaml").write_text(settings)
    outcome = run_command("train", tmp_path / "config.yaml", "--out", tmp_path / "run", "--dry-run")
    assert outcome.code == 0, outcome.err
    assert lines(outcome.out).keys() == {"reads", "writes", "data", "parameters", "memory", "time"}
    assert list(tmp_path.iterdir()) == [tmp_path / "config.yaml"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("evaluate", "nowhere"), "Expected a run in nowhere; got no such folder."),
        (("sample", "RUN", "-n", "0"), "Expected the number of samples of at least 1; got 0."),
        (("sample", "RUN", "--temperature", "-1"), "Expected a positive temperature; got -1.0."),
        (("score", "RUN", "missing.csv"), "Expected the file missing.csv; got none."),
        (("report", "nowhere"), "Expected a run in nowhere; got no such folder."),
        (("data", "missing.csv"), "Expected the file missing.csv; got none."),
        (("data", "moon"), "(did you mean 'moons'?)"),
        (("train", "moons", "train.batch_size=99999"), "Expected a batch of at most 8000 rows"),
    ],
)
def test_what_cannot_be_done_is_said_without_doing_it(run: Path, arguments: tuple[str, ...], message: str):
    outcome = run_command(*(str(run) if a == "RUN" else a for a in arguments), "--dry-run")
    assert outcome.code == 1
    assert message in outcome.err


def test_a_folder_of_graphs_is_not_one_of_images(tmp_path: Path):
    (tmp_path / "nodes.csv").write_text("graph,node,a,b\n1,1,0,0\n")
    assert lines(run_command("data", tmp_path, "--dry-run").out) == {"reads": f"the graphs in {tmp_path}"}


def test_drawn_data_are_not_read():
    assert lines(run_command("data", "moons", "--dry-run").out) == {"reads": "nothing: moons is drawn"}


# --- how it is measured ----------------------------------------------------------------------------------------------


def test_memory_is_counted_until_it_is_given_back():
    def chain(kept: list[torch.Tensor] | None) -> None:
        x = torch.zeros(1000)  # 4 kB
        for _ in range(5):
            x = x + 1
            if kept is not None:
                kept.append(x[:1])  # a view keeps all of it

    assert peak_bytes(lambda: chain(None)) == 8000
    assert peak_bytes(lambda: chain([])) == 20000


def test_memory_of_a_backward_pass_holds_what_it_needs():
    x = torch.zeros(1000, requires_grad=True)

    def work() -> None:
        y = x
        for _ in range(10):
            y = y.sin()
        y.sum().backward()

    assert 36_000 <= peak_bytes(work) <= 60_000


def test_estimates_grow_with_the_rows_and_memory_with_the_batch():
    weight = torch.randn(400, 400)

    def work(rows: int) -> None:
        x = torch.ones(rows, 400)
        for _ in range(20):
            x = x @ weight

    few, many = estimate(work, 1000, 1000), estimate(work, 100_000, 1000)
    assert few.bytes == pytest.approx(many.bytes) == pytest.approx(2 * 1000 * 400 * 4, rel=0.01)
    assert many.seconds > 5 * few.seconds  # a hundred times, were the machine quiet
    assert estimate(work, 1, 1000).bytes == 2 * 400 * 4


@pytest.mark.parametrize(("count", "text"), [(0, "0 B"), (999, "999 B"), (1234, "1.23 kB"), (5e9, "5 GB")])
def test_sizes(count: float, text: str):
    assert size_text(count) == text


@pytest.mark.parametrize(("seconds", "text"), [(0.0123, "0.012 s"), (9.4, "9.4 s"), (61, "0:01:01")])
def test_times(seconds: float, text: str):
    assert time_text(seconds) == text
