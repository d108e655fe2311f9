"""Settings and names that nobody means: one sentence, before any work starts, and nothing that a terminal obeys."""

import json
import os
from pathlib import Path

import pytest

from cli_runs import TINY, run_command
from expmflow.cli.console import say, visible
from expmflow.training.config import ConfigError, load_config, parse_config

HUGE = 10**30


@pytest.mark.parametrize(
    ("preset", "key", "value"),
    [
        ("moons", "train.steps", HUGE),
        ("moons", "train.batch_size", HUGE),
        ("moons", "train.seed", HUGE),
        ("moons", "train.threads", 10**8),
        ("moons", "train.timeout", 1e9),
        ("moons", "optim.warmup", HUGE),
        ("moons", "data.samples", HUGE),
        ("moons", "model.hidden", HUGE),
        ("moons", "model.blocks", HUGE),
        ("moons", "model.coeff", 1e5),
        ("digits", "model.levels", 20_000),
        ("digits", "model.growth", HUGE),
        ("digits", "model.depth", HUGE),
        ("digits", "model.subflows", HUGE),
        ("digits", "data.size", HUGE),
    ],
)
def test_sizes_that_no_machine_has_are_refused(tmp_path: Path, preset: str, key: str, value: float):
    outcome = run_command("train", preset, f"{key}={value}", "--out", tmp_path / "run")
    assert outcome.code == 2
    assert outcome.err.startswith(f"Expected a valid config; got 1 problem: {key}: input should be less than")
    assert not (tmp_path / "run").exists()


def test_the_largest_coefficient_is_one_that_works(tmp_path: Path):
    outcome = run_command("train", "moons", *TINY, "train.steps=1", "model.coeff=80", "--out", tmp_path / "run")
    assert outcome.code == 0, outcome.err


@pytest.mark.parametrize(("preset", "key"), [("table", "path"), ("mnist-like", "dir")])
def test_the_home_of_nobody_is_one_sentence(tmp_path: Path, preset: str, key: str):
    settings = ("table",) if preset == "table" else ("digits", "data.name=mnist")
    outcome = run_command("train", *settings, f"data.{key}=~nosuchuser/x.csv", "--out", tmp_path / "run")
    assert outcome.code == 1
    assert outcome.err == "Expected the home folder of a user in ~nosuchuser/x.csv; got none for ~nosuchuser."


NESTED = {"brackets": "[" * 100_000, "dashes": "- " * 100_000, "keys": "? " * 100_000, "braces": "{a: " * 100_000}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("5", "Expected a config of sections in {}; got 5."),
        ("true", "Expected a config of sections in {}; got true."),
        (f"train: {{steps: {'9' * 6000}}}", "Expected a valid config in {}; got: Exceeds the limit"),
        ("#" * 2**21, "Expected a config in {}; got: more than 1048576 bytes."),
        *((text, "Expected at most 50 levels of sections in {}; got more.") for text in NESTED.values()),
    ],
    ids=["number", "word", "digits", "large", *NESTED],
)
def test_files_that_are_no_configs_are_one_sentence(tmp_path: Path, text: str, message: str):
    path = tmp_path / "c.yaml"
    path.write_text(text)
    outcome = run_command("train", path, "--out", tmp_path / "run")
    assert outcome.code == 2
    assert outcome.err.startswith(message.format(path))


@pytest.mark.parametrize("value", [*NESTED.values(), "9" * 6000], ids=[*NESTED, "digits"])
def test_overrides_that_no_parser_takes_are_one_sentence(value: str):
    with pytest.raises(ConfigError, match="Expected a"):
        load_config("moons", [f"train.steps={value}"])


@pytest.mark.parametrize("key", ["a" + ".b" * 20_000, "a" + "[0]" * 20_000])
def test_names_within_names_are_one_sentence(key: str):
    with pytest.raises(ConfigError, match="Expected a"):
        load_config("moons", [f"{key}=1"])


def test_a_number_that_python_does_not_write_out_is_one_sentence():
    with pytest.raises(ConfigError, match=r"train\.steps: .* got a number of very many digits"):
        parse_config({"train": {"steps": 10**6000}})


@pytest.mark.parametrize("name", ["x.csv", "x.npy", "x.yaml", "pictures/x.png"])
def test_a_pipe_is_not_waited_for(tmp_path: Path, name: str):
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    os.mkfifo(path)
    source = path.parent if name.startswith("pictures") else path
    outcome = run_command("train", path) if name.endswith("yaml") else run_command("data", source)
    assert outcome.code in (1, 2)
    assert outcome.err.startswith("Expected ")
    assert str(path) in outcome.err


# --- what a terminal would obey --------------------------------------------------------------------------------------

EVIL = "\x1b[31m\x1b]0;title\x07x\r\x9b2J\u202e"


def harmless(text: str) -> bool:
    return not any(code in text for code in "\x1b\x07\r\x9b\u202e")


def test_codes_in_names_of_files_and_columns_do_not_reach_the_terminal(tmp_path: Path):
    table = tmp_path / f"{EVIL}.csv"
    table.write_text(f"a{EVIL[:5]},b\n1,2\n2,2\n")
    described = run_command("data", table)  # a table on stdout, and a sentence about the constant column
    missing = run_command("data", tmp_path / f"{EVIL}no.csv")
    config = run_command("train", tmp_path / f"{EVIL}.yaml")
    for outcome in (described, missing, config):
        assert harmless(outcome.out + outcome.err)
        assert "[31m" in outcome.out + outcome.err
    assert described.code == 0
    assert [missing.code, config.code] == [1, 2]


def test_names_that_are_no_text_are_shown_all_the_same(tmp_path: Path):
    table = tmp_path / os.fsdecode(b"\xff.csv")
    table.write_text("a,b\n1,2\n2,3\n")
    assert run_command("data", table).code == 0


def test_json_and_lines_keep_their_form(capsys: pytest.CaptureFixture[str]):
    text = json.dumps({"a": [1, "ü\t"]}, indent=2, ensure_ascii=False)
    assert visible(text) == text
    say("one\ntwo")
    assert capsys.readouterr().err == "one\ntwo\n"
