"""One self-contained page about one or more runs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from importlib import resources
from typing import Any

import torch

from expmflow import __version__
from expmflow.report.figures import curves_figure, embedded, samples_figure
from expmflow.report.summary import Summary

Row = tuple[str, list[str]]


def render(summaries: Sequence[Summary]) -> str:
    """The page as text; its pictures are inside it, and it asks nothing of the network."""
    try:
        from jinja2 import Environment, StrictUndefined
    except ImportError as error:
        raise ImportError("Expected jinja2 for the report; got none. Install the extra `report`.") from error
    text = (resources.files("expmflow") / "report" / "report.html.jinja").read_text(encoding="utf-8")
    template = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    return template.from_string(text).render(
        title=summaries[0].name if len(summaries) == 1 else f"{len(summaries)} runs",
        names=[s.name for s in summaries],
        results=_table(summaries, RESULTS),
        timings=_table(summaries, TIMINGS),
        curves=embedded(curves_figure(summaries)),
        runs=[
            {
                "name": s.name,
                "picture": embedded(samples_figure(s.data, s.samples, s.density)),
                "certificates": s.certificates,
            }
            for s in summaries
        ],
        configs=list(_configs(summaries)),
        version=f"expmflow {__version__}, torch {torch.__version__}",
        number=_number,
    )


def _number(value: float, digits: int = 3) -> str:
    return "–" if math.isnan(value) else f"{value:.{digits}g}"


def _nats(value: float) -> str:
    return "–" if math.isnan(value) else f"{value:.4f}"


RESULTS: dict[str, Callable[[Summary], str]] = {
    "best validation nll (nats)": lambda s: _nats(s.best["validation_nll"]),
    "at step": lambda s: f"{s.best['step']} of {s.last_step}",
    "test nll (nats)": lambda s: f"{_nats(s.test_nll)} ± {_nats(s.test_error)}",
    "rows: training, validation, test": lambda s: ", ".join(map(str, s.rows.values())),
    "parameters": lambda s: f"{s.parameters:,}",
    "round-trip error, relative": lambda s: _number(s.round_trip, 2),
    "largest certified truncation error": lambda s: _number(
        max((c.plan.error_bound for c in s.certificates), default=math.nan), 2
    ),
}

TIMINGS: dict[str, Callable[[Summary], str]] = {
    "training, per step": lambda s: f"{_number(1000 * s.seconds_per_step)} ms",
    "training, all steps": lambda s: f"{_number(s.seconds_per_step * s.last_step)} s",
    "log-likelihood, per row": lambda s: f"{_number(1e6 * s.likelihood_seconds)} µs",
    "sample, per row": lambda s: f"{_number(1e6 * s.sample_seconds)} µs",
}


def _table(summaries: Sequence[Summary], rows: dict[str, Callable[[Summary], str]]) -> list[Row]:
    return [(name, [cell(s) for s in summaries]) for name, cell in rows.items()]


def _configs(summaries: Sequence[Summary]) -> Iterator[tuple[str, list[str], bool]]:
    """Every setting of the runs, and whether they differ in it."""
    flat = [dict(_flat(s.config)) for s in summaries]
    for key in dict.fromkeys(key for values in flat for key in values):
        cells = [_setting(values.get(key)) for values in flat]
        yield key, cells, len(set(cells)) > 1


def _setting(value: Any) -> str:
    return "–" if value is None else str(value)


def _flat(config: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in config.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value
