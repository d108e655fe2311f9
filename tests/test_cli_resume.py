"""Going on with a run: by its folder alone, with named differences, wherever its data is now."""

import csv
import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

import expmflow as ef
from cli_runs import TINY, files, run_command, train_tiny
from expmflow.cli import device
from expmflow.training.run import RunFolder


def table(path: Path, seed: int = 0) -> Path:
    rows = np.random.default_rng(seed).normal(size=(120, 2))
    with open(path, "w", newline="") as file:
        csv.writer(file).writerows([["a", "b"], *rows.tolist()])
    return path


def train_table(path: str | Path, out: str | Path, *settings: str):
    return run_command("train", "table", f"data.path={path}", *TINY[1:], *settings, "--out", out)


def test_a_run_goes_on_by_its_folder_alone(tmp_path: Path, here: Path):
    whole = train_tiny(tmp_path / "whole")
    part = train_tiny(tmp_path / "part", "train.steps=3")
    on = run_command("train", "--resume", part, "train.steps=6")
    assert on.code == 0, on.err
    assert f"Resuming the run in {part}" in on.err
    for name, value in ef.load(whole).state_dict().items():
        assert torch.equal(value, ef.load(part).state_dict()[name])
    done = run_command("train", "--resume", part)
    assert done.code == 0, done.err
    assert "Done at step 6" in done.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("train",), "Expected a preset, a config file or --resume RUN; got none. See expmflow train --help."),
        (("train", "--resume", "nowhere"), "Expected a run in nowhere; got no config.json in it."),
        (("train", "--resume", "a", "--out", "b"), "Expected --out or --resume, one of them; got both."),
    ],
)
def test_what_cannot_go_on_is_one_sentence(here: Path, arguments: tuple[str, ...], message: str):
    outcome = run_command(*arguments)
    assert outcome.code in (1, 2)
    assert outcome.err == message
    assert files(here) == set()


def test_differences_are_named(tmp_path: Path):
    run = train_tiny(tmp_path / "run")
    outcome = run_command("train", "moons", *TINY, "optim.lr=0.5", "model.hidden=16", "--out", run)
    assert outcome.code == 2
    assert "got another: model.hidden is 16, and was 8; optim.lr is 0.5, and was 0.002." in outcome.err
    assert outcome.err.endswith(f"expmflow train --resume {run}.")
    longer = run_command("train", "--resume", run, "optim.lr=0.5")
    assert longer.code == 2
    assert "optim.lr is 0.5, and was 0.002." in longer.err


def test_paths_are_places(here: Path, monkeypatch: pytest.MonkeyPatch):
    table(here / "t.csv")
    (here / "other").symlink_to(here, target_is_directory=True)
    assert train_table("t.csv", "run", "train.steps=3").code == 0
    for path in (here / "t.csv", "other/t.csv", "./run/../t.csv"):
        assert train_table(path, "run", "train.steps=3").code == 0, path
    table(here / "u.csv", seed=1)
    other = train_table("u.csv", "run")
    assert other.code == 2
    assert f"data.path is {here / 'u.csv'}, and was {here / 't.csv'}." in other.err


def test_data_that_has_moved_is_the_same_data(here: Path):
    table(here / "t.csv")
    assert train_table("t.csv", "run", "train.steps=3").code == 0
    shutil.move(here / "t.csv", here / "moved.csv")
    on = run_command("train", "--resume", "run", "data.path=moved.csv", "train.steps=6")
    assert on.code == 0, on.err
    assert RunFolder(here / "run").read_config()[0].data.path == here / "moved.csv"


def test_data_that_is_nowhere_is_one_sentence_that_says_what_to_do(here: Path):
    table(here / "t.csv")
    assert train_table("t.csv", "run", "train.steps=3").code == 0
    (here / "t.csv").unlink()
    outcome = run_command("train", "--resume", "run")
    assert outcome.code == 1
    assert outcome.err == f"Expected the run's data in {here / 't.csv'}; got none. Say where it is now: data.path=…."


@pytest.mark.parametrize("command", ["evaluate", "sample", "report"])
def test_folders_that_hold_no_run_are_one_sentence(here: Path, command: str):
    (here / "photos").mkdir()
    assert run_command(command, "photos").err == "Expected a run in photos; got no config.json in it."
    ef.save(ef.Flow(ef.transforms.ActNorm(2), ef.distributions.StandardNormal((2,))), here / "flow")
    outcome = run_command(command, "flow")
    assert outcome.code == 1
    assert outcome.err.endswith("in flow; got a flow that ef.save wrote, for ef.load in Python.")


def test_a_folder_with_other_files_is_no_place_for_a_run(here: Path):
    (here / "photos").mkdir()
    (here / "photos" / "cat.txt").write_text("meow")
    outcome = run_command("train", "moons", *TINY, "--out", "photos")
    assert outcome.code == 1
    assert outcome.err == "Expected --out to be a new folder, or that of a run; got photos, which holds other files."
    assert files(here) == {"photos/cat.txt"}
    (here / "empty").mkdir()
    (here / "empty" / ".hidden").touch()
    assert run_command("train", "moons", *TINY, "--out", "empty").code == 0


def test_the_accelerator_is_taken_if_there_is_one(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    assert device.device_named(None) == "cpu"
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    for present, chosen in (("cuda", "cuda"), ("xpu", "xpu"), ("mps", "cpu")):
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda present=present: torch.device(present))
        assert device.device_named(None) == chosen
        assert device.device_named("cpu") == "cpu"


def test_a_device_that_cannot_be_used_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    assert [device.device_named(name) for name in ("cuda", "cuda:1")] == ["cuda", "cuda:1"]
    for name, refusal in {
        "cuda:2": "Expected the device cuda:2 on this machine; got none.",
        "xpu": "Expected the device xpu on this machine; got none.",
        "mps": "Expected a device with float64, in which likelihoods are summed; got 'mps'.",
        "gpu": "Expected a device such as cpu or cuda; got 'gpu'.",
        "meta": "Expected a device such as cpu or cuda; got 'meta'.",
    }.items():
        with pytest.raises(ValueError, match=f"^{re.escape(refusal)}$"):
            device.device_named(name)


def test_a_run_s_config_is_what_goes_on(tmp_path: Path):
    """A run from another machine names its settings itself, whatever the presets are here."""
    run = train_tiny(tmp_path / "run", "train.steps=3")
    values = json.loads((run / "config.json").read_text())
    assert values["config"]["train"]["steps"] == 3
    assert values["kind"] == "vectors"
