"""What is shipped: the wheel, its metadata, the README's code, the documents beside it."""

import importlib.metadata
import json
import os
import re
import subprocess
import sys
import tomllib
import venv
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import expmflow as ef

ROOT = Path(__file__).parents[1]

USE_FROM_ELSEWHERE = """
import importlib.metadata, importlib.resources, json
import torch
import expmflow as ef

torch.manual_seed(0)
op = ef.ConvOperator(0.1 * torch.randn(2, 2, 3, 3))
x = torch.randn(4, 2, 8, 8)
z = ef.expm_apply(op, x)
print(json.dumps({
    "file": ef.__file__,
    "version": importlib.metadata.version("expmflow"),
    "attribute": ef.__version__,
    "typed": importlib.resources.files("expmflow").joinpath("py.typed").is_file(),
    "moved": (z - x).abs().max().item(),
    "error": (ef.expm_apply(-op, z) - x).abs().max().item(),
}))
"""


@pytest.fixture(scope="module")
def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    _run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(ROOT), cwd=out)
    (built,) = out.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def elsewhere(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an environment with the wheel in it, and in which nothing else is installed.

    torch is too large to copy, so this environment's packages are appended to the other's path. Paths that are added
    this way come last and have their own .pth files ignored, so an editable install cannot be seen through them.
    """
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=False)
    (packages,) = folder.glob("lib/python*/site-packages")
    python = folder / "bin" / "python"
    _run(sys.executable, "-m", "pip", "--python", str(python), "install", "--no-index", "--no-deps", str(wheel))
    borrowed = [path for path in sys.path if path.endswith("-packages")]
    (packages / "borrowed.pth").write_text("\n".join(borrowed) + "\n")
    return python


def _run(*command: str, cwd: Path | None = None) -> str:
    """What the command prints; PYTHON* variables of this run must not leak into another environment."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    result = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, f"{' '.join(command)}\n{result.stdout}\n{result.stderr}"
    return result.stdout


# --- the wheel -------------------------------------------------------------------------------------------------------


def test_installed_wheel_works_from_another_folder(elsewhere: Path, project: dict[str, Any], tmp_path: Path):
    found = json.loads(_run(str(elsewhere), "-c", USE_FROM_ELSEWHERE, cwd=tmp_path))
    assert Path(found["file"]).is_relative_to(elsewhere.parents[1])
    assert found["version"] == found["attribute"] == project["version"]
    assert found["typed"]
    assert found["moved"] > 0.1
    assert found["error"] < 1e-5


def test_demo_runs_from_the_installed_wheel(elsewhere: Path, tmp_path: Path):
    assert "proven" in _run(str(elsewhere), "-m", "expmflow.experiments.feature_maps", "--out", "here", cwd=tmp_path)
    assert (tmp_path / "here" / "terms.png").is_file()


def test_wheel_holds_the_package_whole_and_alone(wheel: Path):
    held = set(zipfile.ZipFile(wheel).namelist())
    package = {
        path.relative_to(ROOT / "src").as_posix()
        for path in (ROOT / "src" / "expmflow").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert {name for name in held if ".dist-info/" not in name} == package
    assert any(name.endswith("licenses/LICENSE") for name in held)


# --- the metadata ----------------------------------------------------------------------------------------------------


def test_extras_are_the_documented_ones(project: dict[str, Any]):
    extras = project["optional-dependencies"]
    assert set(extras) == {"train", "graph", "report", "export", "peers", "docs", "dev", "all"}
    (everything,) = extras["all"]
    assert set(re.findall(r"[a-z]+", everything.split("[")[1])) == set(extras) - {"all"}


def test_requirements_are_ranges(project: dict[str, Any]):
    requirements = [*project["dependencies"], *(r for rs in project["optional-dependencies"].values() for r in rs)]
    assert [r for r in requirements if "==" in r] == []


def test_constraints_pin_torch_without_a_local_tag():
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    assert "torch==2.13.0" in lines
    assert [line for line in lines if not re.fullmatch(r"[A-Za-z0-9_.-]+==[A-Za-z0-9.]+", line)] == []


def test_version_is_the_same_everywhere(project: dict[str, Any]):
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert ef.__version__ == importlib.metadata.version("expmflow") == project["version"] == citation["version"]


def test_citation_names_the_paper():
    paper = yaml.safe_load((ROOT / "CITATION.cff").read_text())["preferred-citation"]
    assert paper["title"] == "The Convolution Exponential and Generalized Sylvester Flows"
    assert [author["family-names"] for author in paper["authors"]] == [
        "Hoogeboom",
        "Garcia Satorras",
        "Tomczak",
        "Welling",
    ]
    assert "2006.01910" in paper["url"]


# --- the documents ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ef.__all__)
def test_public_names_have_docstrings(name: str):
    text = getattr(ef, name).__doc__
    assert text
    assert not text.startswith(f"{name}(")  # what a dataclass writes when nobody did


def _code_blocks() -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), flags=re.DOTALL | re.MULTILINE)


def test_readme_starts_with_code():
    assert _code_blocks()


@pytest.mark.parametrize("code", _code_blocks())
def test_readme_code_runs_as_pasted(code: str):
    exec(compile(code, "README.md", "exec"), {})


def test_readme_code_inverts():
    names: dict[str, Any] = {}
    exec(compile(_code_blocks()[0], "README.md", "exec"), names)
    torch.testing.assert_close(names["back"], names["x"], atol=1e-5, rtol=0)
    assert (names["z"] - names["x"]).abs().max() > 0.1


@pytest.mark.parametrize("document", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md"])
def test_links_to_files_lead_somewhere(document: str):
    targets = re.findall(r"\]\(([^)#]+)\)", (ROOT / document).read_text())
    assert [t for t in targets if "://" not in t and not (ROOT / t).exists()] == []


def test_commands_in_the_documents_are_targets():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    for document in ("README.md", "CONTRIBUTING.md"):
        named = set(re.findall(r"\bmake ([a-z]+)\b", "\n".join(_commands(ROOT / document))))
        assert named <= targets, document


def _commands(document: Path) -> list[str]:
    """The lines of code blocks, and code within sentences."""
    text = document.read_text()
    blocks = re.findall(r"^```\w*\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)
    return blocks + re.findall(r"`([^`\n]+)`", text)
