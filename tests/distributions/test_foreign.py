"""Bases from torch.distributions, and flows whose parts do not fit."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import distributions as td

import expmflow as ef
from expmflow import distributions as D
from expmflow import nn
from expmflow import transforms as T
from expmflow.data import Dataset
from expmflow.training.config import parse_config
from expmflow.training.loop import train
from transform_registry import F64, draw, randomise

MATRIX = torch.tensor([[2.0, 0.3], [0.3, 0.5]], dtype=F64)
BASES = {
    "normal": lambda: td.Independent(td.Normal(torch.zeros(2, dtype=F64), torch.ones(2, dtype=F64)), 1),
    "student": lambda: td.Independent(td.StudentT(torch.full((2,), 5.0, dtype=F64)), 1),
    "covariance": lambda: td.MultivariateNormal(torch.ones(2, dtype=F64), MATRIX),
    "gumbel": lambda: td.Independent(td.Gumbel(torch.zeros(2, dtype=F64), torch.ones(2, dtype=F64)), 1),
    "mixture": lambda: td.MixtureSameFamily(
        td.Categorical(logits=torch.tensor([0.0, 1.0], dtype=F64)),
        td.Independent(td.Normal(torch.tensor([[-2.0, 0.0], [2.0, 1.0]], dtype=F64), torch.ones(2, 2, dtype=F64)), 1),
    ),
}


def flow(base: str = "student") -> ef.Flow:
    torch.manual_seed(0)
    made = ef.Flow(T.Chain([T.LinearExp(2), T.Flip()]), BASES[base]()).double()
    randomise(made)
    return made.eval()


@pytest.mark.parametrize("name", BASES)
class TestTorchBases:
    def test_the_density_is_that_of_the_base_and_the_volume(self, name):
        made, x = flow(name), draw("foreign", 4, 2)
        z, logdet = made.transform(x)
        torch.testing.assert_close(made.log_prob(x), BASES[name]().log_prob(z) + logdet)

    def test_it_integrates_to_one(self, name):
        made = flow(name)
        line = torch.linspace(-60, 60, 1201, dtype=F64)
        with torch.no_grad():
            total = made.log_prob(torch.cartesian_prod(line, line)).exp().sum() * 0.1**2
        assert abs(float(total) - 1) < 1e-3  # what a Student's t has beyond 60

    def test_samples_are_those_of_the_base(self, name):
        made = flow(name)
        torch.manual_seed(1)
        x = made.sample(5)
        torch.manual_seed(1)
        expected = made.decode(BASES[name]().sample((5,)))
        torch.testing.assert_close(x, expected)
        x, log_prob = made.sample_and_log_prob(3)
        torch.testing.assert_close(made.log_prob(x), log_prob)
        assert made.sample(0).shape == (0, 2)

    def test_it_goes_where_the_flow_goes(self, name):
        made = flow(name)
        other = copy.deepcopy(made).float()
        assert other.sample(2).dtype == torch.float32
        torch.testing.assert_close(
            other.log_prob(torch.ones(1, 2)).double(), made.log_prob(torch.ones(1, 2, dtype=F64))
        )
        assert made.sample(2).dtype == F64
        assert type(BASES[name]()).__name__ in made.description()


def test_a_flow_with_such_a_base_is_trained(tmp_path: Path):
    torch.manual_seed(0)
    x = torch.randn(40, 2, dtype=F64)
    settings = parse_config({"train": {"steps": 2, "batch_size": 8, "validate_every": 2, "precision": "float64"}})
    made = train(settings, tmp_path / "run", model=flow(), data=Dataset(x[:24], x[24:32], x[32:], kind="vectors"))
    assert made.sample_draws == ()


def test_what_such_a_base_cannot_do():
    made = flow()
    with pytest.raises(ValueError, match=r"Expected no noise for Independent\(StudentT\).*draws its own; got some"):
        made.sample(2, noise=torch.zeros(2, 2, dtype=F64))
    with pytest.raises(ValueError, match=r"Expected a temperature of 1 for .*; got 0\.5"):
        made.sample(2, temperature=0.5)
    with pytest.raises(TypeError, match="Expected a base that takes noise; got Independent"):
        made.base.transform_noise(torch.zeros(2, 2, dtype=F64), 1.0)


class TestPartsThatDoNotFit:
    def test_a_list_is_no_chain(self):
        with pytest.raises(TypeError, match=r"Expected a layer, as T\.Chain makes of a list of them; got list\."):
            ef.Flow([T.ActNorm(2)], D.StandardNormal((2,)))
        with pytest.raises(TypeError, match=r"Expected a layer; got Linear\."):
            ef.Flow(torch.nn.Linear(2, 2), D.StandardNormal((2,)))
        with pytest.raises(TypeError, match=r"Expected layers in a chain; got list\."):
            T.Chain([[T.ActNorm(2)]])
        with pytest.raises(TypeError, match=r"Expected a list of layers; got ActNorm\."):
            T.Chain(T.ActNorm(2))

    @pytest.mark.parametrize(
        ("transform", "base", "culprit"),
        [
            (lambda: T.ActNorm(2), (3,), "ActNorm: Expected 2 channels on axis 1; got 3"),
            (lambda: T.Chain([T.Squeeze(), T.ActNorm(4)]), (8, 2, 2), "ActNorm: Expected 4 channels"),
            (lambda: T.Chain([T.ActNorm(1), T.Squeeze()]), (6, 2, 2), "Squeeze: Expected channels that 4 divides"),
            (lambda: T.Inverse(T.Chain([T.ActNorm(2)])), (4,), "ActNorm: Expected 2 channels"),
            (lambda: T.Split(T.ActNorm(3), None), (4,), "ActNorm: Expected 3 channels"),
            (lambda: T.Split(T.ActNorm(2), T.AffineCoupling(nn.MLP(3, 6), 6)), (4,), "AffineCoupling: Expected 6"),
            (lambda: T.Amortized([T.Flip(), T.Planar(3)]), (4,), "Planar: Expected"),
        ],
        ids=["layer", "chain", "squeeze", "inverse", "split", "prior", "amortized"],
    )
    def test_a_base_of_another_shape(self, transform, base, culprit):
        with pytest.raises(ValueError, match=rf"^Expected a base of the shape that the layers give; got .*{culprit}"):
            ef.Flow(transform(), D.StandardNormal(base))

    def test_a_base_has_the_shape_after_the_layers(self):
        made = ef.Flow(T.Squeeze(), D.StandardNormal((4, 2, 3)))
        assert made.event_shape == (1, 4, 6)
        assert made.sample(2).shape == (2, 1, 4, 6)
        assert made.log_prob(torch.zeros(2, 1, 4, 6)).shape == (2,)
        assert "Squeeze" in made.description()

    def test_a_base_that_is_none(self):
        with pytest.raises(TypeError, match=r"Expected a base density, ours or of torch\.distributions; got Linear\."):
            ef.Flow(T.ActNorm(2), torch.nn.Linear(2, 2))
        with pytest.raises(
            ValueError, match=r"torch\.distributions\.Independent makes of a batch; got Normal × \(2,\)"
        ):
            ef.Flow(T.ActNorm(2), td.Normal(torch.zeros(2), 1.0))
        with pytest.raises(ValueError, match=r"Expected a density of events with axes; got Normal of single numbers"):
            ef.Flow(T.ActNorm(2), td.Normal(0.0, 1.0))
        with pytest.raises(TypeError, match=r"Expected a torch\.distributions\.Distribution; got int"):
            D.TorchBase(3)

    @pytest.mark.parametrize("use", ["log_prob", "encode", "decode", "sample", "rsample", "sample_and_log_prob"])
    def test_a_context_for_a_flow_that_takes_none(self, use):
        made = ef.Flow(T.Chain([T.ActNorm(2), T.AffineCoupling(nn.MLP(1, 2), 2)]), D.StandardNormal((2,)))
        first = 3 if "sample" in use else torch.zeros(3, 2)
        with pytest.raises(ValueError, match=r"Expected no context, as no layer of the flow takes one; got Tensor\."):
            getattr(made, use)(first, torch.zeros(3, 2))

    @pytest.mark.parametrize(
        "layer",
        [lambda: T.LinearExp(2), lambda: T.DenseSylvester(2, hidden=4), lambda: T.ResidualBlock(nn.LipschitzMLP(2))],
        ids=["exponential", "sylvester", "residual"],
    )
    def test_a_constraint_on_weights_takes_no_context(self, layer):
        made = ef.Flow(T.Chain([T.ActNorm(2), layer()]), D.StandardNormal((2,)))
        with pytest.raises(ValueError, match=r"Expected no context, as no layer of the flow takes one; got Tensor\."):
            made.log_prob(torch.zeros(3, 2), torch.zeros(3, 2))

    def test_layers_from_elsewhere_may_take_one(self):
        class Shift(T.Transform):
            def _forward(self, x, context):
                return x + context, x.new_zeros(len(x))

            def _inverse(self, z, context):
                return z - context, z.new_zeros(len(z))

        made = ef.Flow(T.Chain([T.ActNorm(2), Shift()]), D.StandardNormal((2,))).eval()
        assert made.log_prob(torch.zeros(3, 2), torch.ones(3, 2)).shape == (3,)
        late = ef.Flow(T.Chain([T.Flip()]), D.StandardNormal((2,)))
        late.transform.layers.append(Shift())
        assert late.log_prob(torch.zeros(3, 2), torch.ones(3, 2)).shape == (3,)


class TestSamplesPerRow:
    def flow(self) -> ef.Flow:
        torch.manual_seed(0)
        coupling = T.AffineCoupling(nn.MLP(1, 2, hidden=(4,), context_features=3), 2)
        made = ef.Flow(T.Chain([T.LinearExp(2), coupling]), D.StandardNormal((2,))).double()
        randomise(made)
        return made.eval()

    def test_each_row_has_its_own(self):
        made, context, noise = self.flow(), draw("rows", 4, 3), draw("noise of rows", 20, 2)
        together = made.sample(4, context, per_row=5, noise=noise)
        assert together.shape == (4, 5, 2)
        for k in range(4):
            alone = made.sample(5, context[k : k + 1].expand(5, 3), noise=noise[5 * k : 5 * k + 5])
            torch.testing.assert_close(together[k], alone)
        assert made.rsample(4, context, per_row=2).requires_grad
        x, log_prob = made.sample_and_log_prob(4, context, per_row=5, noise=noise)
        torch.testing.assert_close(x, together)
        torch.testing.assert_close(log_prob[:, 2], made.log_prob(x[:, 2], context))

    def test_of_integers(self):
        prior = T.AffineCoupling(nn.DenseNet(1, 2, growth=4, depth=1, context_channels=3), 2)
        made = D.DequantizedFlow(ef.Flow(prior, D.StandardNormal((2, 2, 2))), D.UniformDequantization(), levels=4)
        assert made.sample(3, torch.zeros(3, 3), per_row=2).shape == (3, 2, 2, 2, 2)

    def test_without_a_context_they_are_samples(self):
        made = ef.Flow(T.ActNorm(2), D.StandardNormal((2,)))
        assert made.sample(3, per_row=2).shape == (3, 2, 2)

    def test_graphs(self):
        made = ef.Flow(T.GraphConvExp(2), D.NodeNormal((4, 2)))
        graphs, mask = torch.ones(3, 4, 4), torch.ones(3, 4, dtype=torch.bool)
        assert made.sample(3, (graphs, mask), per_row=2).shape == (3, 2, 4, 2)
        assert made.sample(3, (graphs[0], mask), per_row=2).shape == (3, 2, 4, 2)
        assert made.sample(3, graphs, per_row=2).shape == (3, 2, 4, 2)

    @pytest.mark.parametrize("rows", [3, 4])
    def test_a_graph_that_all_rows_share_stays_one(self, rows):
        """Also if there are as many rows as nodes."""
        made = ef.Flow(T.GraphConvExp(2), D.NodeNormal((4, 2))).double().eval()
        graph, mask = torch.ones(4, 4, dtype=F64) - torch.eye(4), torch.ones(rows, 4, dtype=torch.bool)
        x = draw("nodes", rows, 4, 2)
        for context in (graph, (graph, mask), (None, mask), graph.expand(rows, 4, 4)):
            assert made.sample(rows, context, per_row=2).shape == (rows, 2, 4, 2)
            torch.testing.assert_close(made.elbo(x, context, samples=3), made.log_prob(x, context))

    def test_wrong_numbers(self):
        with pytest.raises(ValueError, match=r"Expected a context of 3 rows; got one of shape \(4, 3\)\."):
            self.flow().sample(3, draw("rows", 4, 3), per_row=2)
        with pytest.raises(ValueError, match=r"Expected per_row of at least 1; got 0\."):
            self.flow().sample(3, draw("rows", 3, 3), per_row=0)


def test_chains_are_read_like_lists():
    layers = [T.ActNorm(2), T.Flip(), T.LinearExp(2)]
    chain = T.Chain(layers)
    assert [chain[k] for k in range(3)] == layers
    assert chain[-1] is layers[-1]
    assert isinstance(chain[:2], T.Chain)
    assert list(chain[::-1]) == layers[::-1]
    assert len(chain) == 3
    assert len(chain[1:]) == 2
    x = torch.randn(4, 2)
    z, logdet = chain.eval()(x)
    middle, first = chain[:2](x)
    rest, second = chain[2:](middle)
    torch.testing.assert_close(rest, z)
    torch.testing.assert_close(first + second, logdet)
    with pytest.raises(IndexError):
        chain[3]
