"""What the other constraints cost: γ of Sylvester flows on vectors and graphs, the coeff of exponentials.

python -m benchmarks.constraint_costs [--seeds 0 1 2 3 4] [--only moons mog-4 correlated digits] [--threads N]

Small models, trained on the same batches. The table goes to results/constraint-costs.md; rows that are not asked for
stay in it as they are, so that --only without a name writes the table alone.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from expmflow import transforms as T
from expmflow.data import Dataset, load_images, two_moons
from expmflow.data.graphs import MIXTURES
from expmflow.distributions import Flow, StandardNormal
from expmflow.experiments.table import markdown_table
from expmflow.models import image_flow
from expmflow.training.files import write_json, write_text

Setting = dict[str, float]
Settings = tuple[Setting, ...]
RESULTS = Path("results/constraint-costs.json")
BATCH, TEST = 128, 2000
FEATURES, CORRELATION = 8, 0.95
DEFAULTS = {"gamma": 0.5, "coeff": 0.9}
GAMMAS: Settings = tuple({"gamma": gamma} for gamma in (0.3, 0.5, 0.9))
COEFFS: Settings = tuple({"coeff": coeff} for coeff in (0.3, 0.9, 3.0))
EXPLANATION = f"""# What the other constraints cost

`python -m benchmarks.constraint_costs`: small models, trained by Adam on {BATCH} rows a step, tested on {TEST} rows that they
have not seen.

- *moons*: nats; four blocks of exp(M) and `DenseSylvester`. *Longer* has the seeds 0, 1 and 2 alone.
- *mog-4*: nats per node; six layers of `GraphSylvester`.
- *correlated*: a Gaussian of {FEATURES} features, neighbours correlated by {CORRELATION}; ActNorm and one exp(M), or two. A matrix that
  whitens it, and be it scaled as a whole, has a logarithm of norm 1.4 at least. Nats above the density that the rows come from.
- *digits*: bits per dimension; four couplings with `ConvExp` between them.

The defaults are γ = {DEFAULTS["gamma"]} and coeff = {DEFAULTS["coeff"]}. The loss is the mean over seeds with their standard deviation; the column
after it has what is gained or lost against the default, seed by seed from the same start and batches, with the standard
error of that mean. *Norm* is the largest that an exponential has after training: about `coeff`, which a power iteration
follows, where the constraint binds. *Diagonal* is the largest entry on the diagonal of the Jacobian of an inner function, which γ
bounds. The iterations are of the Sylvester layer and the seed with the most, verified at float32's tolerance.

The defaults stay as they are, which are the paper's. A larger γ gains a little and takes more iterations, so it is an
argument. A `coeff` costs much where one exponential has to do all of the work alone, and a second one or a larger `coeff` gives
that back; between couplings it costs nothing that these seeds could show ([docs/layers.md](../docs/layers.md)).

"""  # noqa: E501


def moons(gamma: float) -> nn.Module:
    """Four blocks of ActNorm, exp(M) and a Sylvester layer."""
    layers: list[T.Transform] = []
    for _ in range(4):
        layers += [T.ActNorm(2), T.LinearExp(2), T.DenseSylvester(2, 32, gamma=gamma), T.Flip()]
    return Flow(T.Chain(layers), StandardNormal((2,)))


def mog(gamma: float) -> nn.Module:
    """Six Sylvester layers on complete graphs."""
    layers: list[T.Transform] = []
    for k in range(6):
        layers += [T.ActNorm(2, dim=-1), T.GraphSylvester(2, 32, gamma=gamma, reverse=k % 2 == 1)]
    return Flow(T.Chain(layers), StandardNormal((4, 2)))


def whitening(coeff: float, layers: float = 1) -> nn.Module:
    """Linear, so that nothing but the exponential can take the correlations away."""
    exponentials = [T.LinearExp(FEATURES, coeff) for _ in range(int(layers))]
    return Flow(T.Chain([T.ActNorm(FEATURES), *exponentials]), StandardNormal((FEATURES,)))


def digits(coeff: float) -> nn.Module:
    """Four couplings with exponentials between them."""
    model = image_flow((1, 8, 8), subflow="coupling", mixing="convexp", levels=1, subflows=4, growth=8, grey_levels=17)
    for layer in model.modules():
        if isinstance(layer, T.ConvExp):
            layer.coeff = layer.parametrizations.kernel[-1].coeff = coeff
    return model


@cache
def correlated() -> torch.distributions.Distribution:
    """Each feature a walk from the one before, with variance one."""
    places = torch.arange(FEATURES)
    covariance = CORRELATION ** (places[:, None] - places).abs().float()
    return torch.distributions.MultivariateNormal(torch.zeros(FEATURES), covariance)


def correlated_rows(n: int, generator: torch.Generator) -> Tensor:
    return torch.randn(n, FEATURES, generator=generator) @ correlated().scale_tril.mT


@cache
def all_digits() -> Dataset:
    return load_images("digits", generator=torch.Generator())


def digit_images(n: int, generator: torch.Generator) -> Tensor:
    data = all_digits()
    part = data.test if n == TEST else data.train
    return part[torch.randint(len(part), (n,), generator=generator)]


@dataclass(frozen=True)
class Case:
    """Data, the model that its constraints are varied in, and how long it is trained."""

    samples: Callable[[int, torch.Generator], Tensor]
    make: Callable[..., nn.Module]
    settings: Settings
    unit: float
    steps: int
    lr: float
    truth: Callable[[Tensor], Tensor] | None = None
    """The log-density of the rows, where it is known."""


CASES = {
    "moons": Case(two_moons, moons, GAMMAS, 1.0, 400, 2e-3),
    "moons, longer": Case(two_moons, moons, GAMMAS[1:], 1.0, 1600, 2e-3),
    "mog-4": Case(MIXTURES["mog-4"].sample, mog, GAMMAS, 4.0, 400, 2e-3),
    "correlated": Case(
        correlated_rows,
        whitening,
        (*COEFFS, {"coeff": 0.9, "layers": 2}),
        1.0,
        1000,
        1e-2,
        lambda x: correlated().log_prob(x),
    ),
    "digits": Case(digit_images, digits, COEFFS, 64 * math.log(2), 300, 1e-2),
}


def measure(name: str, setting: Setting, seed: int) -> dict[str, Any]:
    """The loss on test data after training, per unit; what was reached of the bounds; iterations of the inverse."""
    case = CASES[name]
    torch.manual_seed(seed)
    model = case.make(**setting).train()
    optimizer = torch.optim.Adam(model.parameters(), lr=case.lr)
    drawn = torch.Generator().manual_seed(seed)
    for _ in range(case.steps):
        loss = -model(case.samples(BATCH, drawn)).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return {"case": name, "setting": setting, "seed": seed, **tested(model.eval(), case)}


@torch.no_grad()
def tested(model: nn.Module, case: Case) -> dict[str, Any]:
    """What a trained model has to show."""
    test = case.samples(TEST, torch.Generator().manual_seed(1000))
    sylvester = [layer for layer in model.modules() if isinstance(layer, T.GeneralizedSylvester)]
    diagonals: list[float] = []
    for layer in sylvester:
        layer.inner.register_forward_hook(lambda *call: diagonals.append(float(call[-1][1].abs().max())))
    torch.manual_seed(0)
    found = -model(test)
    reached = max(diagonals, default=None)
    if case.truth is not None:
        found = found + case.truth(test)
    if sylvester and isinstance(model, Flow):
        model.decode(model.encode(test))
    exponentials = [layer for layer in model.modules() if isinstance(layer, (T.LinearExp, T.ConvExp))]
    weights = [layer.parametrizations[layer.constrained] for layer in exponentials]
    return {
        "loss": float(found.mean()) / case.unit,
        "norm": max((weight[-1].norm_bound(weight()) for weight in weights), default=None),
        "diagonal": reached,
        "iterations": max((layer.last_iterations for layer in sylvester), default=None),
    }


def is_default(setting: Setting) -> bool:
    return all(DEFAULTS.get(name) == value for name, value in setting.items())


def text(rows: Sequence[dict[str, Any]]) -> str:
    """Means over seeds."""
    lines = []
    for name, case in CASES.items():
        ours = [r for r in rows if r["case"] == name]
        default = {r["seed"]: r["loss"] for r in ours if is_default(r["setting"])}
        for setting in case.settings:
            same = [r for r in ours if r["setting"] == setting]
            if not same:
                continue
            against = [r["loss"] - default[r["seed"]] for r in same if r["seed"] in default]
            lines.append(
                [
                    name,
                    ", ".join(f"{key} = {value:g}" for key, value in setting.items()),
                    _mean([r["loss"] for r in same], "{:.3f}", 1),
                    "" if is_default(setting) else _mean(against, "{:+.3f}", len(against)),
                    *(_largest([r[key] for r in same], "{:.2f}") for key in ("norm", "diagonal")),
                    _largest([r["iterations"] for r in same], "{}"),
                    f"{case.steps}",
                    f"{case.lr:g}",
                    f"{len(same)}",
                ]
            )
    header = ["data", "constraint", "loss", "against the default", "norm", "diagonal", "iterations"]
    return EXPLANATION + markdown_table([*header, "steps", "rate", "seeds"], lines)


def _mean(values: Sequence[float], form: str, divisor: int) -> str:
    """With the standard deviation over the root of `divisor`, if there is one."""
    spread = f" ± {statistics.stdev(values) / divisor**0.5:.3f}" if len(values) > 1 else ""
    return (form.format(statistics.fmean(values)) + spread) if values else ""


def _largest(values: Sequence[float | None], form: str) -> str:
    known = [value for value in values if value is not None]
    return form.format(max(known)) if known else ""


def write_table() -> None:
    """Of all rows that there are."""
    write_text(RESULTS.with_suffix(".md"), text(json.loads(RESULTS.read_text())["rows"]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--only", nargs="*", choices=list(CASES), default=list(CASES), metavar="DATA")
    parser.add_argument("--threads", type=int, default=None)
    arguments = parser.parse_args()
    if arguments.threads is not None:
        torch.set_num_threads(arguments.threads)
    for case in arguments.only:
        for seed in arguments.seeds:
            for setting in CASES[case].settings:
                row = measure(case, setting, seed)
                print(json.dumps(row), flush=True)
                rows = json.loads(RESULTS.read_text())["rows"] if RESULTS.exists() else []
                key = (case, setting, seed)
                rows = [r for r in rows if (r["case"], r["setting"], r["seed"]) != key] + [row]
                write_json(RESULTS, {"rows": rows})
                write_table()
    if not arguments.only:
        write_table()


if __name__ == "__main__":
    main()
