"""Table 2 of the paper: couplings, residual blocks and convolutional Sylvester flows."""

from __future__ import annotations

from typing import Any

from expmflow.experiments.images import NATS_PER_BIT, Cell, ImageTable, Setting, at_higher_rates
from expmflow.experiments.mixing import AUGMENTED, EPOCH, LONG

LAYERS: dict[str, dict[str, Any]] = {
    "coupling": {"subflow": "coupling", "coupling_network": "conv"},
    "residual": {"subflow": "residual"},
    "residual-half": {"subflow": "residual"},
    "sylvester": {"subflow": "sylvester"},
}
NOISE = {"uniform": "uniform", "variational": "variational-dense"}
LABELS = {
    "coupling": "coupling",
    "residual": "residual block",
    "residual-half": "residual block, equal memory",
    "sylvester": "convolutional Sylvester",
}
PAPER: dict[str, dict[str, dict[str, float]]] = {
    "uniform": {
        "coupling": {"elbo": 3.38, "nll": 3.35},
        "residual": {"elbo": 3.37},
        "residual-half": {"elbo": 3.44},
        "sylvester": {"elbo": 3.32, "nll": 3.29},
    },
    "variational": {
        "coupling": {"elbo": 3.27, "nll": 3.25},
        "residual": {"elbo": 3.26},
        "residual-half": {"elbo": 3.35},
        "sylvester": {"elbo": 3.21, "nll": 3.19},
    },
}


def compared_with(layer: str, noise: str) -> tuple[str, ...]:
    """The layers before it with the same noise, and the same layer with uniform noise."""
    before = list(LAYERS)[: list(LAYERS).index(layer)]
    return *(f"{other}-{noise}" for other in before), *([f"{layer}-uniform"] if noise == "variational" else [])


CELLS = [
    Cell(
        f"{layer}-{noise}",
        {**settings, "dequantization": NOISE[noise]},
        PAPER[noise][layer],
        against=compared_with(layer, noise),
        weighed="residual" not in layer,
        matched=layer != "residual-half",
        label=f"{LABELS[layer]}, {noise}",
    )
    for noise in NOISE
    for layer, settings in LAYERS.items()
]
ABOUT = (
    "A subflow is an ActNorm and the row's layer: a coupling of three convolutions behind a 1×1, a residual block of "
    "three convolutions, or a convolutional Sylvester flow; between the two levels is a split with its own coupling. "
    "Uniform or variational dequantization. Equal memory means half of the subflows. Of residual blocks there is no "
    "importance-weighted NLL, since their log-determinants are random estimates."
)

SKELETON: dict[str, Any] = {
    "levels": 2,
    "subflows": 20,
    "hidden": 528,
    "lipschitz": 1.5,
    "growth": 64,
    "depth": 8,
    "width": 64,
    "start": "rotation",
    "base": "channels",
    "dequantization_subflows": 4,
}
LAPTOP: dict[str, Any] = {
    **SKELETON,
    "subflows": 4,
    "lipschitz": None,
    "growth": 32,
    "depth": 2,
    "width": 32,
    "start": "averages",
    "dequantization_subflows": 2,
    "dequantization_growth": 16,
    "dequantization_depth": 2,
}
HIDDEN = {"coupling": 127, "residual": 111, "residual-half": 111, "sylvester": 96}


def halved(subflows: int) -> dict[str, dict[str, Any]]:
    """Half of the subflows, for the rows of equal memory."""
    return {f"residual-half-{noise}": {"subflows": subflows // 2} for noise in NOISE}


def laptop(sizes: dict[str, dict[str, Any]]) -> Setting:
    """Minutes on a CPU, for this table and for the ablations."""
    return Setting(
        "the same structure, smaller; about half an hour a row",
        LAPTOP,
        sizes,
        {"flip": True},
        {"betas": (0.9, 0.99), "warmup": 100, "decay": 0.5, "decay_every": 850, "clip": NATS_PER_BIT},
        {
            "steps": 6000,
            "batch_size": 32,
            "log_every": 100,
            "validate_every": 500,
            "validation_rows": 1000,
            "checkpoint_every": 250,
        },
        rates=(1e-3, 3e-3, 1e-2, 3e-2),
        rate_steps=400,
        weighed_images=500,
        samples=128,
        choices=(
            "The convolutions inside Sylvester flows have no norm constraint here, which their inverse by rows does "
            "without; the paper's have 1.5. Each level begins with a 1×1 that starts at averages and differences."
        ),
    )


def full(sizes: dict[str, dict[str, Any]], authors_sizes: dict[str, dict[str, Any]]) -> dict[str, Setting]:
    """The presets of full size, for this table and for the ablations."""
    return {
        "paper": Setting(
            "the paper's architecture and schedule, for several GPUs and days",
            SKELETON,
            sizes,
            AUGMENTED,
            {"lr": 1e-3, "betas": (0.9, 0.99), "warmup": 10 * EPOCH, "decay": 0.995},
            LONG,
            choices="Where the paper is silent (warm-up, flips and shifts), as in the authors' code.",
        ),
        "authors": Setting(
            "as in the authors' code where it differs from the paper's text",
            {**SKELETON, "levels": 3, "subflows": 16, "gated": False},
            authors_sizes,
            AUGMENTED,
            {
                "lr": 1e-3,
                "betas": (0.9, 0.99),
                "eps": 1e-7 * NATS_PER_BIT,
                "warmup": 10 * EPOCH,
                "warmup_power": 2,
                "decay": 0.995,
                "clip": NATS_PER_BIT,
            },
            LONG,
            choices=(
                "As in the authors' commands: three levels of 16 subflows, DenseNets without gates, squared warm-up, "
                "gradients of bits per dimension clipped at 1. Not taken over: no split behind the first level of the "
                "coupling and of the ablations, which is a difference between rows; a log-scale of couplings below "
                "½; networks for splits and noise that are 528 wide in the baselines."
            ),
        ),
    }


SIZES = {f"{layer}-{noise}": {"hidden": hidden} for noise in NOISE for layer, hidden in HIDDEN.items()}
SETTINGS = {
    "laptop": laptop({name: {**size, **halved(4).get(name, {})} for name, size in SIZES.items()}),
    **full(halved(20), halved(16)),
}
SETTINGS["higher-rate"] = at_higher_rates(
    SETTINGS["laptop"],
    {
        "coupling-variational-0": 3e-3,
        "coupling-uniform-0": 1e-2,
        "sylvester-uniform-0": 1e-2,
        "sylvester-variational-0": 1e-2,
    },
)

RESIDUAL = ImageTable(
    "residual",
    "Table 2",
    "Couplings, residual blocks and Sylvester flows",
    ABOUT,
    CELLS,
    SETTINGS,
    weights=["sylvester-variational"],
)
