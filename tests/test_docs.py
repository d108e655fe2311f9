"""The code in the documentation runs."""

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parent.parent / "docs"
PAGES = sorted(page for page in DOCS.glob("*.md") if "```python" in page.read_text())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_code_of_a_page_runs_from_top_to_bottom(page: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    names: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, str(page), "exec"), names)
    assert blocks
