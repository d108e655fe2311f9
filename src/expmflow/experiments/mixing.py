"""Table 1 of the paper: the linear layer between couplings."""

from __future__ import annotations

from typing import Any

from expmflow.experiments.images import NATS_PER_BIT, Cell, ImageTable, Setting, at_higher_rates

EPOCH = 156  # steps of 256 images in an epoch of 40,000

CELLS = [
    Cell(
        "1x1",
        {"mixing": "1x1"},
        {"elbo": 3.285, "elbo_error": 0.008, "nll": 3.266, "nll_error": 0.007},
        label="1×1",
    ),
    Cell(
        "convexp",
        {"mixing": "convexp"},
        {"elbo": 3.237, "elbo_error": 0.002, "nll": 3.218, "nll_error": 0.003},
        label="convolution exponential",
    ),
    Cell(
        "emerging",
        {"mixing": "emerging"},
        {"elbo": 3.245, "elbo_error": 0.002, "nll": 3.226, "nll_error": 0.002},
        against=("1x1", "convexp"),
        label="Emerging",
    ),
    Cell(
        "woodbury",
        {"mixing": "woodbury"},
        {"elbo": 3.247, "elbo_error": 0.003, "nll": 3.228, "nll_error": 0.003},
        label="Woodbury",
    ),
]
ABOUT = (
    "Couplings with DenseNets, a split with its own coupling between the two levels, and variational dequantization "
    "with the same mixing; the rows differ in the mixing layer alone."
)

SKELETON: dict[str, Any] = {
    "subflow": "coupling",
    "levels": 2,
    "subflows": 10,
    "depth": 8,
    "width": 64,
    "actnorm": False,
    "start": "rotation",
    "base": "channels",
    "dequantization": "variational-dense",
    "dequantization_subflows": 4,
}
GROWTH = {"1x1": {"growth": 64}, **{name: {"growth": 63} for name in ("convexp", "emerging", "woodbury")}}
LONG: dict[str, Any] = {
    "steps": 1000 * EPOCH,
    "batch_size": 256,
    "log_every": EPOCH,
    "validate_every": 25 * EPOCH,
    "checkpoint_every": 5 * EPOCH,
}
AUGMENTED = {"flip": True, "shift": 1}

SETTINGS = {
    "laptop": Setting(
        "the same structure, smaller; about half an hour a row",
        {
            **SKELETON,
            "subflows": 4,
            "depth": 2,
            "width": 32,
            "start": "averages",
            "dequantization_subflows": 2,
            "dequantization_growth": 16,
            "dequantization_depth": 2,
        },
        sizes={
            "1x1": {"growth": 35},
            "convexp": {"growth": 33},
            "emerging": {"growth": 34},
            "woodbury": {"growth": 29},
        },
        data={"flip": True},
        optim={"optimizer": "adam", "warmup": 100, "decay": 0.5, "decay_every": 1000, "clip": NATS_PER_BIT},
        train={
            "steps": 7000,
            "batch_size": 32,
            "log_every": 100,
            "validate_every": 500,
            "validation_rows": 2000,
            "checkpoint_every": 250,
        },
        rates=(3e-3, 1e-2, 3e-2),
        rate_steps=400,
        seeds=(0, 1),
        weighed_images=500,
        samples=128,
    ),
    "paper": Setting(
        "the paper's architecture and schedule, for several GPUs and days",
        SKELETON,
        GROWTH,
        AUGMENTED,
        {"optimizer": "adam", "lr": 1e-3, "warmup": 10 * EPOCH, "decay": 0.995},
        LONG,
        seeds=(0, 1, 2),
        choices=(
            "As the text has it: a subflow is a mixing layer and a coupling, the optimizer Adam. Where it is silent "
            "(warm-up, flips and shifts), as in the authors' code."
        ),
    ),
    "authors": Setting(
        "as in the authors' code where it differs from the paper's text",
        {**SKELETON, "mixing_first": False, "mixing_last": True},
        GROWTH,
        AUGMENTED,
        {"optimizer": "adamax", "lr": 1e-3, "eps": 1e-7 * NATS_PER_BIT, "warmup": 10 * EPOCH, "decay": 0.995},
        LONG,
        seeds=(0, 1, 2),
        choices=(
            "As in the authors' code: couplings before their mixing layers and one mixing layer in front, Adamax. Not "
            "taken over: two biases per pixel around each exponential, its norm of 0.95 in place of the paper's 0.9, "
            "and what their Emerging layer lacks of the original's."
        ),
    ),
}
SETTINGS["higher-rate"] = at_higher_rates(
    SETTINGS["laptop"], {"woodbury-0": 1e-2, "convexp-1": 1e-2, "woodbury-1": 1e-2}
)

MIXING = ImageTable("mixing", "Table 1", "Mixing layers between couplings", ABOUT, CELLS, SETTINGS)
