"""Image flows: probabilities of integers that other routes agree with."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from expmflow import transforms as T
from expmflow.distributions import (
    DequantizedFlow,
    Flow,
    StandardNormal,
    UniformDequantization,
    VariationalDequantization,
    bits_per_dim,
)
from expmflow.distributions.describe import count_parameters
from expmflow.models import image_flow
from expmflow.models.mixing import MIXINGS, cosines, haar
from expmflow.models.subflows import SUBFLOWS
from expmflow.nn import SpectralConstraint
from expmflow.training.build import build_model
from expmflow.training.config import load_config
from transform_registry import draw, settle

F64 = torch.float64
CLASSES = 3
KINDS = [(name, mixing) for name, kind in SUBFLOWS.items() for mixing in (MIXINGS if kind.mixed else ["1x1"])]


def made(event: tuple[int, ...] = (1, 4, 4), *, move: bool = True, **options) -> DequantizedFlow:
    """Small, in float64, in evaluation mode, with weights away from where they start unless told otherwise."""
    torch.manual_seed(0)
    small = {"levels": 1, "subflows": 1, "growth": 3, "depth": 1, "hidden": 5, "dequantization_subflows": 1}
    small |= {"dequantization_growth": 2, "dequantization_depth": 1}
    model = image_flow(event, **{**small, "grey_levels": 17, **options}).double()
    if move:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.2 * torch.randn_like(parameter))
        context = one_hot(2) if options.get("conditional") else None
        settle(model.flow.transform, draw("settling", 2, *event), context, rounds=3)
    for layer in model.modules():
        if isinstance(layer, T.ResidualBlock):  # whose estimate has tests of its own
            layer.logdet = "exact"
    return model.eval()


def images(event: tuple[int, ...], levels: int, n: int = 2) -> Tensor:
    return torch.randint(levels, (n, *event), generator=torch.Generator().manual_seed(1))


def one_hot(n: int, first: int = 0) -> Tensor:
    return torch.eye(CLASSES, dtype=F64)[(first + torch.arange(n)) % CLASSES]


def log_density(flow: Flow, y: Tensor, context: Tensor | None) -> Tensor:
    """log p of one point: where it goes, how dense it is there, and a dense determinant."""

    def encode(y: Tensor) -> Tensor:
        return flow.encode(y[None], context)[0]

    base = flow.base
    mean, log_std = getattr(base, "mean", torch.zeros(())), getattr(base, "log_std", torch.zeros(()))
    z = encode(y).detach()
    normal = (-0.5 * ((z - mean) / log_std.exp()).square() - log_std - 0.5 * math.log(2 * math.pi)).sum()
    jacobian = torch.autograd.functional.jacobian(encode, y, vectorize=False).reshape(y.numel(), y.numel())
    return (normal + torch.linalg.slogdet(jacobian)[1]).detach()


class TestLikelihood:
    @pytest.mark.parametrize("conditional", [False, True], ids=["", "conditional"])
    @pytest.mark.parametrize("dequantization", ["uniform", "variational", "variational-dense"])
    @pytest.mark.parametrize(("subflow", "mixing"), KINDS)
    def test_equals_density_and_determinant(self, subflow, mixing, dequantization, conditional):
        """log p(y) − log q(u | x) − d log L at y = (x + u) / L − ½, with q by its own determinant."""
        told = {"conditional": True, "classes": CLASSES} if conditional else {}
        model = made(subflow=subflow, mixing=mixing, dequantization=dequantization, **told)
        x, context = images((1, 4, 4), 17), one_hot(2, 1) if conditional else None
        noise = draw("noise", 2, 1, 4, 4)
        noise = noise.sigmoid() if dequantization == "uniform" else noise
        found = model(x, context, noise=noise).detach()
        for k in (1,):  # which is not the first, so that a mix-up of rows would show
            u, log_q = noise[k], torch.zeros(())
            if dequantization != "uniform":
                u, log_q = self.noise_of(model.dequantizer, x[k].double() / 17, noise[k])
            y, row = (x[k] + u) / 17 - 0.5, None if context is None else context[k : k + 1]
            expected = log_density(model.flow, y, row) - log_q - 16 * math.log(17)
            torch.testing.assert_close(found[k], expected, rtol=0, atol=1e-8)

    def noise_of(self, dequantizer: VariationalDequantization, x: Tensor, epsilon: Tensor) -> tuple[Tensor, Tensor]:
        """u of an image, and log q(u | x), by a dense determinant of u in ε."""
        run = lambda epsilon: dequantizer(x[None], epsilon[None])[0][0]  # noqa: E731
        jacobian = torch.autograd.functional.jacobian(run, epsilon).reshape(epsilon.numel(), epsilon.numel())
        normal = (-0.5 * epsilon.square() - 0.5 * math.log(2 * math.pi)).sum()
        return run(epsilon).detach(), normal - torch.linalg.slogdet(jacobian)[1]

    @pytest.mark.parametrize(
        ("event", "options"),
        [
            ((3, 4, 4), {"subflow": "coupling", "mixing": "convexp", "mixing_last": True, "base": "standard"}),
            ((1, 4, 4), {"subflow": "sylvester", "subflows": 2, "actnorm": False}),
            ((1, 4, 4), {"subflow": "coupling", "mixing_first": False, "base": "channels", "coupling_network": "conv"}),
        ],
        ids=["coupling", "sylvester", "authors"],
    )
    def test_of_two_levels_of_bytes(self, event, options):
        levels = 256
        model, x, noise = (
            made(event, levels=2, grey_levels=levels, **options),
            images(event, levels, 1),
            draw("u", 1, *event),
        )
        u = noise.sigmoid()
        expected = log_density(model.flow, ((x + u) / levels - 0.5)[0], None) - math.prod(event) * math.log(levels)
        torch.testing.assert_close(model(x, noise=u).detach()[0], expected, rtol=0, atol=1e-8)

    def test_of_bytes_is_that_of_other_integers(self):
        model, x, noise = made(), images((1, 4, 4), 17), draw("u", 2, 1, 4, 4).sigmoid()
        for dtype in (torch.uint8, torch.int32):
            torch.testing.assert_close(model(x.to(dtype), noise=noise), model(x, noise=noise), rtol=0, atol=0)

    @pytest.mark.parametrize("levels", [2, 3])
    def test_of_all_images_under_the_standard_normal(self, levels):
        """Identity flow, standard normal: P(x) = ∏ Φ((x+1)/L − ½) − Φ(x/L − ½), which many samples come near."""
        model = DequantizedFlow(Flow(T.Flip(), StandardNormal((1, 2, 2))), UniformDequantization(), levels=levels)
        model = model.double()
        values = torch.tensor(list(itertools.product(range(levels), repeat=4))).reshape(-1, 1, 2, 2)
        edge = values.double() / levels - 0.5
        exact = (torch.special.ndtr(edge + 1 / levels) - torch.special.ndtr(edge)).log().flatten(1).sum(1)
        torch.manual_seed(0)
        found = model.importance_weighted(values, samples=2000, chunk=500)
        torch.testing.assert_close(found, exact, rtol=0, atol=5e-3)
        inside = (torch.special.ndtr(torch.tensor(0.5, dtype=F64)) * 2 - 1) ** 4  # what lies in [−½, ½)⁴
        torch.testing.assert_close(exact.exp().sum(), inside)

    def test_of_a_new_model_in_bits_per_dimension(self):
        """Nothing moves yet: bits are log₂ L + ½ log₂ 2π + the mean of y² / (2 log 2)."""
        event = (3, 4, 4)
        model = made(event, move=False, actnorm=False, base="standard", subflow="coupling", levels=2, grey_levels=256)
        x, noise = images(event, 256), draw("u", 2, *event).sigmoid()
        y = (x + noise) / 256 - 0.5
        by_hand = 8 + 0.5 * math.log2(2 * math.pi) + y.square().flatten(1).mean(1) / (2 * math.log(2))
        found = bits_per_dim(model(x, noise=noise), event).detach()
        torch.testing.assert_close(found, by_hand, rtol=0, atol=1e-5)

    def test_of_a_class_follows_from_the_class(self):
        """Before training no class matters; after a few steps an image has another density under another class."""
        model = made(
            (1, 4, 4), move=False, subflow="coupling", conditional=True, classes=CLASSES, actnorm=False
        ).train()
        x = torch.stack([torch.full((1, 4, 4), 5 * k) for k in range(CLASSES)])
        own, other, noise = one_hot(3), one_hot(3, 1), torch.full((3, 1, 4, 4), 0.5, dtype=F64)
        torch.testing.assert_close(model(x, own, noise=noise), model(x, other, noise=noise))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
        for _ in range(8):
            optimizer.zero_grad()
            (-model(x, own, noise=noise).mean()).backward()
            optimizer.step()
        assert (model(x, own, noise=noise) - model(x, other, noise=noise)).abs().min() > 1e-3

    def test_does_not_change_with_companions(self):
        model, x, noise = made(), images((1, 4, 4), 17, 3), draw("u", 3, 1, 4, 4).sigmoid()
        alone = torch.cat([model(x[k : k + 1], noise=noise[k : k + 1]) for k in range(3)])
        torch.testing.assert_close(model(x, noise=noise), alone, rtol=0, atol=1e-10)


class TestDirections:
    @pytest.mark.parametrize("event", [(1, 8, 8), (3, 4, 8)])
    @pytest.mark.parametrize(("subflow", "mixing"), KINDS)
    def test_round_trip(self, subflow, mixing, event):
        flow = made(event, subflow=subflow, mixing=mixing, levels=2, mixing_last=True).flow
        y = 0.5 * draw("y", 2, *event)
        z = flow.encode(y)
        assert z.shape == y.shape
        torch.testing.assert_close(flow.decode(z), y, rtol=0, atol=1e-6)

    @pytest.mark.parametrize("conditional", [False, True], ids=["", "conditional"])
    @pytest.mark.parametrize("subflow", SUBFLOWS)
    @pytest.mark.parametrize("event", [(1, 4, 4), (3, 8, 4)])
    def test_samples_are_images(self, event, subflow, conditional):
        told = {"conditional": True, "classes": CLASSES} if conditional else {}
        model = made(event, subflow=subflow, move=False, **told)
        torch.manual_seed(0)
        drawn = model.sample(5, one_hot(5) if conditional else None)
        assert drawn.shape == (5, *event)
        assert drawn.dtype == torch.int64
        assert drawn.min() >= 0
        assert drawn.max() <= 16
        assert len(drawn.unique()) > 5


class TestShape:
    """What the model is made of."""

    def kinds(self, **options) -> list[str]:
        flow = made((1, 4, 4), move=False, **options).flow
        return [type(layer).__name__.removeprefix("Parametrized") for layer in flow.transform]

    def test_sylvester_layers_turn_the_order_in_between(self):
        """And not behind the last, where it would be undone by nothing."""
        found = self.kinds(subflow="sylvester", subflows=2, start="rotation")
        assert found == ["Squeeze", "ActNorm", "ConvSylvester", "Flip", "ActNorm", "ConvSylvester", "Inverse"]

    @pytest.mark.parametrize("subflow", ["sylvester", "residual"])
    def test_levels_without_mixing_begin_with_averages(self, subflow):
        flow = image_flow((3, 8, 8), subflow=subflow, levels=2, subflows=2, hidden=24, growth=2, depth=1).flow
        mixed = [layer for layer in flow.modules() if isinstance(layer, T.Conv1x1)]
        for layer, channels, colours in zip(mixed, (12, 24), (True, False), strict=True):
            torch.testing.assert_close(layer.matrix(), haar(channels, colours=colours))

    def test_couplings_come_behind_their_mixing(self):
        found = self.kinds(subflow="coupling", mixing="convexp", actnorm=False, mixing_last=True)
        assert found == ["Squeeze", "Conv1x1", "ConvExp", "AffineCoupling", "Conv1x1", "ConvExp", "Inverse"]

    def test_the_authors_levels_after_the_first_begin_with_a_coupling(self):
        """One mixing layer before the first coupling, and one behind each: 2 n + 1."""
        options = {"mixing_last": True, "mixing_first": False, "actnorm": False, "base": "channels"}
        model = image_flow((3, 8, 8), subflow="coupling", levels=2, subflows=3, growth=2, depth=1, **options)
        mixed = [layer.channels for layer in model.flow.modules() if isinstance(layer, T.Conv1x1)]
        assert mixed == [12] * 4 + [24] * 3
        (scale,) = (layer for layer in model.flow.modules() if isinstance(layer, T.ActNorm))
        assert (scale.channels, bool(scale.initialised)) == (24, True)

    def test_half_of_the_channels_leave_between_levels(self):
        flow = image_flow((3, 8, 8), levels=3, subflows=1, growth=2, depth=1, subflow="coupling").flow
        splits = [module for module in flow.modules() if isinstance(module, T.Split)]
        assert [split.prior.channels for split in splits] == [12, 24]
        assert [m.channels for m in flow.modules() if isinstance(m, T.ActNorm)] == [12, 24, 48]

    @pytest.mark.parametrize(("mixing", "parameters"), [("1x1", 391_692), ("convexp", 424_092)])
    def test_parameters_of_the_anchors(self, mixing, parameters):
        """An exponential adds 9 C² to each mixing layer."""
        config = load_config(f"cifar10-anchor-{mixing}")
        assert (config.model.kind, config.model.mixing, config.data.name) == ("image", mixing, "cifar10")
        model = build_model(config, (3, 32, 32))
        mixed = [layer.channels for layer in model.modules() if isinstance(layer, T.Conv1x1)]
        assert mixed == [12] * 5 + [24] * 5
        assert count_parameters(model) == sum(p.numel() for p in model.parameters()) == parameters

    def test_the_anchor_of_sylvester_layers(self):
        config = load_config("cifar10-anchor-sylvester")
        model = build_model(config, (3, 32, 32))
        layers = [layer for layer in model.modules() if isinstance(layer, T.ConvSylvester)]
        assert [layer.channels for layer in layers] == [12] * 4 + [24] * 4 + [48] * 4
        assert not any(isinstance(module, SpectralConstraint) for layer in layers for module in layer.inner.modules())


class TestRefusals:
    @pytest.mark.parametrize(
        ("event", "options", "expected"),
        [
            ((1, 6, 8), {"levels": 2}, r"images whose height and width 4 divides, for 2 levels; got 6 × 8"),
            ((1, 8, 7), {"levels": 1}, r"images whose height and width 2 divides, for 1 levels; got 8 × 7"),
            ((8, 8), {}, r"images of shape \(C, h, w\); got \(8, 8\)"),
            ((1, 8, 8), {"subflow": "glow"}, f"subflow to be one of {', '.join(SUBFLOWS)}; got 'glow'"),
            ((1, 8, 8), {"mixing": "3x3"}, f"mixing to be one of {', '.join(MIXINGS)}; got '3x3'"),
            ((1, 8, 8), {"coupling_network": "mlp"}, "coupling_network to be one of dense, conv; got 'mlp'"),
            ((1, 8, 8), {"start": "zero"}, "start to be one of averages, rotation; got 'zero'"),
            ((1, 8, 8), {"base": "uniform"}, "base to be one of standard, gaussian, channels; got 'uniform'"),
            (
                (1, 8, 8),
                {"dequantization": "none"},
                "dequantization to be one of uniform, variational, variational-dense; got 'none'",
            ),
            ((1, 8, 8), {"conditional": True}, "classes for a conditional model only; got None"),
            ((1, 8, 8), {"classes": 3}, "classes for a conditional model only; got 3"),
            ((1, 8, 8), {"conditional": True, "classes": 0}, "classes of at least 1; got 0"),
            ((1, 8, 8), {"levels": 0}, "levels of at least 1; got 0"),
            ((1, 8, 8), {"subflows": 0}, "subflows of at least 1; got 0"),
            (
                (1, 8, 8),
                {"dequantization": "variational", "dequantization_subflows": 0},
                "dequantization_subflows of at least 1; got 0",
            ),
            ((1, 8, 8), {"grey_levels": 1}, "levels of at least 2; got 1"),
        ],
    )
    def test_models_that_cannot_be(self, event, options, expected):
        with pytest.raises(ValueError, match=f"Expected {expected}"):
            image_flow(event, **{"subflows": 1, "growth": 2, "hidden": 4, **options})

    def test_integers_outside_the_levels(self):
        model, x = made(), images((1, 4, 4), 17)
        for bad in (-1, 17):
            x[0, 0, 0, 0] = bad
            with pytest.raises(ValueError, match="Expected grey levels from 0 to 16; got"):
                model(x)

    def test_what_are_no_integers(self):
        with pytest.raises(TypeError, match=r"Expected integers; got torch\.float64"):
            made()(draw("x", 2, 1, 4, 4))

    @pytest.mark.parametrize("subflow", SUBFLOWS)
    @pytest.mark.parametrize("context", [None, one_hot(3), torch.eye(4, dtype=F64)[:2], torch.tensor([0, 1]), "cat"])
    def test_contexts_that_are_no_classes(self, subflow, context):
        model = made(subflow=subflow, conditional=True, classes=CLASSES)
        with pytest.raises(ValueError, match=r"Expected a context (of 3 channels|for each of 2 rows)"):
            model(images((1, 4, 4), 17), context)
        with pytest.raises(ValueError, match=r"Expected a context (of 3 channels|for each of 2 rows)"):
            model.sample(2, context)

    @pytest.mark.parametrize("event", [(3, 4, 4), (1, 8, 8), (1, 4, 6)])
    def test_images_of_another_shape(self, event):
        """The base knows the shape, where the layers would do with it."""
        with pytest.raises(ValueError, match="Expected"):
            made()(images(event, 17))


def test_the_first_mixing_layer_tells_coarse_from_fine():
    x = draw("image", 2, 3, 8, 8)
    squeezed, _ = T.Squeeze()(x)
    for colours in (False, True):
        start = haar(12, colours=colours).double()
        torch.testing.assert_close(start @ start.T, torch.eye(12, dtype=F64), rtol=0, atol=1e-6)
        coarse = torch.einsum("oi,bihw->bohw", start, squeezed)[:, :3]
        images = cosines(3).double() if colours else torch.eye(3, dtype=F64)
        averages = 2 * torch.nn.functional.avg_pool2d(torch.einsum("oi,bihw->bohw", images, x), 2)
        torch.testing.assert_close(coarse, averages, rtol=0, atol=1e-6)
    flat = torch.einsum("oi,bihw->bohw", haar(12, colours=True).double(), T.Squeeze()(torch.ones_like(x))[0])
    assert float(flat[:, 1:].abs().max()) < 1e-6  # a grey wall has one average, and no contrasts
    model = image_flow((3, 8, 8), subflow="coupling", growth=4, subflows=2)
    first, second, *_ = (layer for layer in model.modules() if isinstance(layer, T.Conv1x1))
    torch.testing.assert_close(first.matrix(), haar(12, colours=True))
    assert float((second.matrix() - haar(12, colours=True)).norm().detach()) > 1


@pytest.mark.parametrize("mixing", MIXINGS)
def test_every_mixing_layer_begins_near_the_matrix_it_is_given(mixing):
    torch.manual_seed(0)
    start, x = haar(12, colours=True), draw("image", 2, 12, 6, 4).float()
    mixed = T.Chain(MIXINGS[mixing]((12, 6, 4), start))(x)[0].detach()
    expected = torch.einsum("oi,bihw->bohw", start, x)
    assert float((mixed - expected).norm() / expected.norm()) < 0.15
    other = T.Chain(MIXINGS[mixing]((12, 6, 4), None))(x)[0].detach()
    assert float((other - expected).norm() / expected.norm()) > 0.5
