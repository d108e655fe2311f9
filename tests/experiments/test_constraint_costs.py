"""What is written of γ and coeff is what was measured."""

from __future__ import annotations

import importlib
import json
import statistics
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LOSSES: dict[tuple, dict[int, float]] = defaultdict(dict)
ROWS: dict[tuple, list[dict]] = defaultdict(list)
for row in json.loads((ROOT / "results/constraint-costs.json").read_text())["rows"]:
    key = (row["case"], *sorted(row["setting"].items()))
    LOSSES[key][row["seed"]] = row["loss"]
    ROWS[key].append(row)


def gain(case: str, setting: dict[str, float], default: dict[str, float]) -> float:
    """How much less the loss is than at the default, seed by seed."""
    ours, theirs = (LOSSES[case, *sorted(its.items())] for its in (setting, default))
    assert len(ours) >= 3
    assert ours.keys() == theirs.keys()
    return statistics.fmean(theirs[seed] - ours[seed] for seed in ours)


def test_the_page_is_written_from_the_rows(monkeypatch: pytest.MonkeyPatch):
    """By `python -m benchmarks.constraint_costs --only`."""
    monkeypatch.syspath_prepend(str(ROOT))
    benchmark = importlib.import_module("benchmarks.constraint_costs")
    rows = [row for same in ROWS.values() for row in same]
    assert (ROOT / "results/constraint-costs.md").read_text() == benchmark.text(rows)


@pytest.mark.parametrize("case", ["moons", "moons, longer", "mog-4"])
def test_gamma_is_worth_what_the_docs_say(case: str):
    found = gain(case, {"gamma": 0.9}, {"gamma": 0.5})
    assert 0.03 <= round(found, 2) <= 0.05
    for gamma, most in ((0.5, 6), (0.9, 9)):
        rows = ROWS[case, ("gamma", gamma)]
        assert max(row["iterations"] for row in rows) == most
        assert gamma * 0.97 < max(row["diagonal"] for row in rows) <= gamma


def test_coeff_binds_where_it_is_said_to_and_a_second_layer_makes_up_for_it():
    one = {"coeff": 0.9}
    assert min(row["norm"] for row in ROWS["correlated", ("coeff", 0.9)]) > 0.89
    assert max(row["norm"] for row in ROWS["digits", ("coeff", 0.9)]) > 0.89
    loosened, doubled = (gain("correlated", its, one) for its in ({"coeff": 3.0}, {**one, "layers": 2}))
    assert f"{loosened:.2f}" == "0.96"
    assert doubled > 0.98 * loosened
    assert gain("digits", {"coeff": 3.0}, one) < 0
    text = (ROOT / "docs/layers.md").read_text()
    assert "costs 0.96 nats" in text
