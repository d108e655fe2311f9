"""What layers draw in a run: a function of the row in evaluation, of seed, step and sample in training."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from image_run import make_config, make_data, make_model
from torch import Tensor

from expmflow.distributions import Density
from expmflow.runs.evaluation import tolerant_likelihood
from expmflow.training.distributed import Processes
from expmflow.training.job import Run
from expmflow.training.loop import train
from expmflow.training.run import RunFolder
from expmflow.training.weights import load_weights

DRAWS = 100


def test_likelihoods_do_not_depend_on_the_batch():
    """Of a model with a residual block, to rounding, and though its log-determinant is random."""
    model, rows = make_model(torch.float64).eval(), make_data().test[:5]
    assert model.random_layers == ("flow.transform.layers.4",)
    noise = torch.randn(rows.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def likelihoods(chosen: list[int]) -> Tensor:
        with torch.no_grad():
            return tolerant_likelihood(model, rows[chosen], [noise[chosen]], None)

    whole = likelihoods([0, 1, 2, 3, 4])
    for chosen in ([3], [4, 0], [2, 1, 3]):
        torch.testing.assert_close(likelihoods(chosen), whole[chosen], rtol=0, atol=1e-10)
    with torch.no_grad():
        assert not torch.equal(model(rows, noise=noise), model(rows, noise=noise))  # on its own it is random


def test_a_run_depends_on_its_seed_alone(tmp_path: Path):
    """Not on torch's own generator, from which layers would draw otherwise."""
    records = []
    for k, seed in enumerate((0, 0, 1)):
        model = make_model()
        torch.manual_seed(k)
        train(make_config(4, validate_every=2, seed=seed), tmp_path / str(k), model=model, data=make_data())
        found = RunFolder(tmp_path / str(k)).read_metrics()
        records.append([r.get("nll", r.get("validation_nll")) for r in found])
    assert records[0] == records[1]
    assert records[0] != records[2]


def test_what_is_logged_and_validated_is_a_likelihood(tmp_path: Path):
    """Not what carries the gradient of a residual block: estimates whose mean is the exact likelihood."""
    config, data = make_config(1, log_every=1, validate_every=1, precision="float64"), make_data()
    train(config, tmp_path, model=make_model(torch.float64), data=data)
    logged, validated = RunFolder(tmp_path).read_metrics()
    run = Run(config, data, RunFolder(tmp_path), Processes(), torch.device("cpu"))
    before, after = make_model(torch.float64).train(), make_model(torch.float64).eval()
    load_weights(after, run.folder.weights)
    rows, _ = run.batch(0)
    parts = [(before, rows, "noise", "layers", 0, logged["nll"] * len(rows))]
    total = validated["validation_nll"] * len(data.validation)
    first, second = data.validation.split(config.train.batch_size)
    with torch.no_grad():
        rest = float(nll(run, after, second, "validation", "validation layers", 1).sum())
    parts += [(after, first, "validation", "validation layers", 0, total - rest)]
    for model, x, noise, layers, counter, written in parts:
        with torch.no_grad():
            found = nll(run, model, x, noise, layers, counter).sum()
            others = torch.stack([nll(run, model, x, noise, f"other {k}", counter).sum() for k in range(DRAWS)])
            model.get_submodule(model.random_layers[0]).logdet = "exact"
            exact = nll(run, model, x, noise, layers, counter).sum()
        assert written == pytest.approx(float(found), rel=1e-10)
        assert others.std() > 1e-6
        assert abs(others.mean() - exact) <= 4 * others.std() / DRAWS**0.5


def nll(run: Run, model: Density, x: Tensor, noise: str, layers: str, counter: int) -> Tensor:
    """Of each row, with the random numbers of a run under these labels."""
    with run.layer_draws(model, range(len(x)), layers, counter):
        return -model(x, noise=run.noise(model, len(x), noise, counter))
