"""Every command, end to end, on a small run."""

import csv
import io
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

import expmflow as ef
from cli_runs import TINY, files, run_command, train_tiny
from expmflow.training.checkpoint import list_checkpoints

COMMANDS = ("train", "evaluate", "sample", "score", "report", "data")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_tiny(tmp_path_factory.mktemp("runs") / "tiny")


def python(*arguments: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *arguments]
    return subprocess.run(
        command, cwd=cwd, env={**os.environ, **environment}, capture_output=True, text=True, check=False
    )


# --- help and version ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_an_example(command: str):
    outcome = run_command(command, "--help")
    assert outcome.code == 0
    assert f"Example: expmflow {command}" in " ".join(outcome.out.split())
    assert "--debug" in outcome.out
    assert "--dry-run" in outcome.out


def test_version_names_torch_and_the_device():
    outcome = run_command("--version")
    assert outcome.code == 0
    assert outcome.out.startswith(f"expmflow {ef.__version__}, torch {torch.__version__}, device ")


def test_a_real_process_helps_and_exits_with_codes(here: Path):
    helped = python("-m", "expmflow", "--help", cwd=here)
    assert helped.returncode == 0
    assert all(command in helped.stdout for command in COMMANDS)
    failed = python("-m", "expmflow", "evaluate", "nowhere", cwd=here)
    assert (failed.returncode, failed.stdout) == (1, "")
    assert failed.stderr.startswith("Expected a run in nowhere; got no such folder.")
    assert failed.stderr.count("\n") == 1
    misused = python("-m", "expmflow", "train", "moon", cwd=here)
    assert misused.returncode == 2
    assert "did you mean 'moons'?" in misused.stderr
    assert files(here) == set()


# --- train -----------------------------------------------------------------------------------------------------------


def test_a_run_leaves_its_files_and_no_others(run: Path):
    found = {name for name in files(run) if not name.startswith(("checkpoints/", "tensorboard/"))}
    assert found == {"config.json", "model.safetensors", "metrics.jsonl", "samples.png", "reference.safetensors"}
    assert (run / "samples.png").read_bytes().startswith(b"\x89PNG")
    assert [path.name for path in list_checkpoints(run / "checkpoints")][:2] == ["step-00000006", "step-00000004"]
    assert any(name.startswith("tensorboard/") for name in files(run))


def test_training_goes_to_runs_by_default_and_says_so(here: Path):
    outcome = run_command("train", "moons", *TINY)
    assert outcome.code == 0
    assert "Writing to runs/moons" in outcome.err
    assert "ms/step" in outcome.err
    assert {name.split("/")[0] for name in files(here)} == {"runs"}
    assert {name.split("/")[1] for name in files(here)} == {"moons"}


def test_a_cut_run_goes_on_to_the_same_weights(run: Path, tmp_path: Path):
    part = train_tiny(tmp_path / "part", "train.steps=3")
    outcome = run_command("train", "moons", *TINY, "--out", part)
    assert outcome.code == 0
    assert f"Resuming the run in {part}" in outcome.err
    assert "Resuming at step 3." in outcome.err
    for name, tensor in ef.load(run).state_dict().items():
        assert torch.equal(tensor, ef.load(part).state_dict()[name]), name


def test_another_config_is_refused_for_the_same_folder(run: Path):
    before = files(run)
    outcome = run_command("train", "moons", *TINY, "optim.lr=0.5", "--out", run)
    assert outcome.code == 2
    assert outcome.err.count("Expected the config that the run in") == 1
    assert files(run) == before


def test_a_run_finds_its_data_from_any_folder(here: Path, monkeypatch: pytest.MonkeyPatch):
    np.savetxt("t.csv", np.random.default_rng(0).normal(size=(120, 3)), delimiter=",", header="a,b,c", comments="")
    settings = ("data.path=t.csv", "data.test=0.2", *TINY[1:])
    for steps in (4, 6):  # and it goes on with the same relative name
        assert run_command("train", "table", *settings, f"train.steps={steps}", "--out", "run").code == 0
    (here / "other").mkdir()
    monkeypatch.chdir(here / "other")
    assert json.loads(run_command("evaluate", "../run", "--json").out)["rows"] == 24
    assert run_command("score", "../run", "../t.csv").code == 0
    assert files(here / "other") == set()


def test_weights_are_taken_from_another_run(run: Path, tmp_path: Path):
    outcome = run_command(
        "train", "moons", *TINY, "train.steps=1", "optim.lr=1e-12", "--out", tmp_path / "next", "--init-from", run
    )
    assert outcome.code == 0
    known = dict(ef.load(run).named_parameters())
    for name, parameter in ef.load(tmp_path / "next").named_parameters():
        torch.testing.assert_close(parameter, known[name], atol=1e-6, rtol=1e-5)


def test_a_loss_that_is_not_finite_stops_or_is_counted(tmp_path: Path):
    # the first step is good, and takes the weights to where nothing is
    settings = (*TINY, "optim.lr=1e30", "optim.warmup=0", "optim.ema=null")
    stopped = run_command("train", "moons", *settings, "--out", tmp_path / "stopped")
    assert stopped.code == 1
    assert "Expected a finite loss at step 2; got NaN or infinity in transform.layers.0 (ActNorm);" in stopped.err
    skipping = run_command("train", "moons", *settings, "--out", tmp_path / "skipping", "--on-nonfinite", "skip")
    assert "step 2/6 nll nan" in skipping.err
    assert "step 2;" not in skipping.err
    assert skipping.code == 1  # skipping does not repair the weights: no validation is finite
    assert "step 6/6 validation nll nan" in skipping.err
    assert skipping.err.endswith("Expected a validation that is finite; got 2 that were not.")
    assert "Traceback" not in skipping.err


def test_ctrl_c_saves_and_says_where(tmp_path: Path):
    command = [sys.executable, "-m", "expmflow", "train", "moons", *TINY, "train.steps=1000000", "--out", "run"]
    with subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True) as process:
        deadline = time.monotonic() + 120
        while not list_checkpoints(tmp_path / "run" / "checkpoints") and time.monotonic() < deadline:
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        _, printed = process.communicate(timeout=120)
    step = int(list_checkpoints(tmp_path / "run" / "checkpoints")[0].name.removeprefix("step-"))
    assert process.returncode == 130
    assert f"Interrupted: saved at step {step} in run." in printed
    assert "Traceback" not in printed


def test_ctrl_c_after_the_last_step_says_how_to_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """While likelihoods are measured; and what it says can be pasted, whatever the folder is called."""

    def press(*_: object) -> None:
        raise KeyboardInterrupt

    run = tmp_path / "my run"
    with monkeypatch.context() as patched:
        patched.setattr("expmflow.cli.train.measure", press)
        outcome = run_command("train", "moons", *TINY, "--out", run)
    assert outcome.code == 130
    assert outcome.err.endswith(f"Interrupted: saved at step 6 in {run}. To go on: expmflow train --resume '{run}'")
    going_on = run_command(*shlex.split(outcome.err.split("To go on: ")[1])[1:])
    assert going_on.code == 0, going_on.err
    assert going_on.err.endswith(f"Next: expmflow evaluate '{run}'; expmflow report '{run}'")
    assert (run / "reference.safetensors").is_file()


def test_only_the_first_of_many_processes_prints(run: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("RANK", "1")
    for arguments in (("evaluate", run), ("sample", run), ("data", "moons"), ("--version",), ("evaluate", "nowhere")):
        outcome = run_command(*arguments)
        assert (outcome.out, outcome.err) == ("", ""), arguments


# --- evaluate, sample, score, data -----------------------------------------------------------------------------------


def test_evaluation_is_the_mean_over_the_test_rows(run: Path):
    found = json.loads(run_command("evaluate", run, "--json").out)
    assert found["rows"] == 24
    assert found["bpd"] == pytest.approx(found["nll"] / (2 * np.log(2)))
    assert 0 < found["nll_standard_error"] < found["nll"]
    assert f"{found['nll']:.4f}" in run_command("evaluate", run).out
    validated = json.loads(run_command("evaluate", run, "--json", "--split", "validation").out)
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    best = min(record["validation_nll"] for record in records if "validation_nll" in record)
    assert validated["nll"] == pytest.approx(best, rel=1e-5)


def test_samples_follow_from_the_seed(run: Path, tmp_path: Path):
    for name, arguments in {"a": (), "b": (), "c": ("--seed", "1"), "d": ("--temperature", "0.01")}.items():
        assert run_command("sample", run, "-n", "40", "--out", tmp_path / f"{name}.npy", *arguments).code == 0
    a, b, c, d = (np.load(tmp_path / f"{name}.npy") for name in "abcd")
    assert a.shape == (40, 2)
    assert (a == b).all()
    assert (a != c).all()
    assert d.std(0).max() < 0.1 * a.std(0).min()
    assert files(tmp_path) == {"a.npy", "b.npy", "c.npy", "d.npy"}


def test_samples_are_the_same_in_every_format(run: Path, tmp_path: Path):
    for name in ("s.npy", "s.csv", "s.png"):
        assert run_command("sample", run, "-n", "5", "--out", tmp_path / name).code == 0
    table = np.loadtxt(tmp_path / "s.csv", delimiter=",", skiprows=1)
    np.testing.assert_array_equal(np.load(tmp_path / "s.npy"), table.astype(np.float32))
    printed = np.loadtxt(io.StringIO(run_command("sample", run, "-n", "5").out), delimiter=",", skiprows=1)
    np.testing.assert_array_equal(printed, table)
    assert (tmp_path / "s.png").read_bytes().startswith(b"\x89PNG")


def test_more_samples_begin_with_the_same_ones(run: Path):
    few, many = (run_command("sample", run, "-n", n).out.splitlines() for n in ("3", "30"))
    first, second = (np.loadtxt(lines[1:4], delimiter=",") for lines in (few, many))
    np.testing.assert_allclose(first, second, rtol=1e-4, atol=1e-5)


def test_scores_tell_what_is_unlike_the_training_data(run: Path, tmp_path: Path):
    table = tmp_path / "points.csv"
    table.write_text("a,b\n0,1\n1,-0.5\n60,-60\n1e30,1e30\n")
    outcome = run_command("score", run, table, "--out", tmp_path / "scores.csv")
    assert outcome.code == 0
    assert "2 of 4 rows flagged" in outcome.err
    rows = list(csv.DictReader(io.StringIO((tmp_path / "scores.csv").read_text())))
    assert [row["flagged"] for row in rows] == ["0", "0", "1", "1"]
    expected = ef.load(run).log_prob(torch.tensor([[0.0, 1.0], [1.0, -0.5]]))
    np.testing.assert_allclose([float(row["log_likelihood"]) for row in rows[:2]], expected.tolist(), rtol=1e-5)
    assert float(rows[3]["log_likelihood"]) == -np.inf
    assert files(tmp_path) == {"points.csv", "scores.csv"}
    lenient = run_command("score", run, table, "--threshold", "1e9")
    assert lenient.out == (tmp_path / "scores.csv").read_text().replace(",1\n", ",0\n", 1)


def test_several_tables_are_told_apart(run: Path, tmp_path: Path):
    near, far = tmp_path / "near.csv", tmp_path / "far.csv"
    near.write_text("0,1\n1,-0.5\n")
    far.write_text("60,-60\n")
    outcome = run_command("score", run, near, far, "--reference", near, "--json")
    found = json.loads(outcome.out)
    assert [(row["file"], row["row"], row["flagged"]) for row in found["rows"]] == [
        (str(near), 1, 0),
        (str(near), 2, 0),
        (str(far), 1, 1),
    ]
    assert json.loads(run_command("score", run, far, "--reference", near, "--json").out)["auroc"]["typicality"] == 1


@pytest.mark.parametrize("quantile", ["0.5", "0.9"])
def test_the_quantile_is_of_the_validation_rows(run: Path, tmp_path: Path, quantile: str):
    from expmflow.runs.evaluation import open_run

    rows = open_run(run).data().validation
    np.save(tmp_path / "rows.npy", rows.numpy())
    scores = list(
        csv.DictReader(io.StringIO(run_command("score", run, tmp_path / "rows.npy", "--quantile", quantile).out))
    )
    flagged = sum(int(row["flagged"]) for row in scores)
    assert flagged == pytest.approx((1 - float(quantile)) * len(rows), abs=2)


def test_held_out_rows_that_are_too_few_for_the_quantile_are_said(run: Path, tmp_path: Path):
    from expmflow.runs.evaluation import open_run

    count = len(open_run(run).data().validation)
    np.save(tmp_path / "rows.npy", np.zeros((1, 2), np.float32))
    enough, short = (f"{1 - share / (count + 1)}" for share in (1.5, 0.5))
    said = [run_command("score", run, tmp_path / "rows.npy", "--quantile", q).err for q in (enough, short)]
    assert "too few" not in said[0]
    assert f"{count} held-out rows are too few for a rate of" in said[1]
    assert f"about {1 / (count + 1):.2g} are flagged" in said[1]
    assert (
        "too few" not in run_command("score", run, tmp_path / "rows.npy", "--quantile", short, "--threshold", "3").err
    )


def test_data_describes_names_and_files(tmp_path: Path):
    table = tmp_path / "t.csv"
    table.write_text("1,7\n3,7\n")
    outcome = run_command("data", table)
    assert outcome.code == 0
    assert "2 rows" in " ".join(outcome.out.split())  # a long title is wrapped
    assert "x2" in outcome.out
    assert "Columns of one value have no density; leave them out: data.drop=[x2]." in outcome.err
    assert "10000 rows" in " ".join(run_command("data", "moons").out.split())


def test_data_describes_what_training_would_refuse_and_says_what_to_do(here: Path):
    """A stranger looks at a table before training on it: words and gaps are no reason to show nothing."""
    (here / "T.CSV").write_text("size,colour,age\n1,red,3\n2,blue,\n6,red,5\n")
    outcome = run_command("data", "T.CSV")
    assert outcome.code == 0, outcome.err
    lines = {line.split()[1]: line.split()[3::2] for line in outcome.out.splitlines() if line.startswith("│")}
    assert lines["size"] == ["1", "3", "2.646", "6"]
    assert lines["colour"] == ["–"] * 4
    assert lines["age"] == ["3", "4", "1.414", "5"]  # of the rows that have one
    refused = run_command("train", "table", "data.path=T.CSV")
    assert refused.code == 1
    assert outcome.err == refused.err.replace(str(here / "T.CSV"), "T.CSV")
    assert refused.err.endswith("leave such columns out: data.drop=[colour,age].")


@pytest.mark.parametrize(
    ("column", "reason"),
    [
        ([2 * k + 1 for k in range(200)], "got copies, up to scale and offset: b of a"),
        ([0.0] * 194 + [3.0, 3.01, 3.02, 3.03, 3.04, 3.05], "got b, which is 0 in 194 of 200"),
    ],
    ids=["a copy", "nearly constant"],
)
def test_data_names_columns_without_a_density(here: Path, column: list[float], reason: str):
    """Training refuses them too; a constant column or a gap beside them is no reason to hide it."""
    lines = [f"{k},{b},{k * k % 7}.5,7,{k or ''}\n" for k, b in enumerate(column)]
    (here / "t.csv").write_text("a,b,c,constant,gap\n" + "".join(lines))
    outcome = run_command("data", "t.csv")
    assert outcome.code == 0
    assert reason in outcome.err
    for name in ("b", "constant", "gap"):
        assert f"data.drop=[{name}]" in outcome.err
    refused = run_command("train", "table", "data.path=t.csv", "data.drop=[constant,gap]")
    assert refused.code == 1
    assert "data.drop=[b]" in refused.err


def test_rows_too_few_to_hold_some_out(here: Path):
    """What is said next can be done, and what cannot be done is explained by the run's own settings."""
    (here / "t.csv").write_text("a,b\n1,2.5\n3,4.5\n4,5.1\n")
    trained = run_command("train", "table", "data.path=t.csv", "train.steps=2", "--out", "run")
    assert trained.err.endswith("Next: expmflow report run")
    assert "On the training rows (none are held out) the nll is" in trained.err
    evaluated = run_command("evaluate", "run")
    message = "Expected rows for test in the run's data; got none, by data.test=0.1; take another --split."
    assert (evaluated.code, evaluated.err) == (1, message)
    assert run_command("evaluate", "run", "--split", "train").code == 0
    said = run_command("score", "run", "t.csv").err
    assert "No rows were held out" in said
    assert "3 training rows are too few" in said


@pytest.mark.parametrize("text", [",a,b\n0,1,2\n1,1,2\n", "a,b\n1,\n", "a,b\nx,1\n"])
def test_scores_need_all_columns_so_no_message_says_to_leave_some_out(here: Path, text: str):
    (here / "t.csv").write_text("a,b\n" + "".join(f"{k}.5,{k * k % 7}.25\n" for k in range(40)))
    assert run_command("train", "table", "data.path=t.csv", "train.steps=1", "--out", "run").code == 0
    (here / "new.csv").write_text(text)
    refused = run_command("score", "run", "new.csv")
    assert refused.code == 1
    assert refused.err.startswith("Expected ")
    assert "data." not in refused.err


def test_files_to_score_are_listed_once():
    page = " ".join(re.sub("[│╭╮╰╯─]", " ", run_command("score", "--help").out).split())
    assert page.count("images, folders of them") == 1


# --- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("train", "moons", "train.stpes=3"), 2, "train.stpes: no such key (did you mean 'steps'?)"),
        (("train", "moons", "steps"), 2, "Expected an override key=value; got 'steps'."),
        (("train", "table"), 1, "Expected data.path, where the table data is; got none."),
        (("train", "nothing.yaml"), 2, "Expected a config in nothing.yaml; got:"),
        (("train", "moons", "--device", "abacus"), 1, "Expected a device such as cpu or cuda; got 'abacus'."),
        (
            ("train", "moons", "train.batch_size=99999"),
            1,
            "Expected a batch of at most 8000 rows, as there are for training, by train.batch_size; got 99999.",
        ),
        (("train", "moons", "--init-from", "nowhere"), 1, "Expected a run in nowhere; got no such folder."),
        (("sample", "RUN", "--out", "x.txt"), 1, "Expected a .npy, .npz, .csv or .png file; got x.txt."),
        (("sample", "RUN", "-n", "0"), 1, "Expected the number of samples of at least 1; got 0."),
        (("sample", "RUN", "--temperature", "nan"), 1, "Expected a positive temperature; got nan."),
        (("score", "RUN", "three.csv"), 1, "Expected 2 columns in three.csv, as the run has; got 3."),
        (("score", "RUN", "missing.csv"), 1, "Expected the file missing.csv; got none."),
        (("score", "RUN", "three.csv", "--quantile", "1"), 1, "Expected a quantile between 0 and 1; got 1.0."),
        (("report", "RUN", "--out", "x.pdf"), 1, "Expected an .html file; got x.pdf."),
        (("report", "nowhere"), 1, "Expected a run in nowhere; got no such folder."),
        (("data", "moon"), 1, "(did you mean 'moons'?)"),
    ],
)
def test_mistakes_are_one_sentence(run: Path, here: Path, arguments: tuple[str, ...], code: int, message: str):
    (here / "three.csv").write_text("1,2,3\n")
    outcome = run_command(*(str(run) if a == "RUN" else a for a in arguments))
    assert message in outcome.err
    assert outcome.code == code
    assert "Traceback" not in outcome.err


def test_nothing_is_left_of_a_refused_run(here: Path):
    assert run_command("train", "moons", "train.batch_size=99999").code == 1
    assert run_command("train", "table", "data.path=missing.csv").code == 1
    assert files(here) == set()


def test_debug_shows_the_traceback(here: Path):
    with pytest.raises(RuntimeError, match="Expected a run in nowhere"):
        run_command("evaluate", "nowhere", "--debug")


def test_a_full_disk_is_one_sentence(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def full(*arguments: object, **options: object) -> None:
        raise OSError(28, "No space left on device", "samples.npy")

    monkeypatch.setattr(np, "save", full)
    outcome = run_command("sample", run, "--out", tmp_path / "samples.npy")
    assert outcome.code == 1
    assert outcome.err == "Expected to read and write files; got: No space left on device (samples.npy)."
    assert files(tmp_path) == set()


# --- without the extras ----------------------------------------------------------------------------------------------

BLOCK = """
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {names}:
            raise ModuleNotFoundError("blocked: " + name, name=name)
sys.meta_path.insert(0, Block())
"""


def test_the_core_needs_no_extras(run: Path, tmp_path: Path):
    code = BLOCK.format(names={"omegaconf", "yaml", "typer", "rich", "matplotlib", "jinja2", "tensorboard"})
    code += f"import expmflow as ef; print(ef.load({str(run)!r}).sample(2).shape)\n"
    code += f"ef.save_pretrained({str(run)!r}, 'copy'); from expmflow.cli import main; main()"
    done = python("-W", "error", "-c", code, cwd=tmp_path)
    assert done.stdout == "torch.Size([2, 2])\n"
    assert done.returncode == 1
    assert done.stderr.startswith("Expected typer for the command line; got none. Install the extra `train`.")
    assert files(tmp_path) == {"copy/config.json", "copy/model.safetensors", "copy/reference.safetensors"}
    for name, tensor in ef.load(run).state_dict().items():
        assert torch.equal(tensor, ef.load(tmp_path / "copy").state_dict()[name])


def test_training_needs_no_matplotlib_and_the_report_says_that_it_does(tmp_path: Path):
    code = BLOCK.format(names={"matplotlib", "tensorboard"}) + "from expmflow.cli import main; main()"
    trained = python("-c", code, "train", "moons", *TINY, "--out", "run", cwd=tmp_path)
    assert trained.returncode == 0, trained.stderr
    assert not (tmp_path / "run" / "samples.png").exists()
    assert not (tmp_path / "run" / "tensorboard").exists()
    reported = python("-c", code, "report", "run", cwd=tmp_path)
    assert reported.returncode == 1
    assert reported.stderr == "Expected matplotlib for figures; got none. Install the extra `report`.\n"
