"""The code in the documentation runs, and its list of settings is whole."""

import re
from pathlib import Path

import pytest

from expmflow import transforms as T
from expmflow.training.config import DataConfig, OptimConfig, TrainConfig
from expmflow.training.model_config import MODELS

DOCS = Path(__file__).parent.parent / "docs"
PAGES = sorted(page for page in DOCS.glob("*.md") if "```python" in page.read_text())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_code_of_a_page_runs_from_top_to_bottom(page: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    names: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, str(page), "exec"), names)
    assert blocks


def test_every_layer_is_in_the_table() -> None:
    text = (DOCS / "layers.md").read_text().partition("## All layers")[2].partition("\n## ")[0]
    listed = {name for row in re.findall(r"^\| (`.+?) \|", text, re.MULTILINE) for name in re.findall(r"`(\w+)", row)}
    layers = {name for name in T.__all__ if isinstance(getattr(T, name), type)} - {"Transform"}
    assert layers == listed


def test_the_table_says_all_of_every_layer() -> None:
    """Equation, costs, who introduced it and when to choose it; and the closed-form directions are the layer's own."""
    text = (DOCS / "layers.md").read_text().partition("## All layers")[2].partition("\n## ")[0]
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| `")]
    single = [row for row in rows if "layers made of layers" not in row]
    assert len(single) > 25
    for names, *cells in single:
        *_, closed, introduced, choose = cells
        assert len(cells) == 7, names
        assert all(cells), names
        assert min(map(len, (introduced, choose))) > 3, names
        for name in re.findall(r"`(\w+)", names):
            directions = getattr(T, name).closed_form
            assert closed == ("both" if len(directions) == 2 else directions[0]), name


def test_every_setting_is_listed_with_its_default() -> None:
    text = (DOCS / "training.md").read_text().partition("## Names of columns")[0]
    listed = set(re.findall(r"^\| `([a-z]+\.[a-z_]+)` \| (.+?) \|", text, re.MULTILINE))
    sections = [("data", DataConfig), ("optim", OptimConfig), ("train", TrainConfig)]
    fields = [
        (f"{section}.{name}", field.default)
        for section, kind in [*sections, *(("model", model) for model in MODELS.values())]
        for name, field in kind.model_fields.items()
        if name != "kind"
    ]
    shown = {(key, _shown(default)) for key, default in fields}
    assert shown == listed


def _shown(default: object) -> str:
    if isinstance(default, tuple):
        return str(list(default))
    return "none" if default is None else str(default).lower() if isinstance(default, bool) else str(default)
