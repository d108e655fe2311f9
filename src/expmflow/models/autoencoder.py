"""The VAE of the paper's last table: DenseNet blocks, one latent representation, a posterior by name."""

from __future__ import annotations

from typing import Literal, final, get_args

import torch
from torch import Tensor, nn

from expmflow._validation import expect, expect_count, expect_one_of
from expmflow.distributions import Bernoulli, Likelihood, LogisticMixture, Normal
from expmflow.models.posteriors import POSTERIORS, FlowSettings, PosteriorName, build_posterior
from expmflow.models.vae import VAE
from expmflow.nn import DenseBlock
from expmflow.nn.initial import keep_scale
from expmflow.nn.layout import channels_last

LikelihoodName = Literal["auto", "bernoulli", "logistic-mixture"]
SCALES = 2  # each scale halves height and width
HEAD_SCALE = 0.1  # initial scale of the encoder's head: posteriors start almost alike for all images


def image_vae(
    event_shape: tuple[int, ...],
    *,
    posterior: PosteriorName = "sylvester",
    latents: int = 64,
    flows: int = 4,
    hidden: int = 320,
    context: int = 64,
    vectors: int = 8,
    reflections: int = 8,
    channels: int = 32,
    growth: int = 32,
    depth: int = 4,
    features: int = 256,
    likelihood: LikelihoodName = "auto",
    components: int = 10,
    grey_levels: int = 256,
) -> VAE:
    """A VAE on images: blocks of DenseNet layers, down to a quarter of height and width, and up again.

    Args:
        event_shape: `(C, h, w)`, with h and w divisible by 4.
        posterior: a name in `POSTERIORS`; those that begin with `conv-` have latents `(latents, h/4, w/4)`.
        latents: the number of latents, or of their channels.
        flows, hidden, context, vectors, reflections: of the posterior, as in `FlowSettings`.
        channels: channels inside the networks; twice as many from the second scale on.
        growth, depth: of the DenseNet blocks.
        features: features of an image between the encoder and its linear head; unused with `conv-` posteriors.
        likelihood: `"bernoulli"` for two grey levels, `"logistic-mixture"` for more; `"auto"` follows `grey_levels`.
        components: of the logistic mixture.
        grey_levels: the integers go from 0 to `grey_levels` − 1.

    Example:
        >>> vae = image_vae((1, 8, 8), latents=4, hidden=8, channels=4, growth=4, depth=1, features=8, grey_levels=2)
        >>> vae(torch.randint(2, (5, 1, 8, 8))).shape
        torch.Size([5])
    """
    expect(len(event_shape) == 3, "images of shape (C, h, w)", event_shape)
    colours, rows, columns = event_shape
    factor = 2**SCALES
    fits = rows % factor == 0 and columns % factor == 0
    expect(fits, f"images whose height and width {factor} divides", f"{rows} × {columns}")
    for name, value in (("latents", latents), ("channels", channels), ("features", features), ("flows", flows)):
        expect_count(value, name)
    expect_one_of(posterior, POSTERIORS, "posterior")
    density = _image_likelihood(likelihood, colours, components, grey_levels)
    small = (rows // factor, columns // factor)
    spatial = POSTERIORS[posterior].spatial
    shape = (latents, *small) if spatial else (latents,)
    q = build_posterior(posterior, shape, FlowSettings(flows, hidden, context, vectors, reflections))

    def block(inside: int, outside: int) -> nn.Module:
        return DenseBlock(inside, outside, growth=growth, depth=depth)

    wide = 2 * channels
    encoder: list[nn.Module] = [
        ChannelsLast(),
        block(colours, channels),
        nn.Conv2d(channels, wide, 2, stride=2),
        block(wide, wide),
        nn.Conv2d(wide, wide, 2, stride=2),
        block(wide, wide),
    ]
    if spatial:
        encoder += [nn.Conv2d(wide, q.params_per_sample, 3, padding=1)]
        decoder: list[nn.Module] = [nn.Conv2d(latents, wide, 3, padding=1)]
    else:
        encoder += [nn.Conv2d(wide, features, small), nn.ELU(), nn.Flatten(), nn.Linear(features, q.params_per_sample)]
        decoder = [nn.Unflatten(1, (latents, 1, 1)), nn.ConvTranspose2d(latents, wide, small)]
    decoder += [
        ChannelsLast(),
        block(wide, wide),
        nn.ConvTranspose2d(wide, wide, 2, stride=2),
        block(wide, wide),
        nn.ConvTranspose2d(wide, channels, 2, stride=2),
        block(channels, channels),
        nn.Conv2d(channels, density.param_channels(colours), 1),
    ]
    for network in (encoder, decoder):
        keep_scale(network[:-1])
    with torch.no_grad():
        encoder[-1].weight.mul_(HEAD_SCALE)  # type: ignore[operator]
        if isinstance(density, LogisticMixture):
            decoder[-1].bias.copy_(density.initial_params())  # type: ignore[operator]
    return VAE(nn.Sequential(*encoder), q, nn.Sequential(*decoder), likelihood=density)


@final
class ChannelsLast(nn.Module):
    """Images with channels last in memory, which makes convolutions of few channels a third faster on a CPU."""

    def forward(self, x: Tensor) -> Tensor:
        return channels_last(x)


def _image_likelihood(name: str, colours: int, components: int, levels: int) -> Likelihood:
    expect_one_of(name, get_args(LikelihoodName), "likelihood")
    if name == "auto":
        name = "bernoulli" if levels == 2 else "logistic-mixture"
    if name == "bernoulli":
        expect(levels == 2, "two grey levels for bernoulli", levels)
        return Bernoulli()
    return LogisticMixture(colours, components=components, levels=levels)


def vector_vae(
    features: int,
    *,
    posterior: PosteriorName = "sylvester",
    latents: int = 2,
    flows: int = 4,
    hidden: int = 64,
    context: int = 16,
    vectors: int = 8,
    reflections: int = 8,
    layers: int = 2,
) -> VAE:
    """A VAE on vectors of floats: MLPs, and normals with learned standard deviations for the data.

    Without hidden layers both networks are linear; the density is then Gaussian, and known in closed form.

    Args:
        features: d.
        posterior: a name in `POSTERIORS`, not one of those for images.
        latents: the number of latents.
        flows, hidden, context, vectors, reflections: of the posterior, as in `FlowSettings`.
        layers: hidden layers of width `hidden` of the encoder and of the decoder.

    Example:
        >>> vae = vector_vae(3, hidden=8)
        >>> vae(torch.randn(5, 3)).shape
        torch.Size([5])
    """
    expect_count(features, "features")
    expect_count(latents, "latents")
    expect_count(layers, "layers", at_least=0)
    expect_one_of(posterior, [name for name, kind in POSTERIORS.items() if not kind.spatial], "posterior")
    q = build_posterior(posterior, (latents,), FlowSettings(flows, hidden, context, vectors, reflections))
    encoder = _perceptron(features, q.params_per_sample, hidden, layers)
    decoder = _perceptron(latents, features, hidden, layers)
    return VAE(encoder, q, decoder, likelihood=Normal(features))


def _perceptron(inside: int, outside: int, hidden: int, layers: int) -> nn.Sequential:
    parts: list[nn.Module] = []
    for _ in range(layers):
        parts += [nn.Linear(inside, hidden), nn.ELU()]
        inside = hidden
    return nn.Sequential(*parts, nn.Linear(inside, outside))
