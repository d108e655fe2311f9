"""Layers made of layers, and the layers that only move or scale."""

from __future__ import annotations

import copy

import pytest
import torch

import expmflow as ef
from expmflow import nn
from expmflow import transforms as T
from expmflow.transforms.base import unread, watching
from transform_registry import draw, randomise

F64 = torch.float64


class Add(T.Transform):
    """x + n, with n for a log-determinant, to see who was called and in which order."""

    def __init__(self, n: float) -> None:
        super().__init__()
        self.n = n

    def _forward(self, x, context):
        return 2 * x + self.n, x.new_full((len(x),), self.n)

    def _inverse(self, z, context):
        return (z - self.n) / 2, z.new_full((len(z),), -self.n)


COMPOSED = {
    "chain": lambda layer: T.Chain([T.Flip(), layer]),
    "inverse": T.Inverse,
    "flipped": T.Flipped,
    "split": lambda layer: T.Split(layer, None),
    "prior": lambda layer: T.Split(T.Flip(), layer),
    "amortized": lambda layer: T.Amortized([layer, T.Flip()]),
    "deep": lambda layer: T.Inverse(T.Chain([T.Split(T.Chain([T.Flip(), layer]), None)])),
}


@pytest.mark.parametrize("name", COMPOSED)
def test_a_random_layer_makes_the_whole_random(name):
    """And what draws is the layer, not what is made of it."""
    block = T.ResidualBlock(nn.LipschitzMLP(2))
    whole = COMPOSED[name](block)
    flow = ef.Flow(T.Chain([whole]), ef.distributions.StandardNormal((4,) if name in ("split", "deep") else (2,)))
    assert not whole.exact_logdet
    assert [flow.get_submodule(path) for path in flow.random_layers] == [block]
    block.logdet = "exact"
    assert whole.exact_logdet
    assert flow.exact


@pytest.mark.parametrize("name", COMPOSED)
def test_the_whole_needs_an_iteration_where_a_part_does(name):
    assert COMPOSED[name](T.Flip()).closed_form == ("forward", "inverse")
    one = "inverse" if name in ("inverse", "deep") else "forward"
    assert COMPOSED[name](T.DenseSylvester(2, 4)).closed_form == (one,)
    both = T.Chain([T.MaskedAutoregressive(2, 4), T.InverseAutoregressive(2, 4)])
    assert both.closed_form == T.Inverse(both).closed_form == ()
    assert T.Chain([]).closed_form == ("forward", "inverse")


def test_flipped_is_the_layer_between_two_flips():
    """And its context is turned with the event, in space; numbers of a sample stay as they are."""
    x, context = torch.randn(2, 4, 3, 5), torch.randn(2, 3, 3, 5)
    layer = T.ConvSylvester(4, 8, context_channels=3).eval()
    z, logdet = T.Flipped(layer)(x, context)
    expected, as_expected = layer(x.flip(1, 2, 3), context.flip(2, 3))
    assert torch.equal(z, expected.flip(1, 2, 3))
    assert torch.equal(logdet, as_expected)
    assert torch.equal(T.Flipped(layer)(x, context[..., 0, 0])[1], layer(x.flip(1, 2, 3), context[..., 0, 0])[1])
    with pytest.raises(TypeError, match=r"^Flipped: Expected a tensor for the context, or none; got tuple\.$"):
        T.Flipped(layer)(x, (context, None))


def test_a_chain_runs_in_the_order_of_its_list():
    chain = T.Chain([Add(1.0), Add(10.0)])
    z, logdet = chain(torch.zeros(1, 1))
    assert z.item() == 2 * 1 + 10
    assert logdet.item() == 11
    x, logdet = chain.inverse(z)
    assert x.item() == 0
    assert logdet.item() == -11
    assert len(chain) == 2
    assert [layer.n for layer in chain] == [1.0, 10.0]


def test_an_inverse_swaps_the_two_names():
    layer = Add(3.0)
    twice = T.Inverse(T.Inverse(layer))
    x = torch.randn(4, 2)
    assert torch.equal(T.Inverse(layer)(x)[0], layer.inverse(x)[0])
    assert torch.equal(twice(x)[0], layer(x)[0])
    assert torch.equal(twice.inverse(x)[1], layer.inverse(x)[1])


def test_watchers_see_every_layer_innermost_first():
    outer = T.Chain([Add(1.0), T.Inverse(Add(2.0))])
    seen = []
    with watching(lambda layer, x, out, logdet: seen.append((type(layer).__name__, x.item(), out.item()))):
        outer(torch.zeros(1, 1))
    assert seen == [("Add", 0, 1), ("Add", 1, -0.5), ("Inverse", 1, -0.5), ("Chain", 0, -0.5)]
    outer(torch.zeros(1, 1))
    assert len(seen) == 4


def test_only_the_outermost_layer_reads_its_input(monkeypatch):
    reads = []
    monkeypatch.setattr("expmflow.transforms.base.expect_finite", lambda x, name: reads.append(x))
    chain = T.Chain([Add(1.0), T.Inverse(Add(2.0))])
    chain(torch.zeros(1, 1))
    assert len(reads) == 1
    with unread():
        chain(torch.zeros(1, 1))
    assert len(reads) == 1


def test_a_failed_pass_leaves_no_trace():
    """After an error inside, the next input is read again."""

    class Fails(T.Transform):
        def _forward(self, x, context):
            raise RuntimeError("inside")

        _inverse = _forward

    with pytest.raises(RuntimeError, match="inside"):
        T.Chain([Fails()])(torch.zeros(1, 1))
    with pytest.raises(ValueError, match=r"^Add: Expected the input to be finite"):
        Add(1.0)(torch.full((1, 1), torch.nan))


def test_a_split_lets_one_half_go_on_and_explains_the_other():
    torch.manual_seed(0)
    prior = T.AffineCoupling(nn.MLP(2, 4, hidden=(6,)), 4).double()
    rest = T.LinearExp(2).double()
    split = T.Split(rest, prior)
    randomise(split)
    split.eval()
    x = draw("split", 3, 4)
    z, logdet = split(x)
    explained, first = prior(x)
    deeper, second = rest(x[:, :2])
    torch.testing.assert_close(z, torch.cat([deeper, explained[:, 2:]], dim=1))
    torch.testing.assert_close(logdet, first + second)


def test_a_split_without_a_prior_leaves_the_other_half():
    x = draw("split", 3, 4)
    z, _ = T.Split(Add(1.0), None)(x)
    assert torch.equal(z[:, 2:], x[:, 2:])


class TestActNorm:
    @pytest.mark.parametrize(("shape", "dim"), [((64, 3), 1), ((16, 3, 4, 4), 1), ((16, 5, 3), -1)], ids=str)
    def test_the_first_batch_comes_out_standardised(self, shape, dim):
        layer = T.ActNorm(3, dim=dim).double()
        x = draw("batch", *shape)
        scale = torch.tensor([0.1, 1.0, 50.0], dtype=F64)
        x = x * (scale if dim == -1 else scale.reshape(-1, *(1,) * (x.ndim - 2))) + 7
        z, _ = layer(x)
        values = z.movedim(dim, -1).reshape(-1, 3)
        torch.testing.assert_close(values.mean(0), torch.zeros(3, dtype=F64), rtol=0, atol=1e-9)
        torch.testing.assert_close(values.std(0, correction=0), torch.ones(3, dtype=F64), rtol=0, atol=1e-9)

    def test_later_batches_do_not_start_it_again(self):
        layer = T.ActNorm(2).double()
        layer(draw("first", 8, 2))
        state = copy.deepcopy(layer.state_dict())
        layer(5 * draw("second", 8, 2))
        assert all(torch.equal(a, b) for a, b in zip(state.values(), layer.state_dict().values(), strict=True))

    @pytest.mark.parametrize("use", ["evaluation", "inverse"])
    def test_before_any_data_it_is_the_identity(self, use):
        layer = T.ActNorm(2).double()
        x = 3 + draw("x", 8, 2)
        z, logdet = layer.eval()(x) if use == "evaluation" else layer.inverse(x)
        assert torch.equal(z, x)
        assert torch.equal(logdet, torch.zeros(8, dtype=F64))
        assert not layer.initialised

    def test_a_constant_channel_stays_finite(self):
        layer = T.ActNorm(2)
        x = torch.stack([torch.randn(8), torch.full((8,), 3.0)], dim=1)
        z, logdet = layer(x)
        assert torch.isfinite(z).all()
        assert torch.isfinite(logdet).all()
        torch.testing.assert_close(layer.inverse(z)[0], x)

    def test_a_spread_far_below_the_mean_is_seen_and_none_is_not_made_up(self):
        x = torch.stack([1e6 + 1e-4 * draw("spread", 4096), torch.full((4096,), 1e6 / 3, dtype=F64)], dim=1)
        z, _ = (layer := T.ActNorm(2).double())(x)
        assert z[:, 0].std().item() == pytest.approx(1.0, abs=1e-3)
        assert layer.log_scale[1] == 0

    def test_an_empty_batch_does_not_start_it(self):
        layer = T.ActNorm(2)
        layer(torch.zeros(0, 2))
        assert not layer.initialised
        layer(5 + torch.randn(8, 2))
        assert layer.initialised

    def test_large_means_keep_their_digits(self):
        """Moments of a float32 batch are summed in float64."""
        x = 1e4 + torch.randn(4096, 1)
        z, _ = T.ActNorm(1)(x)
        assert z.std().item() == pytest.approx(1.0, abs=5e-3)


class TestMoves:
    def test_squeeze_makes_channels_of_blocks(self):
        x = torch.arange(16.0).reshape(1, 1, 4, 4)
        z, _ = T.Squeeze()(x)
        assert z.shape == (1, 4, 2, 2)
        assert z[0, :, 0, 0].tolist() == [0, 1, 4, 5]
        assert torch.equal(z, torch.pixel_unshuffle(x, 2))

    def test_flip_reverses_the_axes_it_was_given(self):
        x = draw("flip", 2, 3, 4)
        assert torch.equal(T.Flip()(x)[0], x.flip(1, 2))
        assert torch.equal(T.Flip([2])(x)[0], x.flip(2))
        assert torch.equal(T.Flip([])(x)[0], x)

    def test_permute_reorders_and_remembers(self):
        x = draw("permute", 2, 5)
        layer, other = T.Permute(5), T.Permute(5)
        assert torch.equal(layer(x)[0], x[:, layer.permutation])
        other.load_state_dict(layer.state_dict())
        assert torch.equal(other(x)[0], layer(x)[0])
