"""Mixed precision is for the networks only."""

import image_run
import pytest
import torch

from expmflow import nn as N
from expmflow import transforms as T
from expmflow.training.run import RunFolder

LAYERS = {
    "ConvExp": lambda: T.ConvExp(4),
    "Conv1x1": lambda: T.Conv1x1(4),
    "Householder": lambda: T.Householder(4),
    "Emerging": lambda: T.Emerging(4),
    "Woodbury": lambda: T.Woodbury(4, 4, 4, 1, 2),
    "PeriodicConv": lambda: T.PeriodicConv(4),
    "ConvSylvester": lambda: T.ConvSylvester(4, 8),
    "AffineCoupling": lambda: T.AffineCoupling(N.DenseNet(2, 4, growth=8), 4),
}


def randomised(name: str) -> T.Transform:
    torch.manual_seed(0)
    layer = LAYERS[name]()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(0.3 * torch.randn_like(parameter))
    return layer.eval()


@pytest.mark.parametrize("name", LAYERS)
def test_layers_return_the_dtype_of_their_parameters(name: str) -> None:
    layer = randomised(name)
    with torch.autocast("cpu", torch.bfloat16):
        z, logdet = layer(torch.randn(2, 4, 4, 4))
    assert z.dtype == logdet.dtype == torch.float32


@pytest.mark.parametrize("name", ["ConvExp", "Conv1x1", "Householder", "Emerging", "Woodbury", "PeriodicConv"])
def test_linear_layers_are_untouched(name: str) -> None:
    layer, x = randomised(name), torch.randn(2, 4, 4, 4)
    with torch.autocast("cpu", torch.bfloat16):
        z, logdet = layer(x)
    exact, exact_logdet = layer(x)
    assert torch.equal(z, exact)
    assert torch.equal(logdet, exact_logdet)


@pytest.mark.parametrize("name", ["ConvSylvester", "AffineCoupling"])
def test_networks_are_coarse(name: str) -> None:
    layer, x = randomised(name), torch.randn(2, 4, 4, 4)
    with torch.no_grad():
        exact, _ = layer(x)
        with torch.autocast("cpu", torch.bfloat16):
            z, _ = layer(x)
    assert 1e-6 < float((z - exact).abs().max()) < 0.1


@torch.no_grad()
def test_a_coupling_with_a_coarse_network_is_still_inverted() -> None:
    """The network sees the same input in both directions, so its rounding cancels."""
    layer, x = randomised("AffineCoupling"), torch.randn(2, 4, 4, 4)
    with torch.autocast("cpu", torch.bfloat16):
        back, _ = layer.inverse(layer(x)[0])
    torch.testing.assert_close(back, x)


def test_training_in_mixed_precision_is_close_to_training_without(tmp_path) -> None:
    losses = {}
    for precision in ("float32", "bfloat16"):
        folder = tmp_path / precision
        image_run.run(folder, image_run.make_config(steps=3, precision=precision, log_every=1))
        losses[precision] = torch.tensor([m["nll"] for m in RunFolder(folder).read_metrics() if "nll" in m])
    assert not torch.equal(losses["float32"], losses["bfloat16"])
    torch.testing.assert_close(losses["bfloat16"], losses["float32"], rtol=0.02, atol=0.0)
