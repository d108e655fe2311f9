"""The table of VAEs as Markdown."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import mean, stdev
from typing import Any

from expmflow.experiments.table import markdown_table, seconds_words
from expmflow.training.config import Config

HEADER = [
    "posterior",
    "seed",
    "paper −ELBO",
    "ours",
    "paper NLL",
    "ours",
    "parameters",
    "of the flow",
    "latents in use",
    "s/step",
    "s",
    "command",
]
TITLES = {"mnist": "Black and white MNIST, nats", "cifar10": "CIFAR-10, bits per dimension"}
DIGITS = {"mnist": 2, "cifar10": 3}
MAIN = ", preset laptop"  # marks a row of the main preset in the differences of another

Row = Mapping[str, Any]


def vae_text(
    table: Mapping[str, Any],
    *,
    labels: Mapping[str, str],
    paper: Mapping[str, Sequence[float]],
    configs: Mapping[str, Config],
    choices: str,
) -> str:
    """Rows, means over seeds, the validation and differences on the same images, for each set of images."""
    parts = [
        "# Flows as posteriors of VAEs\n\nOne latent representation with a standard normal prior; Bernoulli pixels for "
        "black and white MNIST, a discretized mixture of logistics for CIFAR-10; the rows differ in the posterior "
        f"alone. {choices}\n",
        "± of a row is the standard error over the test images, of several seeds the standard deviation over them, of "
        "the paper the spread of its three runs. Parameters of the flow count those that the encoder's head gives it. "
        "A latent number is in use if its KL is above 0.01 nats.\n",
    ]
    for images, config in configs.items():
        rows = [r for r in table["rows"] if r["images"] == images]
        if not rows:
            continue
        digits = DIGITS[images]
        parts.append(f"## {TITLES[images]}\n\n{_schedule(config)} {_tested(rows)}\n")
        parts.append(
            markdown_table(HEADER, [*(_row(r, labels, digits) for r in rows), *_over_seeds(rows, labels, digits)])
        )
        if config.optim.decay_every:
            steps = [*range(config.optim.decay_every, config.train.steps, config.optim.decay_every), config.train.steps]
            parts.append("−ELBO of the validation after so many steps, where the learning rate falls and at the end:\n")
            lines = [_validations(r, labels, steps, digits) for r in rows]
            parts.append(markdown_table(["posterior", "seed", *(f"{step:,}" for step in steps)], lines))
        differences = [d for d in table.get("differences", []) if d["model"].startswith(f"{images}-")]
        if differences:
            header = ["posterior", "minus", "seed", "paper −ELBO", "ours", "paper NLL", "ours"]
            parts.append("Differences on the same test images, below zero where the posterior is better:\n")
            parts.append(markdown_table(header, [_difference(d, labels, paper, digits) for d in differences]))
    return "\n".join(parts)


def _schedule(config: Config) -> str:
    optim, settings = config.optim, config.train
    decay = "" if optim.decay == 1 else f", times {optim.decay:g} every {optim.decay_every:,} steps"
    return (
        f"{settings.steps:,} steps of {settings.batch_size} images at most; {optim.optimizer} at {optim.lr:g}{decay}; "
        f"the KL part grows over {optim.kl_warmup:,} steps."
    )


def _tested(rows: Sequence[Row]) -> str:
    images, weighed = rows[0]["elbo_images"], sorted({(r["nll_images"], r["importance_samples"]) for r in rows})
    words = f"The −ELBO is that of {images:,} test images"
    words += "".join(f", the NLL that of the first {n:,}, by {k:,} importance samples each" for n, k in weighed)
    return f"{words}. {seconds_words(rows)}"


def _row(r: Row, labels: Mapping[str, str], digits: int) -> list[str]:
    return [
        labels[r["posterior"]],
        str(r["seed"]),
        _of_paper(r["paper"], "elbo"),
        f"{r['elbo']:.{digits}f} ± {r['elbo_standard_error']:.{digits}f}",
        _of_paper(r["paper"], "nll"),
        f"{r['nll']:.{digits}f} ± {r['nll_standard_error']:.{digits}f}",
        f"{r['parameters']:,}",
        f"{r['flow_parameters']:,}",
        f"{r['latents_in_use']} of {r['latents']}",
        f"{r['seconds_per_step']:.3f}",
        f"{r['training_seconds']:,}",
        f"`{r['command']}`",
    ]


def _over_seeds(rows: Sequence[Row], labels: Mapping[str, str], digits: int) -> Iterator[list[str]]:
    for model in dict.fromkeys(r["model"] for r in rows):
        cell = [r for r in rows if r["model"] == model]
        if len(cell) > 1:
            ours = {
                name: f"**{mean(values):.{digits}f}** ± {stdev(values):.{digits}f}"
                for name, values in ((name, [r[name] for r in cell]) for name in ("elbo", "nll"))
            }
            paper = cell[0]["paper"]
            beside = [_of_paper(paper, "elbo"), ours["elbo"], _of_paper(paper, "nll"), ours["nll"]]
            yield [labels[cell[0]["posterior"]], f"{len(cell)} seeds", *beside, *6 * [""]]


def _validations(r: Row, labels: Mapping[str, str], steps: Sequence[int], digits: int) -> list[str]:
    curve = dict(r["curve"])
    values = (f"{curve[step]:.{digits}f}" if step in curve else "–" for step in steps)
    return [labels[r["posterior"]], str(r["seed"]), *values]


def _difference(d: Row, labels: Mapping[str, str], paper: Mapping[str, Sequence[float]], digits: int) -> list[str]:
    ours, (theirs, *of_main) = d["model"], d["minus"].split(MAIN)
    names = [labels[model.partition("-")[2]] for model in (ours, theirs)]
    line = [names[0], names[1] + MAIN * len(of_main), str(d["seed"])]
    for name, place in (("elbo", 0), ("nll", 2)):
        line.append("–" if ours == theirs else f"{paper[ours][place] - paper[theirs][place]:+.2f}")
        line.append(f"{d[name]:+.{digits}f} ± {d[f'{name}_standard_error']:.{digits}f}")
    return line


def _of_paper(paper: Mapping[str, float], name: str) -> str:
    error = paper.get(f"{name}_error")
    return f"{paper[name]:.2f}" + ("" if error is None else f" ± {error:g}")
