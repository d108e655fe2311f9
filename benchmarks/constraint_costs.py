"""What the other constraints cost: γ of Sylvester flows on vectors and graphs, the coeff of exponentials.

python -m benchmarks.constraint_costs [--steps 500] [--seeds 0 1 2] [--only moons mog-4 digits]

Small models, trained on the same batches. The table goes to results/constraint-costs.md.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Callable, Sequence
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

RESULTS = Path("results/constraint-costs.json")
BATCH, TEST = 128, 2000
GAMMAS, COEFFS = (0.3, 0.5, 0.9), (0.3, 0.9, 2.0, 4.0)
Samples = Callable[[int, torch.Generator], Tensor]


def moons(gamma: float = 0.5, coeff: float = 0.9) -> nn.Module:
    """Four blocks of ActNorm, exp(M) and a Sylvester layer."""
    layers: list[T.Transform] = []
    for _ in range(4):
        layers += [T.ActNorm(2), T.LinearExp(2, coeff), T.DenseSylvester(2, 32, gamma=gamma), T.Flip()]
    return Flow(T.Chain(layers), StandardNormal((2,)))


def mog(gamma: float = 0.5) -> nn.Module:
    """Six Sylvester layers on complete graphs."""
    layers: list[T.Transform] = []
    for k in range(6):
        layers += [T.ActNorm(2, dim=-1), T.GraphSylvester(2, 32, gamma=gamma, reverse=k % 2 == 1)]
    return Flow(T.Chain(layers), StandardNormal((4, 2)))


def digits(coeff: float = 0.9) -> nn.Module:
    """Four couplings with exponentials between them."""
    model = image_flow((1, 8, 8), subflow="coupling", mixing="convexp", levels=1, subflows=4, growth=8, grey_levels=17)
    for layer in model.modules():
        if isinstance(layer, T.ConvExp):
            layer.coeff = layer.parametrizations.kernel[-1].coeff = coeff
    return model


@cache
def all_digits() -> Dataset:
    return load_images("digits", generator=torch.Generator())


def digit_images(n: int, generator: torch.Generator) -> Tensor:
    data = all_digits()
    part = data.test if n == TEST else data.train
    return part[torch.randint(len(part), (n,), generator=generator)]


CASES: dict[str, tuple[Samples, Callable[..., nn.Module], list[dict[str, float]], float]] = {
    "moons": (
        two_moons,
        moons,
        [*({"gamma": gamma} for gamma in GAMMAS), *({"coeff": coeff} for coeff in COEFFS)],
        1.0,
    ),
    "mog-4": (MIXTURES["mog-4"].sample, mog, [{"gamma": gamma} for gamma in GAMMAS], 4.0),
    "digits": (digit_images, digits, [{"coeff": coeff} for coeff in COEFFS], 64 * math.log(2)),
}


def measure(case: str, setting: dict[str, float], steps: int, seed: int) -> dict[str, Any]:
    """The loss on test data after training, per unit, and the iterations of the inverse."""
    samples, make, _, unit = CASES[case]
    torch.manual_seed(seed)
    model = make(**setting).train()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    drawn = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        loss = -model(samples(BATCH, drawn)).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.eval()
    test = samples(TEST, torch.Generator().manual_seed(1000))
    with torch.no_grad():
        value = float(-model(test).mean()) / unit
        sylvester = [layer for layer in model.modules() if isinstance(layer, T.GeneralizedSylvester)]
        if sylvester and isinstance(model, Flow):
            model.decode(model.encode(test))
    return {
        "case": case,
        "setting": setting,
        "seed": seed,
        "loss": value,
        "iterations": max((layer.last_iterations for layer in sylvester), default=None),
    }


def text(rows: Sequence[dict[str, Any]], steps: int) -> str:
    """Means over seeds."""
    lines = []
    for case, setting in dict.fromkeys((r["case"], json.dumps(r["setting"])) for r in rows):
        same = [r for r in rows if (r["case"], json.dumps(r["setting"])) == (case, setting)]
        losses, iterations = [r["loss"] for r in same], [r["iterations"] for r in same]
        spread = f" ± {statistics.stdev(losses):.3f}" if len(losses) > 1 else ""
        words = ", ".join(f"{name} = {value:g}" for name, value in json.loads(setting).items())
        most = "" if None in iterations else str(max(iterations))
        lines.append([case, words, f"{statistics.fmean(losses):.3f}{spread}", most])
    seeds = len({r["seed"] for r in rows})
    return (
        "# What the other constraints cost\n\n"
        f"`python -m benchmarks.constraint_costs --steps {steps}`: small models, {steps} steps of {BATCH} rows, mean "
        f"and standard deviation over {seeds} seeds, on {TEST} test rows. *moons*: nats, four blocks of exp(M) and "
        "`DenseSylvester`; *mog-4*: nats per node, six layers of `GraphSylvester`; *digits*: bits per dimension, four "
        "couplings with `ConvExp` between them. The defaults are γ = 0.5 and coeff = 0.9; the inner functions of these "
        "two Sylvester flows have no other constraint. Inverses are verified at float32's tolerance.\n\n"
        + markdown_table(["data", "constraint", "loss", "iterations of the inverse"], lines)
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--only", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--threads", type=int, default=None)
    arguments = parser.parse_args()
    if arguments.threads is not None:
        torch.set_num_threads(arguments.threads)
    rows = []
    for case in arguments.only:
        for setting in CASES[case][2]:
            for seed in arguments.seeds:
                rows.append(measure(case, setting, arguments.steps, seed))
                print(json.dumps(rows[-1]), flush=True)
    write_json(RESULTS, {"rows": rows, "steps": arguments.steps})
    write_text(RESULTS.with_suffix(".md"), text(rows, arguments.steps))


if __name__ == "__main__":
    main()
