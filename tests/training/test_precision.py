"""Mixed precision is for the networks only."""

import image_run
import pytest
import torch

from expmflow import nn as N
from expmflow import transforms as T
from expmflow.distributions import AmortizedGaussian, FlowPosterior
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


@torch.no_grad()
@pytest.mark.parametrize("direction", ["forward", "inverse"])
@pytest.mark.parametrize("name", LAYERS)
def test_what_a_coarse_network_made_is_raised_to_the_weights(name: str, direction: str) -> None:
    layer, x = randomised(name), torch.randn(2, 4, 4, 4).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        found, expected = getattr(layer, direction)(x), getattr(layer, direction)(x.float())
    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[1], expected[1])
    with pytest.raises(TypeError, match=rf"^{name}: Expected an input of dtype torch\.float32, .* got torch\.bfloat16"):
        getattr(layer, direction)(x)  # without autocast nobody asked for two precisions


@torch.no_grad()
def test_a_coarse_context_is_raised_too() -> None:
    layer = T.HouseholderSylvester(4, 2, amortized=True)  # which has no weights
    z, context = torch.randn(3, 4), torch.randn(3, layer.params_per_sample).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        found, logdet = layer(z.bfloat16(), context)
    assert torch.equal(found, layer(z.bfloat16().float(), context.float())[0])
    assert logdet.dtype == torch.float32


def test_a_posterior_of_a_coarse_encoder_is_not_coarse() -> None:
    posterior = FlowPosterior(T.HouseholderSylvester(4, 2, amortized=True), AmortizedGaussian((4,)))
    params, noise = torch.randn(3, posterior.params_per_sample).bfloat16(), torch.randn(3, 4)
    with torch.autocast("cpu", torch.bfloat16):
        z, log_q = posterior.rsample_and_log_prob(params, noise)
    expected, expected_log_q = posterior.rsample_and_log_prob(params.float(), noise)
    assert torch.equal(z, expected)
    assert torch.equal(log_q, expected_log_q)


@torch.no_grad()
@pytest.mark.parametrize("name", ["Conv1x1", "Emerging", "AffineCoupling"])
def test_compiled_layers_are_as_exact(name: str) -> None:
    layer, x = randomised(name), torch.randn(2, 4, 4, 4)
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    with torch.autocast("cpu", torch.bfloat16):
        found, expected = compiled(x), layer(x)
    torch.testing.assert_close(found, expected)


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
