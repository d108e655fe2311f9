"""What layers draw in a run: a function of the row in evaluation, of seed, step and sample in training."""

from __future__ import annotations

from pathlib import Path

import torch
from image_run import make_config, make_data, make_model
from torch import Tensor

from expmflow.runs.evaluation import tolerant_likelihood
from expmflow.training.loop import train
from expmflow.training.run import RunFolder


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
