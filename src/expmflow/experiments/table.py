"""Tables of results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown."""
    lines = [header, ["---"] * len(header), *rows]
    return "".join("| " + " | ".join(cells) + " |\n" for cells in lines)


def seconds_words(rows: Sequence[Mapping[str, Any]]) -> str:
    """A sentence about the seconds of a table: what they measure, and with how many threads."""
    threads, timed = ({r[key] for r in rows if key in r} for key in ("threads", "timed_threads"))
    words = f"Seconds are those of training, with threads: {_either(threads)}"
    beside = f"; beside other work. Those of a step were measured again without it, with threads: {_either(timed)}"
    return words + (beside if timed else "") + "."


def _either(values: set[Any]) -> str:
    return " or ".join(str(value) for value in sorted(values))
