"""All tables of the paper on one page, beside ours: a part of `results/README.md`.

`expmflow reproduce` updates it; `python -m expmflow.experiments.page results` writes it again.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from expmflow._validation import expect
from expmflow.experiments.experiment import Comparison
from expmflow.experiments.registry import EXPERIMENTS
from expmflow.experiments.table import markdown_table
from expmflow.training.files import read_json, write_text

BEGIN, END = "<!-- begin numbers -->\n", "<!-- end numbers -->\n"
HEADER = ["row", "measure", "paper", "ours", "ours − paper"]


def page_text(results: Path) -> str:
    """The columns paper | ours | difference, for every table with results."""
    return "\n".join(_sections(results))


def update_page(results: Path) -> bool:
    """Write the tables between the markers in the folder's `README.md`; False if there is no such page."""
    page = results / "README.md"
    text = page.read_text(encoding="utf-8") if page.exists() else ""
    if BEGIN not in text or END not in text:
        return False
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    write_text(page, f"{before}{BEGIN}\n{page_text(results)}\n{END}{after}")
    return True


def _sections(results: Path) -> Iterator[str]:
    for name, experiment in sorted(EXPERIMENTS.items(), key=lambda item: item[1].of_paper):
        path = experiment.results_file(results, experiment.main)
        if not path.exists():
            continue
        experiment.load(path)  # refuses other files
        comparisons = experiment.comparisons(read_json(path))
        command = f"`expmflow reproduce {name} --preset {experiment.main}`"
        yield f"### {experiment.of_paper}\n\n{command}; more in [{name}.md]({name}.md).\n"
        yield markdown_table(HEADER, [_line(comparison) for comparison in comparisons])


def _line(c: Comparison) -> list[str]:
    difference = "–" if c.paper is None else f"{c.ours - c.paper:+.{c.digits}f}"
    return [c.of, c.unit, _number(c.paper, c.paper_error, c.digits), _number(c.ours, c.error, c.digits), difference]


def _number(value: float | None, error: float | None, digits: int) -> str:
    if value is None:
        return "–"
    return f"{value:.{digits}f}" + ("" if error is None else f" ± {_error(error, digits)}")


def _error(error: float, digits: int) -> str:
    """With this many digits, or with more if they would all be zero."""
    return f"{error:.{digits}f}" if error == 0 or error >= 10.0**-digits else f"{error:.1g}"


if __name__ == "__main__":
    expect(len(sys.argv) == 2, "the folder of the results", f"{len(sys.argv) - 1} arguments")
    expect(update_page(Path(sys.argv[1])), f"a README.md with {BEGIN.strip()} in {sys.argv[1]}", "none")
