"""The presets cifar10-anchor-* and the plain model, seed by seed: bits per dimension on the first 2000 test images.

python -m benchmarks.anchors [--data .data] [--only expmflow-convexp ...] [--seeds 0 1 2] [--threads N]

What is trained already, below runs/, is not trained again. The table goes to results/cifar10-anchors.md; what
--only leaves out stays in it as it is.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from expmflow import transforms as T
from expmflow.distributions import bits_per_dim
from expmflow.experiments.table import markdown_table
from expmflow.models.mixing import TRAINING_TOL
from expmflow.nn.constraints import constant_constraints
from expmflow.runs.evaluation import open_run
from expmflow.training.config import load_config
from expmflow.training.files import write_json, write_text
from expmflow.training.loop import train

IMAGES = 2000
BATCH = 32
# Bits per dimension that the authors' code reaches at this budget; of Sylvester layers, on the first 500 images.
AUTHORS = {"1x1": 4.497, "convexp": 4.206, "sylvester": 4.296}
RESULTS = Path("results/cifar10-anchors.json")


def ours(mixing: str, seed: int, data: Path, threads: int | None) -> dict[str, float]:
    """Train the preset, or go on with it, and test it."""
    folder = Path(f"runs/anchor-{mixing}-{seed}")
    overrides = [f"train.seed={seed}", f"data.dir={data}", *([f"train.threads={threads}"] if threads else [])]
    train(load_config(f"cifar10-anchor-{mixing}", overrides), folder)
    trained = open_run(folder)
    bits = bits_per_dim(trained.log_likelihoods(trained.data().test[:IMAGES]), trained.event_shape)
    records = [record["seconds_per_step"] for record in trained.folder.read_metrics() if "seconds_per_step" in record]
    return {
        "bpd": float(bits.mean()),
        "error": float(bits.std()) / len(bits) ** 0.5,
        "seconds_per_step": statistics.median(records),
        "parameters": sum(p.numel() for p in trained.model.parameters()),
        **(truncation(trained.model, trained.data().train) if mixing != "1x1" else {}),
    }


def truncation(model: nn.Module, images: Tensor) -> dict[str, float]:
    """How far the gradient of a batch is from the one with exponentials to rounding, and from that of another batch."""
    layers = [layer for layer in model.modules() if isinstance(layer, T.ConvExp)]
    first, other = images[: 2 * BATCH].split(BATCH)
    noise = torch.rand(first.shape, generator=torch.Generator().manual_seed(0))

    def gradient(x: Tensor) -> Tensor:
        loss = -model(x, noise=noise).mean()
        return torch.cat([grad.flatten() for grad in torch.autograd.grad(loss, list(model.parameters()))])

    model.train()
    with constant_constraints():
        as_trained, of_another = gradient(first), gradient(other)
        for layer in layers:
            layer.training_tol = None
        exact = gradient(first)
    size = exact.norm()
    return {
        "gradient_truncation": float((as_trained - exact).norm() / size),
        "gradient_of_another_batch": float((of_another - as_trained).norm() / size),
    }


def plain(mixing: str, seed: int, data: Path, threads: int | None) -> dict[str, float]:
    """The same of the plain model."""
    out = Path(f"runs/plain/{mixing}-{seed}.json")
    if not out.exists():
        command = [sys.executable, "-m", "benchmarks.plain_image", "train", "--mixing", mixing, "--seed", str(seed)]
        more = ["--data", str(data), "--out", str(out), *(["--threads", str(threads)] if threads else [])]
        subprocess.run([*command, *more], check=True)
    return json.loads(out.read_text())


MODELS = {"expmflow": ours, "plain": plain}


def text(found: list[dict[str, Any]]) -> str:
    """The rows, and the means over seeds."""
    rows = [
        [r["model"], r["mixing"], str(r["seed"]), f"{r['bpd']:.4f} ± {r['error']:.4f}", f"{AUTHORS[r['mixing']]:.3f}"]
        for r in found
    ]
    for model, mixing in dict.fromkeys((r["model"], r["mixing"]) for r in found):
        values = [r["bpd"] for r in found if (r["model"], r["mixing"]) == (model, mixing)]
        if len(values) > 1:
            mean = f"**{statistics.fmean(values):.4f}** ± {statistics.stdev(values):.4f}"
            rows.append([f"**{model}**", mixing, f"mean of {len(values)}", mean, f"{AUTHORS[mixing]:.3f}"])
    return (
        "# CIFAR-10 at a budget of minutes\n\n"
        f"Bits per dimension (−ELBO, uniform dequantization) on the first {IMAGES} test images after 1500 steps of 32 "
        "images: `python -m benchmarks.anchors`. The ± of a seed is the standard error over images, that of a mean "
        "the standard deviation over seeds. The first mixing layer of each level starts at averages and differences; "
        "so it does in *plain*, the same model in plain PyTorch. The rows `sylvester` are of three levels of "
        "convolutional Sylvester layers in place of couplings and mixing layers. The last column is what the authors' "
        "code came to at this budget, of `sylvester` on 500 images; its levels start with random rotations, and no "
        "command here measures it again.\n\n"
        f"{_truncations(found)}\n\n"
        + markdown_table(["model", "mixing or layers", "seed", "ours", "the authors' code"], rows)
    )


def _truncations(found: list[dict[str, Any]]) -> str:
    """What the error of the exponentials in training does to gradients, in words."""
    own, another = (
        [100 * row[key] for row in found if key in row] for key in ("gradient_truncation", "gradient_of_another_batch")
    )
    return (
        f"In training the exponentials are cut at an error of {TRAINING_TOL:g}, in tests at rounding. In the trained "
        f"models that moves the gradient of a batch by {min(own):.2f} to {max(own):.2f} percent; that of another batch "
        f"differs by {min(another):.0f} to {max(another):.0f}."
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--data", type=Path, default=Path(".data"), help="the folder with cifar-10-batches-bin")
    names = [f"{model}-{mixing}" for model in MODELS for mixing in AUTHORS]
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="MODEL-MIXING")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--threads", type=int, default=None)
    arguments = parser.parse_args()
    if arguments.threads is not None:
        torch.set_num_threads(arguments.threads)
    before = json.loads(RESULTS.read_text())["rows"] if RESULTS.exists() else []
    found = []
    for name in names:
        model, mixing = name.split("-")
        if name not in arguments.only:
            found += [row for row in before if (row["model"], row["mixing"]) == (model, mixing)]
            continue
        for seed in arguments.seeds if model == "expmflow" else arguments.seeds[:1]:
            row = MODELS[model](mixing, seed, arguments.data, arguments.threads)
            found.append({"model": model, "mixing": mixing, "seed": seed, **row})
            print(f"{name}, seed {seed}: {row['bpd']:.4f}", flush=True)
    write_json(RESULTS, {"rows": found, "authors": AUTHORS, "images": IMAGES})
    write_text(RESULTS.with_suffix(".md"), text(found))


if __name__ == "__main__":
    main()
