"""What a state dict holds: a fresh layer in a fresh process that loads it is the layer that was saved."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import expmflow as ef
from expmflow import transforms as T
from transform_cases import CASES
from transform_registry import points, seed

TESTS = Path(__file__).parents[1]

WITH_POWER = {"conv-exp-power", "conv-exp-power-reflect", "conv-exp-power-skew", "generalized-sylvester-chain"}

IN_ANOTHER_PROCESS = """
import sys
from pathlib import Path
import torch
from safetensors.torch import load_file, save_file
from transform_cases import CASES

folder, training = Path(sys.argv[1]), sys.argv[2] == "training"
torch.manual_seed(12345)
results = {}
for name in CASES:
    case = CASES[name]()
    case.layer.load_state_dict(load_file(folder / f"{name}.safetensors"))
    case.layer.train(training)
    with torch.no_grad():
        x, logdet = case.layer.inverse(load_file(folder / "outputs.safetensors")[name], case.context)
    results[f"{name} x"], results[f"{name} logdet"] = x.contiguous(), logdet.contiguous()
save_file(results, folder / "results.safetensors")
"""


@pytest.fixture(scope="module", params=["evaluation", "training"])
def loaded(request, tmp_path_factory):
    """What layers that were loaded elsewhere make of these layers' outputs, their inverse being called first."""
    folder = tmp_path_factory.mktemp("states")
    outputs = {}
    for name in CASES:
        case = CASES.ready(name)
        with torch.no_grad():
            outputs[name] = case.layer(points(name, case), case.context)[0].contiguous()
        save_file(case.layer.state_dict(), folder / f"{name}.safetensors")
    save_file(outputs, folder / "outputs.safetensors")
    subprocess.run(
        [sys.executable, "-W", "error", "-c", IN_ANOTHER_PROCESS, str(folder), request.param],
        check=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), *filter(None, sys.path)])},
    )
    return load_file(folder / "results.safetensors")


@pytest.mark.parametrize("name", CASES)
def test_a_loaded_layer_inverts_at_once(name, loaded):
    case = CASES.ready(name)
    x = points(name, case)
    with torch.no_grad():
        _, logdet = case.layer(x, case.context)
    torch.testing.assert_close(loaded[f"{name} x"], x, rtol=0, atol=1e-12)
    torch.testing.assert_close(loaded[f"{name} logdet"], -logdet, rtol=0, atol=1e-12)


def test_a_loaded_actnorm_does_not_start_again():
    first = T.ActNorm(3)
    first(5 + 2 * torch.randn(16, 3))
    second = T.ActNorm(3)
    second.load_state_dict(first.state_dict())
    second.train()
    second(torch.randn(16, 3) - 7)
    assert torch.equal(first.shift, second.shift)
    assert torch.equal(first.log_scale, second.log_scale)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("layer", [T.ActNorm, T.Whiten])
def test_a_batch_that_is_not_finite_is_no_start(layer, bad):
    """The next batch is one, as if the bad one had not been there."""
    x = torch.randn(32, 2) * 3 + 1
    spoilt, other = (ef.Flow(layer(2), ef.distributions.StandardNormal((2,))) for _ in range(2))
    with pytest.raises(ef.distributions.NonFiniteError, match="in the input"):
        spoilt.log_prob(torch.tensor([[bad, 1.0], [0.0, 2.0], [1.0, 5.0]]))
    assert not spoilt.transform.initialised
    torch.testing.assert_close(spoilt.log_prob(x), other.log_prob(x), rtol=0, atol=0)


def test_an_actnorm_that_was_in_use_can_be_loaded_as_new():
    """Loading the state of a layer that has seen no data lets the next batch start it."""
    used, new = T.ActNorm(2), T.ActNorm(2)
    used(3 + torch.randn(8, 2))
    used.load_state_dict(new.state_dict())
    x = torch.randn(64, 2) * 5
    z, _ = used(x)
    torch.testing.assert_close(z.mean(0), torch.zeros(2), rtol=0, atol=1e-5)
    torch.testing.assert_close(z.std(0, correction=0), torch.ones(2))


@pytest.mark.parametrize("name", CASES)
def test_passes_in_inference_mode_are_as_others_and_can_be_followed_by_gradients(name):
    case = CASES.ready(name)
    used, fresh, x = case.layer, copy.deepcopy(case.layer), points(name, case)
    found = []
    for layer, mode in ((used, torch.inference_mode()), (fresh, torch.no_grad())):
        torch.manual_seed(seed(name))
        with mode:
            layer.train()(x, case.context)
            layer.eval()(x, case.context)
        leaf = x.clone().requires_grad_()
        z, logdet = layer(leaf, case.context)
        (z.square().sum() + logdet.sum()).backward()
        found.append((z, logdet, leaf.grad))
    torch.testing.assert_close(*found, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", sorted(CASES.keys() - WITH_POWER))
def test_state_does_not_depend_on_the_size_of_the_image(name):
    """Shapes are those of a fresh layer, whatever it has been trained on."""
    fresh, trained = CASES[name]().layer.state_dict(), CASES.ready(name).layer.state_dict()
    assert {key: value.shape for key, value in fresh.items()} == {key: value.shape for key, value in trained.items()}
