"""One self-contained page about one or more runs."""

from __future__ import annotations

import math
import platform
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import datetime
from importlib import resources
from typing import Any

import torch

from expmflow import __version__
from expmflow.data.drawing.panels import save_figure
from expmflow.data.kinds import sources
from expmflow.data.kinds.base import NATS, Picture
from expmflow.report.figures import curves_figure, latents_figure, scores_figure
from expmflow.report.summary import Summary

Row = tuple[str, list[str]]
MOST_LATENTS = 10  # whose KL is listed


def render(summaries: Sequence[Summary]) -> str:
    """The page as text; its pictures are embedded, and it loads nothing from the network."""
    try:
        from jinja2 import Environment, StrictUndefined
    except ImportError as error:
        raise ImportError("Expected jinja2 for the report; got none. Install the extra `report`.") from error
    text = (resources.files("expmflow") / "report" / "report.html.jinja").read_text(encoding="utf-8")
    template = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    return template.from_string(text).render(
        title=summaries[0].name if len(summaries) == 1 else f"{len(summaries)} runs",
        names=[s.name for s in summaries],
        results=_table(summaries, _results),
        timings=_table(summaries, _timings),
        curves=_embedded(curves_figure(recorded)) if (recorded := [s for s in summaries if s.records]) else None,
        runs=[_shown(s) for s in summaries],
        configs=list(_configs(summaries)),
        version=f"expmflow {__version__}, torch {torch.__version__}; {_today()}, on {_machine()}",
        number=_number,
    )


def _shown(summary: Summary) -> dict[str, Any]:
    """The part of the page about a single run."""
    return {
        "name": summary.name,
        "pictures": _pictures(summary),
        "scores": _embedded(scores_figure(summary)),
        "latents": None if (latents := latents_figure(summary)) is None else _embedded(latents),
        "certificates": summary.certificates,
    }


def _embedded(figure: Any) -> str:
    return Picture(lambda target: save_figure(figure, target)).embedded()


def _pictures(summary: Summary) -> list[dict[str, str]]:
    """The data beside samples."""
    pictures = summary.kind.compare(
        summary.samples,
        summary.known.rows,
        summary.layout,
        columns=summary.known.columns,
        density=summary.density,
    )
    if summary.known.extremes is not None:
        for what, rows in zip(("most", "least"), summary.known.extremes, strict=True):
            picture = summary.kind.draw(rows, summary.layout)
            caption = f"the {len(rows)} {what} likely of {len(summary.known.nll[summary.known.tested])}"
            pictures = [*pictures, Picture(picture.write, caption)]
    if (latents := summary.latents) is not None:
        rows, expected, path = (part.cpu() for part in (latents.rows, latents.reconstructions, latents.path))
        part = _part(summary.latents_of)
        pictures = [*pictures, *summary.kind.reconstructions(rows, expected, path, summary.layout, part=part)]
    return [
        {
            "alt": f"{picture.caption or 'The data beside samples'} of {summary.name}",
            "caption": picture.caption,
            "source": picture.embedded(),
        }
        for picture in pictures
    ]


def _today() -> str:
    return datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z")


def _machine() -> str:
    """The machine on which the page was made, and its times measured."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"{torch.get_num_threads()} threads"
    return f"{platform.system()} {platform.machine()}, {device}"


def _number(value: float, digits: int = 3) -> str:
    return "–" if math.isnan(value) else f"{value:.{digits}g}"


def _nats(value: float) -> str:
    return "–" if math.isnan(value) else f"{value:.4f}"


def _with_error(value: float, error: float, factor: float = 1.0) -> str:
    return f"{_nats(factor * value)} ± {_nats(factor * error)}"


def _part(name: str) -> str:
    """The name of a data split for people."""
    return {"train": "training"}.get(name, name)


def _tested(summary: Summary) -> bool:
    """Whether the measured split is the test."""
    return summary.known.counts["test"] > 0


def _results(s: Summary) -> Iterator[tuple[str, str]]:
    """The results of a run, by label; a page about several runs has one line for each label."""
    what, unit = "−ELBO" if s.is_bound else "nll", s.unit
    if s.records:
        yield f"best validation {what} (nats)", _nats(s.best["validation_nll"])
        yield "at step", f"{s.best['step']} of {s.last_step}"
    if not _tested(s):
        yield f"no test rows; {_part(s.known.tested)} {what} (nats)", _with_error(s.test_nll, s.test_error)
    else:
        whole = [w for w in s.weighted if w.rows == s.known.counts["test"]]  # the last has the most samples
        value, error = (whole[-1].elbo, whole[-1].elbo_error) if whole else (s.test_nll, s.test_error)
        yield f"test {what} (nats)", _with_error(value, error)
        if unit != NATS:
            yield f"test {what} ({unit.name})", _with_error(value, error, unit.per_nat)
    for w in s.weighted:
        rows = f"{w.samples} noises, {w.rows} {s.kind.name}"
        yield f"importance-weighted ({unit.name})", f"{_with_error(w.nll, w.error, unit.per_nat)} ({rows})"
    if s.entropy is not None:
        yield f"entropy of the data ({unit.name})", _nats(s.entropy)
    for name, nll in s.known.baselines.items():
        yield f"nll of {name} (nats)", _nats(nll) + ("" if s.test_nll < nll else ", which the model does not beat")
    tested, count = len(s.known.nll[s.known.tested]), s.known.counts[s.known.tested]
    if tested < count:
        yield "tested on", f"the first {tested} of {count} rows"
    yield "rows: training, validation, test", ", ".join(map(str, s.known.counts.values()))
    yield "parameters", f"{s.parameters:,}"
    if s.latents is not None:
        kl = s.latents.kl
        yield "latents in use (KL above 0.01 nats)", f"{int((kl > 0.01).sum())} of {len(kl)}"
        largest = ", ".join(f"{value:.2f}" for value in kl.sort(descending=True).values[:MOST_LATENTS].tolist())
        yield "KL of latents, largest first (nats)", largest + (", …" if len(kl) > MOST_LATENTS else "")
    else:  # latents have no inverse
        yield f"round-trip error, {'relative' if s.layout.levels is None else 'grey levels'}", _number(s.round_trip, 2)
    if s.certificates:
        yield "largest truncation error, proven", _number(max(c.plan.truncation_bound for c in s.certificates), 2)


def _timings(s: Summary) -> Iterator[tuple[str, str]]:
    if s.records:
        yield "training, per step", _time(s.seconds_per_step)
        yield "training, all steps", _time(s.seconds_per_step * s.last_step)
    yield "log-likelihood, per row", _time(s.likelihood_seconds)
    yield "sample, per row", _time(s.sample_seconds)


def _time(seconds: float) -> str:
    for unit, factor in (("µs", 1e6), ("ms", 1e3)):
        if seconds * factor < 1000:
            return f"{_number(seconds * factor)} {unit}"
    return f"{_number(seconds)} s"


def _table(summaries: Sequence[Summary], lines: Callable[[Summary], Iterable[tuple[str, str]]]) -> list[Row]:
    """A line for each label; several values of a run share a cell."""
    columns: list[dict[str, list[str]]] = []
    labels: list[str] = []
    for summary in summaries:
        columns.append({})
        at = 0
        for label, cell in lines(summary):
            columns[-1].setdefault(label, []).append(cell)
            if label not in labels:  # after the preceding line
                labels.insert(at, label)
            at = labels.index(label) + 1
    return [(label, ["; ".join(column.get(label, ["–"])) for column in columns]) for label in labels]


def _configs(summaries: Sequence[Summary]) -> Iterator[tuple[str, list[str], bool]]:
    """Every setting that at least one run has set, and whether the runs differ in it."""
    flat = [dict(_flat(_applicable(s))) for s in summaries]
    for key in dict.fromkeys(key for values in flat for key, value in values.items() if value is not None):
        cells = [_setting(values.get(key)) for values in flat]
        yield key, cells, len(set(cells)) > 1


def _applicable(summary: Summary) -> dict[str, Any]:
    """The settings that apply to the run: of its data settings, only those that its source takes."""
    data = summary.config["data"]
    source = sources().get(data["name"])
    known = {"name", *(source.settings if source else data), *summary.kind.augmentations}
    return {**summary.config, "data": {key: value for key, value in data.items() if key in known}}


def _setting(value: Any) -> str:
    return "–" if value is None else str(value)


def _flat(config: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in config.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value
