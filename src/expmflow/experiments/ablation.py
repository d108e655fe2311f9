"""Table 3 of the paper: convolutional Sylvester flows without one of their parts."""

from __future__ import annotations

from typing import Any

from expmflow.experiments.images import Cell, ImageTable
from expmflow.experiments.residual import HIDDEN, NOISE, full, laptop

VARIATIONAL: dict[str, Any] = {"dequantization": NOISE["variational"]}
TRIANGULAR = {"subflow": "sylvester-no-ar", "lipschitz": None, **VARIATIONAL}  # the paper does not bound R and R̃
CELLS = [
    Cell(
        "sylvester-variational",
        {"subflow": "sylvester", **VARIATIONAL},
        {"elbo": 3.21, "nll": 3.19},
        shared="residual",
        label="convolutional Sylvester",
    ),
    Cell(
        "no-ar",
        TRIANGULAR,
        {"elbo": 3.44, "nll": 3.42},
        matched=False,
        label="without f_AR",
    ),
    Cell(
        "no-ar-matched",
        TRIANGULAR,
        label="without f_AR, as many parameters",
    ),
    Cell(
        "no-basis",
        {"subflow": "sylvester-no-basis", **VARIATIONAL},
        {"elbo": 3.27, "nll": 3.25},
        label="without basis",
    ),
]
ABOUT = (
    "A subflow is an ActNorm and a convolutional Sylvester flow, or the same without one of its parts; all else is as "
    "in the table of residual blocks, with variational dequantization. Without f_AR the inner function is "
    "R̃ tanh(R u + b) with two triangular convolutions, which has a fraction of the parameters; the row with as many "
    "gives it more hidden units. Without basis f_AR acts on the channels and points themselves."
)
ONE_UNIT = {"no-ar": {"hidden": 1}}  # per channel: the paper's R and R̃ are square


def sizes(hidden: dict[str, int]) -> dict[str, dict[str, Any]]:
    """The number of hidden channels that each row needs."""
    return {**ONE_UNIT, **{name: {"hidden": count} for name, count in hidden.items()}}


SETTINGS = {
    "laptop": laptop(sizes({"sylvester-variational": HIDDEN["sylvester"], "no-ar-matched": 264, "no-basis": 102})),
    **full(sizes({"no-ar-matched": 2208}), sizes({"no-ar-matched": 1872})),
}

ABLATION = ImageTable("ablation", "Table 3", "Sylvester flows without their parts", ABOUT, CELLS, SETTINGS)
