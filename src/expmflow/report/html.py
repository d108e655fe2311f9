"""One self-contained page about one or more runs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from importlib import resources
from typing import Any

import torch

from expmflow import __version__
from expmflow.report.figures import curves_figure, embedded, samples_figure
from expmflow.report.graph_figures import graphs_figure
from expmflow.report.grids import embedded_grid, image_grid
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
        curves=embedded(curves_figure(recorded)) if (recorded := [s for s in summaries if s.records]) else None,
        runs=[{"name": s.name, "pictures": _pictures(s), "certificates": s.certificates} for s in summaries],
        configs=list(_configs(summaries)),
        version=f"expmflow {__version__}, torch {torch.__version__}",
        number=_number,
    )


def _pictures(summary: Summary) -> list[dict[str, str]]:
    """The data beside samples: two grids of images, or one figure."""
    if summary.kind == "image":
        parts = {"data": summary.data, "samples of the model": summary.samples}
        return [
            {
                "alt": f"{len(images)} {what}: images of {summary.name}",
                "caption": f"{what} ({len(images)} images)",
                "source": embedded_grid(image_grid(images, summary.levels or 256, columns=summary.columns)),
            }
            for what, images in parts.items()
        ]
    if summary.kind == "graph":
        figure = graphs_figure(summary.data, summary.samples)
    else:
        figure = samples_figure(summary.data, summary.samples, summary.density)
    return [{"alt": f"The data beside samples of {summary.name}", "caption": "", "source": embedded(figure)}]


def _number(value: float, digits: int = 3) -> str:
    return "–" if math.isnan(value) else f"{value:.{digits}g}"


def _nats(value: float) -> str:
    return "–" if math.isnan(value) else f"{value:.4f}"


def _with_error(value: float, error: float, factor: float = 1.0) -> str:
    return f"{_nats(factor * value)} ± {_nats(factor * error)}"


def _in_unit(name: str) -> Callable[[Summary], str | None]:
    """The test likelihood in a unit, of the runs whose unit that is."""
    return lambda s: (
        _with_error(s.test_nll, s.test_error, s.unit.per_nat) if _tested(s) and s.unit.name == name else None
    )


def _tested(summary: Summary) -> bool:
    """Whether what was measured is the test."""
    return summary.rows["test"] > 0


def _weighted(summary: Summary) -> str | None:
    bits = summary.unit.per_nat
    found = [f"{_with_error(w.nll, w.error, bits)} ({w.samples} noises, {w.rows} images)" for w in summary.weighted]
    return "; ".join(found) or None


Cell = Callable[[Summary], str | None]
"""What a table says of a run; None where there is nothing to say. A line of which all say nothing is left out."""

RESULTS: dict[str, Cell] = {
    "best validation nll (nats)": lambda s: _nats(s.best["validation_nll"]) if s.records else None,
    "at step": lambda s: f"{s.best['step']} of {s.last_step}" if s.records else None,
    "test nll (nats)": lambda s: _with_error(s.test_nll, s.test_error) if _tested(s) and s.levels is None else None,
    "test −ELBO (nats)": lambda s: _with_error(s.test_nll, s.test_error) if _tested(s) and s.levels else None,
    "no test rows; training nll (nats)": lambda s: None if _tested(s) else _with_error(s.test_nll, s.test_error),
    "test −ELBO (bits per dimension)": _in_unit("bits per dimension"),
    "importance-weighted (bits per dimension)": _weighted,
    "test nll (nats per node)": _in_unit("nats per node"),
    "entropy of the data (nats per node)": lambda s: None if s.entropy is None else _nats(s.entropy),
    "tested on": lambda s: None if s.kind == "dense" else f"the first {s.tested} rows",
    "rows: training, validation, test": lambda s: ", ".join(map(str, s.rows.values())),
    "parameters": lambda s: f"{s.parameters:,}",
    "round-trip error, relative": lambda s: _number(s.round_trip, 2) if s.levels is None else None,
    "round-trip error, grey levels": lambda s: None if s.levels is None else _number(s.round_trip, 2),
    "largest certified truncation error": lambda s: _number(
        max((c.plan.error_bound for c in s.certificates), default=math.nan), 2
    ),
}

TIMINGS: dict[str, Cell] = {
    "training, per step": lambda s: _time(s.seconds_per_step) if s.records else None,
    "training, all steps": lambda s: _time(s.seconds_per_step * s.last_step) if s.records else None,
    "log-likelihood, per row": lambda s: _time(s.likelihood_seconds),
    "sample, per row": lambda s: _time(s.sample_seconds),
}


def _time(seconds: float) -> str:
    for unit, factor in (("µs", 1e6), ("ms", 1e3)):
        if seconds * factor < 1000:
            return f"{_number(seconds * factor)} {unit}"
    return f"{_number(seconds)} s"


def _table(summaries: Sequence[Summary], rows: dict[str, Cell]) -> list[Row]:
    found = [(name, [cell(s) for s in summaries]) for name, cell in rows.items()]
    return [(name, ["–" if cell is None else cell for cell in cells]) for name, cells in found if any(cells)]


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
