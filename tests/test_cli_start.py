"""How the command line starts: at once, and without spinning threads."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from importlib import import_module

import pytest

import expmflow
from cli_runs import run_command
from expmflow.cli.app import EXAMPLES, SUMMARIES


def python(code: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env={**os.environ, **environment}
    )
    return done.stdout


def test_help_does_not_wait_for_torch():
    code = (
        "import sys\nfrom expmflow.cli import main\nsys.argv = ['expmflow', '--help']\n"
        "try:\n    main()\nexcept SystemExit as done:\n    print('code', done.code)\n"
        "print('loaded', *[name for name in ('torch', 'numpy', 'pydantic') if name in sys.modules])"
    )
    out = python(code)
    assert "code 0\nloaded\n" in out
    assert all(name in out for name in SUMMARIES)


@pytest.mark.skipif(os.name != "posix", reason="resource is of POSIX")
def test_help_takes_less_than_a_second():
    """Of the processor: how long that is on the clock is for what else runs here to say."""
    code = (
        "import resource, subprocess, sys\n"
        "subprocess.run([sys.executable, '-m', 'expmflow', '--help'], check=True, stdout=subprocess.DEVNULL)\n"
        "used = resource.getrusage(resource.RUSAGE_CHILDREN)\nprint(used.ru_utime + used.ru_stime)"
    )
    assert float(python(code)) < 1


@pytest.mark.parametrize("name", SUMMARIES)
def test_summaries_are_those_of_the_commands(name):
    function = getattr(import_module(f"expmflow.cli.{name}"), name)
    paragraph = inspect.cleandoc(function.__doc__ or "").split("\n\n")[0]
    assert " ".join(paragraph.split()) == SUMMARIES[name]
    page = run_command(name, "--help")
    assert page.code == 0
    assert EXAMPLES[name].split()[1] == name
    assert "Example: expmflow" in page.out


def test_unknown_commands_are_guessed():
    found = run_command("sampel")
    assert found.code == 2
    assert "sample" in found.err


def test_public_names_are_there_when_asked_for():
    for name in expmflow.__all__:
        assert getattr(expmflow, name) is not None
    assert set(expmflow.__all__) <= set(dir(expmflow))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        expmflow.nothing  # noqa: B018


@pytest.mark.parametrize("name", ["data.load_table", "testing.check_transform", "interop.as_transform"])
def test_packages_are_there_without_an_import_of_their_own(name: str):
    assert python(f"import expmflow; print(expmflow.{name}.__name__)").strip() == name.split(".")[1]


def test_waiting_threads_sleep_unless_somebody_says_otherwise():
    names = "('OMP_WAIT_POLICY', 'GOMP_SPINCOUNT')"
    show = f"cli.let_waiting_threads_sleep(); print(*map(os.environ.get, {names}))"
    assert python(f"import os, expmflow.cli as cli; {show}", OMP_WAIT_POLICY="ACTIVE").split()[0] == "ACTIVE"
    clear = f"[os.environ.pop(name, None) for name in {names}]"
    assert python(f"import os, expmflow.cli as cli; {clear}; {show}").split() == ["None", "100000"]
