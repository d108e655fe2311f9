"""Runs that were altered by hand, by another version, or by a failing disk."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch

import expmflow as ef
from cli_runs import TINY, run_command, train_tiny
from expmflow.training.checkpoint import (
    Checkpoint,
    CheckpointError,
    list_checkpoints,
    load_checkpoint,
    save_checkpoint,
)
from expmflow.training.run import RunFolder


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_tiny(tmp_path_factory.mktemp("runs") / "tiny")


@pytest.fixture
def run(original: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    return shutil.copytree(original, tmp_path / "run")


def flip(path: Path, place: int) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 0x40
    path.write_bytes(content)


def newer(path: Path) -> None:
    values = json.loads(path.read_text())
    path.write_text(json.dumps({**values, "format_version": 99}))


def test_a_run_of_a_newer_version_is_refused_with_that_sentence(run: Path):
    newer(run / "config.json")
    for arguments in (("evaluate", run), ("sample", run), ("report", run), ("train", "moons", *TINY, "--out", run)):
        outcome = run_command(*arguments)
        assert outcome.code == 1
        assert "Expected format version 1 or older in" in outcome.err
        assert outcome.err.endswith("got 99: a newer expmflow wrote it.")


def test_a_checkpoint_of_a_newer_version_is_refused(run: Path):
    newer(list_checkpoints(run / "checkpoints")[0] / "manifest.json")
    outcome = run_command("train", "moons", *TINY, "train.steps=8", "--out", run)
    assert outcome.code == 1
    assert outcome.err.endswith("got 99: a newer expmflow wrote it.")


@pytest.mark.parametrize("damage", ["altered", "cut", "gone"])
@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors", "state.json", "manifest.json"])
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_used(run: Path, original: Path, name: str, damage: str):
    newest, before = list_checkpoints(run / "checkpoints")[:2]
    file = newest / name
    if damage == "altered":
        flip(file, file.stat().st_size // 2)
    elif damage == "cut":
        file.write_bytes(file.read_bytes()[:-7])
    else:
        file.unlink()
    outcome = run_command("train", "moons", *TINY, "--out", run)
    assert outcome.code == 0, outcome.err
    assert str(newest) in outcome.err
    assert "Using the checkpoint before it." in outcome.err
    assert f"Resuming at step {int(before.name[5:])}." in outcome.err
    for key, tensor in ef.load(original).state_dict().items():
        assert torch.equal(tensor, ef.load(run).state_dict()[key]), key


@pytest.mark.parametrize(("place", "message"), [(3, "Expected weights in"), (-50, "Expected the weights in")])
def test_damaged_weights_are_one_sentence(run: Path, place: int, message: str):
    weights = run / "model.safetensors"
    flip(weights, place)
    for arguments in (("evaluate", run), ("sample", run), ("report", run)):
        outcome = run_command(*arguments)
        assert outcome.code == 1
        assert outcome.err.startswith(f"{message} {weights}")


def test_missing_weights_are_one_sentence(run: Path):
    (run / "model.safetensors").unlink()
    outcome = run_command("evaluate", run)
    assert outcome.code == 1
    assert outcome.err.startswith(f"Expected weights in {run / 'model.safetensors'}; got: No such file")


def test_weights_of_another_model_are_one_sentence(run: Path):
    config = json.loads((run / "config.json").read_text())
    config["config"]["model"]["coeff"] = 0.8  # the weights fit, and mean something else
    (run / "config.json").write_text(json.dumps(config))
    outcome = run_command("evaluate", run)
    assert outcome.code == 1
    assert outcome.err.endswith("to have the checksum beside it; got another: it was altered.")
    del config["model_sha256"]
    config["config"]["model"]["hidden"] = 9
    (run / "config.json").write_text(json.dumps(config))
    outcome = run_command("evaluate", run)
    assert outcome.code == 1
    assert "to fit the model; got:" in outcome.err


def test_data_may_move(run: Path, tmp_path: Path):
    elsewhere = tmp_path / "elsewhere.csv"
    elsewhere.write_text("".join(f"{k / 10},{k * k % 7 / 20 + 0.01}\n" for k in range(50)))
    config = json.loads((run / "config.json").read_text())
    config["config"]["data"] |= {"name": "table", "path": str(elsewhere)}
    (run / "config.json").write_text(json.dumps(config))
    outcome = run_command("evaluate", run)
    assert outcome.code == 0
    assert "The data is not what it was when the run in" in " ".join(outcome.err.split())


@pytest.mark.parametrize("text", ["", "{", "[]", '{"format_version": "1"}', '{"format_version": 1, "event_shape": []}'])
def test_a_damaged_config_is_one_sentence(run: Path, text: str):
    (run / "config.json").write_text(text)
    with pytest.raises((CheckpointError, ValueError), match="Expected "):
        ef.load(run)
    outcome = run_command("evaluate", run)
    assert outcome.code in (1, 2)
    assert outcome.err.startswith("Expected ")


def test_a_config_that_asks_for_too_much_memory_is_one_sentence(run: Path):
    config = json.loads((run / "config.json").read_text())
    del config["model_sha256"]
    config["config"]["model"]["hidden"] = 10**6
    (run / "config.json").write_text(json.dumps(config))
    outcome = run_command("evaluate", run)
    assert outcome.code == 1
    assert "Expected enough memory; got too little." in outcome.err


DEEP = "[" * 100_000


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("event_shape", ["many"], "Expected the shape of an event in"),
        ("event_shape", [10**30], "Expected the shape of an event in"),
        ("names", "many", "Expected names of columns in"),
        ("format_version", "many", "Expected a version number in"),
        ("config", {"train": {"steps": "many"}}, "Expected a valid config; got 1 problem: train.steps: "),
        ("config", {"train": "many"}, "Expected a valid config; got 1 problem: train: "),
        ("config", "many", "Expected a config of sections"),
    ],
)
def test_words_for_numbers_in_a_config_are_one_sentence(run: Path, key: str, value: object, message: str):
    values = json.loads((run / "config.json").read_text())
    (run / "config.json").write_text(json.dumps({**values, key: value}))
    for command in ("evaluate", "sample", "report"):
        outcome = run_command(command, run)
        assert outcome.code in (1, 2)
        assert outcome.err.startswith(message)


@pytest.mark.parametrize("value", [DEEP, "9" * 6000], ids=["deep", "digits"])
def test_json_that_no_parser_takes_is_one_sentence(run: Path, value: str):
    whole = (run / "config.json").read_text().rstrip().removesuffix("}")
    (run / "config.json").write_text(f'{whole}, "more": {value}')
    outcome = run_command("evaluate", run)
    assert outcome.code == 1
    assert outcome.err.startswith(f"Expected a run's config in {run / 'config.json'}; got: ")


@pytest.mark.parametrize(
    "manifest",
    [
        DEEP,
        '{"format_version": 1, "files": {"state.json": "many"}}',
        '{"format_version": 1, "files": {"state.json": {"bytes": "many", "sha256": "x"}}}',
        '{"format_version": 1, "files": {"state.json": {}, "../../config.json": {}}}',
        '{"format_version": "one", "files": {}}',
    ],
    ids=["deep", "word", "bytes", "place", "version"],
)
def test_a_manifest_that_says_something_else_is_named(run: Path, manifest: str):
    newest = list_checkpoints(run / "checkpoints")[0]
    (newest / "manifest.json").write_text(manifest)
    outcome = run_command("train", "moons", *TINY, "--out", run)
    assert outcome.code == 0, outcome.err
    assert str(newest) in outcome.err
    assert "Using the checkpoint before it." in outcome.err


LINES = (
    DEEP,
    '{"step": 3, "nll": "many"}',
    '{"step": 4, "validation_nll": [1], "best": "yes"}',
    '{"step": ' + "9" * 400 + ', "nll": 1.0}',
    '{"step": ' + "9" * 6000 + "}",
    '"step"',
)


def test_lines_of_metrics_that_are_no_numbers_are_left_out(run: Path):
    metrics = run / "metrics.jsonl"
    before = RunFolder(run).read_metrics()
    with open(metrics, "a") as file:
        file.write("\n".join(LINES))
    assert RunFolder(run).read_metrics() == before
    assert run_command("report", run).code == 0
    metrics.write_text("\n".join(LINES))
    assert RunFolder(run).read_metrics() == []
    assert run_command("report", run).code == 0
    outcome = run_command("train", "moons", *TINY, "--out", run)
    assert outcome.code == 0, outcome.err
    assert "Done at step 6" in outcome.err


def one_more(tensor: torch.Tensor) -> torch.Tensor:
    return torch.cat([tensor.reshape(-1), tensor.new_zeros(1)])


def other_checkpoint(group: str, change: str, known: Checkpoint) -> Checkpoint:
    """What a checkpoint of another model would hold, with checksums of its own."""
    tensors, state = {name: dict(values) for name, values in known.tensors.items()}, dict(known.state)
    if group == "state":
        state |= {"best": "many"} if change == "word" else {"stale": None}
    elif change == "gone":
        del tensors[group]
    else:
        name = sorted(tensors[group])[0]
        tensor = tensors[group].pop(name)
        if change == "shape":
            tensors[group][name] = one_more(tensor)
        elif change == "name":
            tensors[group][f"{name}x"] = tensor
    return Checkpoint(known.step, tensors, state)


@pytest.mark.parametrize(
    ("group", "change"),
    [(group, change) for group in ("model", "optimizer", "average") for change in ("shape", "name", "less", "gone")]
    + [("state", "word"), ("state", "null")],
)
def test_a_checkpoint_of_another_model_is_one_sentence(run: Path, group: str, change: str):
    (newest, *_) = list_checkpoints(run / "checkpoints")
    save_checkpoint(run / "checkpoints", other_checkpoint(group, change, load_checkpoint(newest)))
    outcome = run_command("train", "moons", *TINY, "train.steps=8", "--out", run)
    assert outcome.code == 1
    assert "Expected the checkpoint of step 6 to fit the model; got: " in outcome.err


def test_what_is_no_file_is_not_waited_for(run: Path):
    for name in ("config.json", "model.safetensors"):
        content = (run / name).read_bytes()
        (run / name).unlink()
        os.mkfifo(run / name)
        outcome = run_command("evaluate", run)
        assert outcome.code == 1
        assert "no regular file" in outcome.err
        (run / name).unlink()
        (run / name).write_bytes(content)


def test_a_run_whose_data_was_in_the_home_of_nobody_is_one_sentence(run: Path):
    values = json.loads((run / "config.json").read_text())
    values["config"]["data"] |= {"name": "table", "path": "~nosuchuser/x.csv"}
    (run / "config.json").write_text(json.dumps(values))
    outcome = run_command("train", "moons", *TINY, "--out", run)
    assert outcome.code == 1
    assert outcome.err.endswith("Expected the home folder of a user in ~nosuchuser/x.csv; got none for ~nosuchuser.")
