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
    timed = [r for r in rows if "timed_threads" in r]
    words = f"Seconds are those of training, with threads: {_either({r['threads'] for r in rows if 'threads' in r})}."
    if timed:
        of = "each row" if len(timed) == len(rows) else f"{len(timed)} of the {len(rows)} rows"
        words += (
            f" Those of a step were measured again afterwards for {of}, with threads: "
            f"{_either({r['timed_threads'] for r in timed})}; so the two need not agree."
        )
    return words


def _either(values: set[Any]) -> str:
    return " or ".join(str(value) for value in sorted(values))
