"""The demo compares what it says it compares."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from expmflow import demo
from expmflow.cli import console
from expmflow.distributions.describe import count_parameters
from expmflow.training.build import build_data, build_model, resolve
from expmflow.training.randomness import Randomness
from expmflow.training.run import RunFolder
from report_page import Page


def test_both_models_have_as_many_parameters():
    counts = {}
    for model in demo.MODELS:
        config = demo.config(model, 0.01)
        config = resolve(config, build_data(config.data, Randomness(0)))
        counts[model] = count_parameters(build_model(config, (1, 8, 8)))
    assert counts["sylvester"] == pytest.approx(counts["coupling"], rel=0.02)


def test_both_models_differ_in_nothing_but_model_and_learning_rate():
    one, other = (demo.config(model, demo.CHOSEN[model]).model_dump() for model in demo.MODELS)
    assert one["data"] == other["data"]
    assert one["train"] == other["train"]
    assert {**one["optim"], "lr": 0} == {**other["optim"], "lr": 0}
    assert all(rate in demo.RATES for rate in demo.CHOSEN.values())


def test_the_demo_leaves_a_comparison_a_report_and_samples(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(console, "SECONDS_BETWEEN_LINES", 0.0)
    assert demo.main(["--out", str(tmp_path), "--steps", "2", "--importance-samples", "2"]) == 0
    printed, said = capsys.readouterr()
    for line in ("Training sylvester for 2 steps.", "sylvester: 1 of 2", "coupling: 2 of 2", "testing: "):
        assert line in said  # where there is no terminal, too
    assert "coupling − sylvester" in printed
    assert "is ahead" in printed
    assert (tmp_path / "report.html").stat().st_size > 10_000
    assert (tmp_path / "samples.png").stat().st_size > 1_000
    page = Page((tmp_path / "report.html").read_text())
    lines = {line[0]: line[1:] for line in page.tables["results"]}
    for k, model in enumerate(demo.MODELS):  # the report says what the terminal says
        _, parameters, elbo, *_ = next(x for x in printed.splitlines() if x.startswith(model)).split()
        assert lines["parameters"][k] == parameters
        assert lines["test −ELBO (bits per dimension)"][k].startswith(elbo)


def test_the_paired_difference_is_that_of_the_digits():
    worse, better = torch.tensor([2.0, 3.0, 4.0]), torch.tensor([1.5, 2.5, 3.5])
    outcomes = {
        "sylvester": demo.Outcome(1, better, better, 0.0, 1.0),
        "coupling": demo.Outcome(1, worse, worse, 0.0, 1.0),
    }
    last = demo.comparison(outcomes).splitlines()[-1]
    assert "0.5000 ± 0.0000" in last
    assert last.endswith("sylvester is ahead")


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models of a moment."""
    small = {"subflow": "coupling", "mixing": "1x1", "levels": 1, "subflows": 1, "growth": 2, "depth": 1}
    monkeypatch.setattr(demo, "MODELS", dict.fromkeys(demo.MODELS, small))


@pytest.mark.usefixtures("tiny")
def test_ctrl_c_is_one_sentence_and_the_same_command_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    command = ["--out", str(tmp_path), "--steps", "3", "--importance-samples", "1"]

    def press(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(demo, "evaluate", press)
        assert demo.main(command) == 130
    assert capsys.readouterr().err.splitlines()[-1] == "Interrupted: the same command goes on where this one was."
    with monkeypatch.context() as patched:
        patched.setattr(demo, "run", press)
        assert demo.main([*command, "--choose-rates"]) == 130
    capsys.readouterr()
    assert demo.main(command) == 0
    said = capsys.readouterr().err
    assert f"sylvester in {tmp_path / 'sylvester'} is trained already, for 3 steps." in said
    assert "Training coupling for 3 steps." in said
    assert demo.main([*command[:3], "4", *command[4:]]) == 0
    assert f"Going on with coupling in {tmp_path / 'coupling'} after step 3." in capsys.readouterr().err


@pytest.mark.skipif(os.name != "posix", reason="Ctrl-C is a signal")
def test_ctrl_c_before_anything_is_loaded_is_one_sentence(tmp_path: Path):
    """torch takes seconds to load; a module in its place waits until the key is pressed."""
    (tmp_path / "torch.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n")
    source = str(Path(demo.__file__).parents[1])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), source])}
    command = [sys.executable, "-m", "expmflow.demo", "--out", str(tmp_path / "demo")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 130
    assert done.stderr == "Interrupted: nothing was begun yet.\n"
    assert not (tmp_path / "demo").exists()


@pytest.mark.usefixtures("tiny")
def test_a_run_of_other_settings_is_set_aside(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    for rate in (0.003, 0.01, 0.1):
        monkeypatch.setitem(demo.CHOSEN, "coupling", rate)
        trained = demo.run("coupling", tmp_path / "coupling", steps=1)
        assert trained.config.optim.lr == rate
    said = capsys.readouterr().err
    for k in (1, 2):
        place = tmp_path / f"coupling-before-{k}"
        assert f"it is in {place} now, and a new one begins." in said
        assert (place / "model.safetensors").is_file()


def test_the_seconds_of_all_sittings_are_counted(tmp_path: Path):
    records = [{"step": 2, "seconds_per_step": 0.5}, {"step": 2, "validation_nll": 1.0}]
    records += [{"step": 5, "seconds_per_step": 2.0}]
    run = RunFolder(tmp_path)
    for record in records:
        run.append_metrics(record)
    assert demo.training_seconds(SimpleNamespace(folder=run)) == 7.0


@pytest.mark.usefixtures("tiny")
def test_errors_are_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    def fail(*_: object, **__: object) -> None:
        raise ValueError("Expected this; got that.")

    monkeypatch.setattr(demo, "run", fail)
    assert demo.main(["--out", str(tmp_path)]) == 1
    assert capsys.readouterr().err == "Expected this; got that.\n"


@pytest.mark.parametrize("steps", ["0", "many"])
def test_bad_steps_are_refused(steps: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        demo.main(["--out", str(tmp_path), "--steps", steps])
    assert not list(tmp_path.iterdir())
