"""What the norm constraint of Sylvester flows costs: bits per dimension against iterations of the inverse.

python -m benchmarks.sylvester_tradeoff [--data .data] [--steps 300] [--only default shared ...] [--threads N]

Each setting is the preset cifar10-anchor-sylvester with a few things changed, trained with the same seed and the same
batches. What is trained already, below runs/, is not trained again. The tables go to results/sylvester.md; rows that
are not asked for stay in them as they are, so that --only without a setting writes the tables alone.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from benchmarks.sylvester_text import text
from torch import Tensor, nn

from expmflow import transforms as T
from expmflow.data import Dataset
from expmflow.distributions import bits_per_dim
from expmflow.nn import ConvInner
from expmflow.numerics import ConvergenceError, Solution, fixed_point
from expmflow.numerics.solve import triangular_fixed_point
from expmflow.training.build import build_data, build_model, resolve
from expmflow.training.config import Config, load_config
from expmflow.training.files import write_json, write_text
from expmflow.training.loop import train
from expmflow.training.randomness import Randomness
from expmflow.training.run import RunFolder

IMAGES, SAMPLES, BATCH = 2000, 256, 64
TOL = 1e-4  # at which the paper counts up to 50 iterations
MOST = 400  # iterations over whole images before they are given up
RESULTS = Path("results/sylvester.json")
Change = Callable[[ConvInner], None]


def heads_apart(inner: ConvInner) -> None:
    """The four heads stacked may have twice the norm: 1.5 each, as where every head is a convolution of its own."""
    inner.last.parametrizations.weight[-1].coeff *= 2


def no_slack(inner: ConvInner) -> None:
    """Norms on the grid of frequencies count as they are, without what may lie between its points."""
    for layer in (inner.first, inner.middle, inner.last):
        layer.parametrizations.weight[-1].slack = 1.0


def relu(inner: ConvInner) -> None:
    """As in the paper."""
    inner.activation = F.relu


@torch.no_grad()
def full_heads(inner: ConvInner) -> None:
    """As the authors start: s₁ and t₁ at zero, s₂ and t₂ at full size for ReLU, instead of all at a hundredth."""
    weight = inner.last.parametrizations.weight.original
    s1, s2, t1, t2 = weight.chunk(4)
    inner.last.bias.zero_()
    for head in (s1, t1):
        head.zero_()
    for head in (s2, t2):
        head.mul_(100 * 2**0.5)


def wide_gamma(inner: ConvInner) -> None:
    """A diagonal within ±0.9."""
    inner.gamma = 0.9


@dataclass(frozen=True)
class Setting:
    """What is different from the preset."""

    words: str
    overrides: tuple[str, ...] = ()
    changes: tuple[Change, ...] = ()
    coeff: float | None = None
    """Of the exponentials; as it is if None."""


PAPER = ("model.lipschitz=1.5", "model.start=rotation")
FREE = ("model.start=rotation",)
SETTINGS = {
    "shared": Setting("norms of 1.5, shared by the four heads", PAPER),
    "apart": Setting("norms of 1.5, the heads' apart", PAPER, (heads_apart,)),
    "no-slack": Setting("the same, no slack for frequencies between the grid's", PAPER, (heads_apart, no_slack)),
    "lipschitz-3": Setting("norms of 3", ("model.lipschitz=3", "model.start=rotation")),
    "lipschitz-10": Setting("norms of 10", ("model.lipschitz=10", "model.start=rotation")),
    "none": Setting("no constraint", FREE),
    "none-relu": Setting("no constraint, ReLU", FREE, (relu,)),
    "none-heads": Setting("no constraint, heads that start at full size", FREE, (full_heads,)),
    "none-gamma": Setting("no constraint, γ = 0.9", FREE, (wide_gamma,)),
    "averages-shared": Setting("norms of 1.5, levels start with averages", ("model.lipschitz=1.5",)),
    "default": Setting("no constraint, levels start with averages: the default"),
    "default-relu": Setting("the default with ReLU", (), (relu,)),
    "default-gamma": Setting("the default with γ = 0.9", (), (wide_gamma,)),
    "default-coeff-2": Setting("the default with exponentials of norms up to 2", coeff=2.0),
}


def trained_model(config: Config, setting: Setting, folder: Path, data: Dataset) -> nn.Module:
    """The model of a setting after its training, which is not repeated."""
    model = build_model(config, data.event_shape)
    for module in model.modules():
        if isinstance(module, ConvInner):
            for change in setting.changes:
                change(module)
        if isinstance(module, T.ConvExp) and setting.coeff is not None:
            module.coeff = module.parametrizations.kernel[-1].coeff = setting.coeff
    return train(config, folder, model=model, data=data).eval()


@torch.no_grad()
def bits(model: nn.Module, images: Tensor) -> Tensor:
    """Bits per dimension of each image, with one noise for each, the same for all models."""
    noise = torch.rand(images.shape, generator=torch.Generator().manual_seed(0))
    parts = [model(x, noise=u) for x, u in zip(images.split(BATCH), noise.split(BATCH), strict=True)]
    return bits_per_dim(torch.cat(parts), tuple(images.shape[1:]))


@torch.no_grad()
def inverse(model: nn.Module, images: Tensor) -> dict[str, Any]:
    """What the way back takes: iterations of the layer with the most, seconds, and grey levels lost."""
    layers = [layer for layer in model.modules() if isinstance(layer, T.ConvSylvester)]
    outputs: dict[int, Tensor] = {}
    hooks = [
        layer.register_forward_hook(lambda module, given, result, k=k: outputs.update({k: result[0]}))
        for k, layer in enumerate(layers)
    ]
    y = (images.float() + 0.5) / 256 - 0.5
    latents = model.flow.encode(y)
    for hook in hooks:
        hook.remove()
    whole = [_whole(layer, outputs[k], preconditioned=True) for k, layer in enumerate(layers)]
    plain = [_whole(layer, outputs[k], preconditioned=False) for k, layer in enumerate(layers)]
    for layer in layers:
        layer.tol = TOL
    drawn = model.flow.base.rsample(
        len(images), noise=torch.randn(images.shape, generator=torch.Generator().manual_seed(0))
    )
    found = {"whole": _worst(whole), "plain": _worst(plain)}
    for name, z in (("images", latents), ("samples", drawn)):
        started = time.perf_counter()
        try:
            back = model.flow.decode(z)
            rounds: int | None = max(layer.last_iterations for layer in layers)
        except ConvergenceError:
            back, rounds = None, None
        found |= {f"iterations_{name}": rounds, f"seconds_{name}": time.perf_counter() - started}
        if name == "images":
            found["grey_levels"] = None if back is None else float((back - y).abs().max()) * 256
    for layer in layers:
        layer.tol = None
    back = model.flow.decode(latents)
    found["grey_levels_default"] = float((back - y).abs().max()) * 256
    found["iterations_default"] = max(layer.last_iterations for layer in layers)
    return found


def _whole(layer: T.ConvSylvester, z: Tensor, *, preconditioned: bool) -> Solution:
    """The iteration over whole images, ours or the paper's."""
    v, _ = layer.basis(z)
    if preconditioned:
        return triangular_fixed_point(
            lambda u, rows: layer.inner(u), v, tol=TOL, max_iterations=MOST, raise_on_failure=False
        )
    return fixed_point(lambda u: layer.inner(u)[0], v, tol=TOL, max_iterations=MOST, raise_on_failure=False)


def _worst(solutions: list[Solution]) -> int | None:
    """The most iterations of a layer; None if one did not converge."""
    return max(s.iterations for s in solutions) if all(s.converged for s in solutions) else None


def measure(name: str, data: Path, steps: int, seed: int, threads: int | None) -> dict[str, Any]:
    """One row."""
    setting = SETTINGS[name]
    overrides = [f"train.seed={seed}", f"train.steps={steps}", f"train.validate_every={steps}", f"data.dir={data}"]
    overrides += [*([f"train.threads={threads}"] if threads else []), *setting.overrides]
    config = load_config("cifar10-anchor-sylvester", overrides)
    rows = build_data(config.data, Randomness(seed))
    folder = Path(f"runs/sylvester/{name}-{steps}-{seed}")
    if name == "default" and config == load_config("cifar10-anchor-sylvester", overrides[:1] + overrides[3:]):
        folder = Path(f"runs/anchor-sylvester-{seed}")  # the preset itself, which benchmarks.anchors trains
    model = trained_model(resolve(config, rows), setting, folder, rows)
    found = bits(model, rows.test[:IMAGES])
    records = [r["seconds_per_step"] for r in RunFolder(folder).read_metrics() if "seconds_per_step" in r]
    return {
        "setting": name,
        "steps": steps,
        "seed": seed,
        "bpd": float(found.mean()),
        "error": float(found.std()) / len(found) ** 0.5,
        "seconds_per_step": statistics.median(records),
        "parameters": sum(p.numel() for p in model.parameters()),
        **inverse(model, rows.test[:SAMPLES]),
    }


def write_tables() -> None:
    """Of all rows that there are."""
    words = {name: setting.words for name, setting in SETTINGS.items()}
    write_text(RESULTS.with_suffix(".md"), text(json.loads(RESULTS.read_text()), words))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--data", type=Path, default=Path(".data"), help="the folder with cifar-10-batches-bin")
    parser.add_argument("--only", nargs="*", choices=list(SETTINGS), default=list(SETTINGS), metavar="SETTING")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--threads", type=int, default=None)
    arguments = parser.parse_args()
    if arguments.threads is not None:
        torch.set_num_threads(arguments.threads)
    for name in arguments.only:
        for seed in arguments.seeds:
            row = measure(name, arguments.data, arguments.steps, seed, arguments.threads)
            print(json.dumps(row), flush=True)
            rows = json.loads(RESULTS.read_text())["rows"] if RESULTS.exists() else []
            key = (name, arguments.steps, seed)
            rows = [r for r in rows if (r["setting"], r["steps"], r["seed"]) != key] + [row]
            write_json(RESULTS, {"rows": rows, "images": IMAGES, "samples": SAMPLES, "tol": TOL, "most": MOST})
            write_tables()
    if not arguments.only:
        write_tables()


if __name__ == "__main__":
    main()
