"""Tables of image flows as Markdown."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import mean, stdev
from typing import Any

from expmflow.experiments.table import markdown_table, seconds_words
from expmflow.training.config import Config

DIVERGED = 100.0  # bits per dimension
HEADER = ["model", "seed", "paper −ELBO", "ours", "paper NLL", "ours", "parameters", "lr", "s/step", "s", "command"]


def table_text(
    table: Mapping[str, Any],
    *,
    title: str,
    about: str,
    labels: Mapping[str, str],
    papers: Mapping[str, Mapping[str, float]],
    config: Config,
    figure: str,
) -> str:
    """Rows, means over seeds, the choice of rates, differences on the same images.

    `labels` and `papers` have the name of each model and the paper's numbers; `figure` is the picture beside the table.
    """
    rows: Sequence[Mapping[str, Any]] = table["rows"]
    optim, settings = config.optim, config.train
    parts = [f"# {title}\n\n{about}\n"]
    decay = "" if optim.decay == 1 else f", times {optim.decay:g} every {_every(config)}"
    parts.append(
        f"CIFAR-10, bits per dimension. {settings.steps:,} steps of {settings.batch_size} images; {optim.optimizer}, "
        f"{optim.warmup:,} steps of warm-up{decay}.{_rate_words(rows)} ± of a row is the standard error over the test "
        "images, of several seeds the standard deviation over them, of the paper the spread of its runs where it gives "
        f"one. Parameters count without weights that a mask keeps at zero.{_test_words(rows)}\n"
    )
    parts.append(markdown_table(HEADER, [*(_row(r, labels) for r in rows), *_over_seeds(rows, labels)]))
    rates = list(dict.fromkeys(rate for r in rows for rate in r["tried"]))
    if rates:
        lines = [[labels[r["model"]], str(r["seed"]), *(_tried(r, rate) for rate in rates)] for r in rows]
        parts.append("Validation after the short training at each learning rate, – where it diverged:\n")
        parts.append(markdown_table(["model", "seed", *rates], lines))
    if table.get("differences"):
        header = ["model", "minus", "seed", "paper −ELBO", "ours", "paper NLL", "ours"]
        lines = [_difference(d, papers, labels) for d in table["differences"]]
        parts.append("Differences on the same test images, below zero where the model is better:\n")
        parts.append(markdown_table(header, lines))
    parts.append(f"![Validation against steps and seconds]({figure})\n")
    return "\n".join(parts)


def _every(config: Config) -> str:
    return "epoch" if config.optim.decay_every is None else f"{config.optim.decay_every:,} steps"


def _rate_words(rows: Sequence[Mapping[str, Any]]) -> str:
    """A sentence about the learning rates that were tried."""
    tried = dict.fromkeys(rate for r in rows for rate in r["tried"])
    if not tried:
        return ""
    return f" A row's learning rate is that of {', '.join(tried)} with the best validation after a short training."


def _test_words(rows: Sequence[Mapping[str, Any]]) -> str:
    """The numbers of images, samples and threads behind the results."""
    if not rows:
        return ""
    images = sorted({r["elbo_images"] for r in rows})
    weighed = sorted({(r["nll_images"], r["importance_samples"]) for r in rows if r["nll"] is not None})
    words = f" The −ELBO is that of {' or '.join(f'{n:,}' for n in images)} test images"
    words += "".join(f", the NLL that of the first {n:,}, by {k:,} importance samples each" for n, k in weighed)
    return f"{words}. {seconds_words(rows)}"


def _row(r: Mapping[str, Any], labels: Mapping[str, str]) -> list[str]:
    return [
        labels[r["model"]],
        str(r["seed"]),
        _of_paper(r["paper"], "elbo"),
        _with_error(r["elbo"], r.get("elbo_standard_error")),
        _of_paper(r["paper"], "nll"),
        _with_error(r["nll"], r.get("nll_standard_error")),
        f"{r['parameters']:,}",
        f"{r['lr']:g}",
        f"{r['seconds_per_step']:.3f}",
        f"{r['training_seconds']:,}",
        f"`{r['command']}`",
    ]


def _over_seeds(rows: Sequence[Mapping[str, Any]], labels: Mapping[str, str]) -> Iterator[list[str]]:
    for model in dict.fromkeys(r["model"] for r in rows):
        cell = [r for r in rows if r["model"] == model]
        if len(cell) > 1:
            values = {name: [r[name] for r in cell if r[name] is not None] for name in ("elbo", "nll")}
            ours = {n: f"**{mean(v):.4f}** ± {stdev(v):.4f}" if len(v) > 1 else "–" for n, v in values.items()}
            paper = cell[0]["paper"]
            beside = [_of_paper(paper, "elbo"), ours["elbo"], _of_paper(paper, "nll"), ours["nll"]]
            yield [labels[model], f"{len(cell)} seeds", *beside, *5 * [""]]


def _tried(r: Mapping[str, Any], rate: str) -> str:
    """What the short training came to, unless it diverged."""
    value = r["tried"].get(rate)
    return "–" if value is None or value > DIVERGED else f"{value:.3f}"


def _difference(
    d: Mapping[str, Any], papers: Mapping[str, Mapping[str, float]], labels: Mapping[str, str]
) -> list[str]:
    of, minus = papers[d["model"]], papers[d["minus"]]
    line = [labels[d["model"]], labels[d["minus"]], str(d["seed"])]
    for name in ("elbo", "nll"):
        known = of is not minus and name in of and name in minus  # of a row at two rates the paper has one
        line += [f"{of[name] - minus[name]:+.3f}" if known else "–"]
        line += [f"{d[name]:+.4f} ± {d[f'{name}_standard_error']:.4f}" if name in d else "–"]
    return line


def _of_paper(paper: Mapping[str, float], name: str) -> str:
    if name not in paper:
        return "–"
    error = paper.get(f"{name}_error")
    return f"{paper[name]:.3f}" + ("" if error is None else f" ± {error:.3f}")


def _with_error(value: float | None, error: float | None) -> str:
    return "–" if value is None else f"{value:.4f}" + ("" if error is None else f" ± {error:.4f}")
