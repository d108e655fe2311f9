"""Likelihoods of single test images, by which rows are compared."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import numpy as np
import torch
from torch import Tensor

from expmflow._validation import expect
from expmflow.data import DataError
from expmflow.experiments.experiment import Comparison, Result


@dataclass(frozen=True)
class Values:
    """For each test image, in bits per dimension: −ELBO, and for the first ones the importance-weighted NLL, if any."""

    elbo: Tensor
    nll: Tensor | None

    def measures(self) -> dict[str, Any]:
        """Means, their standard errors, and the number of images."""
        found: dict[str, Any] = {"elbo": None, "nll": None}
        for name, values in (("elbo", self.elbo), ("nll", self.nll)):
            if values is not None:
                expect(bool(values.isfinite().all()), "a finite likelihood of every test image", "one that is not")
                mean, error = mean_and_error(values)
                found |= {name: mean, f"{name}_standard_error": error, f"{name}_images": len(values)}
        return found

    def save(self, folder: Path, name: str) -> None:
        """Write `NAME.npy` and `NAME-nll.npy` in float32, four bytes an image."""
        folder.mkdir(parents=True, exist_ok=True)
        for path, values in zip(_places(folder, name), (self.elbo, self.nll), strict=True):
            if values is not None:
                temporary = path.with_name(f".{path.name}.tmp")
                with open(temporary, "wb") as file:
                    np.save(file, values.float().numpy(), allow_pickle=False)
                os.replace(temporary, path)

    @classmethod
    def load(cls, folder: Path, name: str) -> Values:
        """What `save` wrote."""
        elbo, nll = (_read(path) if path.exists() else None for path in _places(folder, name))
        if elbo is None:
            raise DataError(f"Expected the likelihoods of the test images in {_places(folder, name)[0]}; got none.")
        return cls(elbo, nll)


def _places(folder: Path, name: str) -> tuple[Path, Path]:
    return folder / f"{name}.npy", folder / f"{name}-nll.npy"


def _read(path: Path) -> Tensor:
    try:
        return torch.from_numpy(np.load(path, allow_pickle=False)).double()
    except (OSError, ValueError, TypeError) as error:
        raise DataError(f"Expected likelihoods in {path}; got: {error}.") from None


def mean_and_error(values: Tensor) -> tuple[float, float]:
    """The mean, and its standard error."""
    error = float(values.std()) / len(values) ** 0.5 if len(values) > 1 else 0.0
    return round(float(values.mean()), 6), round(error, 6)


def paired_differences(
    values: Mapping[tuple[str, int], Values], against: Mapping[str, Sequence[str]]
) -> list[dict[str, Any]]:
    """Each row minus others of the same seed, image by image: the mean and its standard error.

    Images differ far more than rows do; on the same images, this variation cancels.

    Args:
        values: by model and seed.
        against: for each model, those to subtract, without itself.
    """
    differences = []
    pairs = [(model, minus, seed) for model, seed in values for minus in against[model]]
    for model, minus, seed in pairs:
        row, reference = values[model, seed], values.get((minus, seed))
        if model == minus or reference is None:
            continue
        difference: dict[str, Any] = {"model": model, "minus": minus, "seed": seed}
        for name, ours, theirs in (("elbo", row.elbo, reference.elbo), ("nll", row.nll, reference.nll)):
            if ours is not None and theirs is not None:
                count = min(len(ours), len(theirs))
                mean, error = mean_and_error(ours[:count] - theirs[:count])
                difference |= {name: mean, f"{name}_standard_error": error}
        differences.append(difference)
    return differences


def likelihood_comparisons(rows: Sequence[Result], labels: Mapping[str, str]) -> list[Comparison]:
    """The paper's −ELBO and NLL of each model beside ours, averaged over seeds."""
    comparisons = []
    for model in dict.fromkeys(r["model"] for r in rows):
        cell = [r for r in rows if r["model"] == model]
        paper, unit = cell[0]["paper"], cell[0].get("unit", "bits per dimension")
        for name, measure in (("elbo", "−ELBO"), ("nll", "NLL")):
            values = [r[name] for r in cell if r[name] is not None]
            if values:
                error = stdev(values) if len(values) > 1 else cell[0][f"{name}_standard_error"]
                bars = paper.get(f"{name}_error"), error
                comparisons.append(
                    Comparison(labels[model], f"{measure}, {unit}", paper.get(name), mean(values), *bars)
                )
    return comparisons
