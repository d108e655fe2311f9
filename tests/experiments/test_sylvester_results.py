"""What is written of the norm constraint of Sylvester flows is what was measured."""

from __future__ import annotations

import json
from pathlib import Path

ROOT = Path(__file__).parents[2]
ROWS = {
    (row["setting"], row["steps"], row["seed"]): row
    for row in json.loads((ROOT / "results/sylvester.json").read_text())["rows"]
}
DOCUMENTED = ["shared", "apart", "no-slack", "lipschitz-3", "none", "default"]


def cells(row: dict) -> str:
    counts = (row[key] for key in ("iterations_images", "whole", "plain"))
    return " | ".join([f"{row['bpd']:.3f}", *map(str, counts)])


def test_the_table_in_the_docs_has_the_measured_numbers():
    text = (ROOT / "docs/layers.md").read_text()
    for key in [*((name, 300, 0) for name in DOCUMENTED), ("default", 1500, 0)]:
        assert f"| {cells(ROWS[key])} |" in text


def test_the_default_meets_its_aims():
    """Bits per dimension after 1500 steps; 50 iterations at 1e-4, and a hundredth of a grey level by default."""
    full = [row for (name, steps, _), row in ROWS.items() if (name, steps) == ("default", 1500)]
    assert full
    for row in full:
        assert row["bpd"] <= 4.12
        assert max(row[f"iterations_{kind}"] for kind in ("images", "samples", "default")) <= 50
        assert row["grey_levels_default"] < 0.01
