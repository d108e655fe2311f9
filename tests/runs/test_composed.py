"""Flows that somebody composed come back from a folder, bit for bit, and nothing but registered classes is called."""

from __future__ import annotations

import copy
import json
import pickle
from pathlib import Path

import pytest
import torch
from torch import distributions as td

import expmflow as ef
from expmflow import distributions as D
from expmflow import models, nn
from expmflow import transforms as T
from expmflow._recipes import CLASSES
from expmflow.runs.composed import FLOW
from expmflow.runs.recipes import DISTRIBUTIONS, describe, rebuild
from expmflow.training.checkpoint import CheckpointError
from expmflow.training.files import write_json
from expmflow.training.weights import CHECKSUM
from transform_cases import CASES
from transform_registry import draw, points, randomise


@pytest.mark.parametrize("name", CASES)
def test_every_layer_comes_back(name, tmp_path: Path):
    case = CASES.ready(name)
    x = points(name, case)
    torch.manual_seed(1)  # of log-determinants that are drawn
    z, logdet = case.layer(x, case.context)
    flow = ef.Flow(case.layer, D.StandardNormal(case.layer.output_shape(case.event)))
    ef.save(flow.double(), tmp_path)
    torch.manual_seed(7)
    again = ef.load(tmp_path)
    assert type(again.transform).__name__ == type(case.layer).__name__
    torch.manual_seed(1)
    found, found_logdet = again.transform(x, case.context)
    assert torch.equal(found, z)
    assert torch.equal(found_logdet, logdet)
    assert again.state_dict().keys() == flow.state_dict().keys()


def test_whatever_is_exported_is_registered():
    known = set(CLASSES.values())
    layers = {getattr(T, name) for name in T.__all__} - {T.Transform, T.keyed_draws}
    networks = {getattr(nn, name) for name in nn.__all__ if not name.endswith("Constraint")}
    assert not (layers | networks) - known
    bases = {D.StandardNormal, D.DiagonalGaussian, D.NodeNormal, D.Exchangeable, D.TorchBase, D.Flow, D.DequantizedFlow}
    assert not (bases | {models.VAE, D.FlowPosterior, D.AmortizedGaussian}) - known


def dequantized() -> D.DequantizedFlow:
    flow = ef.Flow(T.Chain([T.Squeeze(), T.ConvExp(4)]), D.DiagonalGaussian((4, 2, 2)))
    return D.DequantizedFlow(flow, D.UniformDequantization(), levels=8)


MODELS = {
    "dense": lambda: models.dense_flow(3, hidden=8),
    "table": lambda: models.table_flow(3, hidden=8),
    "graph": lambda: models.graph_flow(3, 2, subflows=1, hidden=4),
    "image": lambda: models.image_flow((1, 4, 4), levels=1, depth=1, hidden=4),
    "image-vae": lambda: models.image_vae((1, 8, 8), latents=2, hidden=4),
    "vector-vae": lambda: models.vector_vae(4, latents=2, hidden=4),
    "dequantized": dequantized,
    "standardized": lambda: D.StandardizedFlow(models.table_flow(3, hidden=8), integers=(1,)),
}


def same(a: D.Density, b: D.Density) -> bool:
    rows = torch.zeros(2, *a.event_shape, dtype=torch.int64 if a.levels else torch.float32)
    noise = [d.sample(2, rows.float()) for d in a.draws]
    first, second = (model(rows, noise=noise) if noise else model(rows) for model in (a.eval(), b.eval()))
    return torch.equal(first, second)


@pytest.mark.parametrize("name", MODELS)
def test_whole_models_come_back(name, tmp_path: Path):
    torch.manual_seed(0)
    model = MODELS[name]()
    ef.save(model, tmp_path / "model")
    again = ef.load(tmp_path / "model")
    assert not again.training
    assert same(model, again)
    assert model.description() == again.description()


CONSTANTS = {"loc": 0.5, "scale": 2.0, "df": 4.0, "rate": 1.5, "concentration": 2.0}


def base(name: str) -> td.Distribution:
    plain = td.Independent(td.Normal(torch.tensor([0.5, 1.0]), torch.tensor([1.0, 0.3])), 1)
    special = {
        "Independent": lambda: plain,
        "MultivariateNormal": lambda: td.MultivariateNormal(torch.ones(2), torch.tensor([[2.0, 0.3], [0.3, 0.5]])),
        "MixtureSameFamily": lambda: td.MixtureSameFamily(
            td.Categorical(probs=torch.tensor([0.3, 0.7])),
            td.Independent(td.Normal(torch.tensor([[-2.0, 0.0], [2.0, 1.0]]), torch.ones(2, 2)), 1),
        ),
        "Categorical": lambda: td.Independent(td.Categorical(logits=torch.tensor([[0.2, 0.1], [0.3, 0.4]])), 1),
        "Uniform": lambda: td.Independent(td.Uniform(torch.full((2,), -5.0), torch.full((2,), 5.0)), 1),
        "Beta": lambda: td.Independent(td.Beta(torch.tensor([2.0, 3.0]), torch.tensor([1.5, 1.2])), 1),
    }
    if name in special:
        return special[name]()
    cls = DISTRIBUTIONS[name]
    return td.Independent(cls(*[torch.full((2,), CONSTANTS[key]) for key in cls.arg_constraints]), 1)


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_bases_of_torch_come_back(name):
    made = D.TorchBase(base(name))
    again = rebuild(*describe(made))
    z = made.rsample(3)
    assert torch.equal(made.log_prob(z), again.log_prob(z))


def test_other_distributions_are_refused(tmp_path: Path):
    wishart = td.Wishart(torch.tensor(3.0), torch.eye(2))
    with pytest.raises(TypeError, match=r"got Wishart as model\.base\.distribution\."):
        ef.save(ef.Flow(T.Chain([]), wishart), tmp_path)
    assert not list(tmp_path.iterdir())


@ef.register_layer("Shift")
class Shift(T.Transform):
    """A layer with every kind of argument."""

    def __init__(self, amount: torch.Tensor, *nets: torch.nn.Module, names: dict[str, tuple[int, ...]], **more: object):
        super().__init__()
        self.register_buffer("amount", amount, persistent=False)
        self.nets = torch.nn.ModuleList(nets)
        self.names, self.more = names, more

    def _forward(self, x, context):
        return x + self.amount, x.new_zeros(len(x))

    def _inverse(self, z, context):
        return z - self.amount, z.new_zeros(len(z))


class TestLayersOfYourOwn:
    def flow(self) -> ef.Flow:
        shift = Shift(torch.tensor([0.1, 0.2]), nn.MLP(2, 2), torch.nn.Tanh(), names={"a": (1, 2)}, b=[True, None, 1.5])
        return ef.Flow(T.Chain([shift, T.ActNorm(2)]), D.StandardNormal((2,)))

    def test_they_come_back(self, tmp_path: Path):
        flow = self.flow().double().eval()
        ef.save(flow, tmp_path)
        again = ef.load(tmp_path)
        assert again.transform[0].names == {"a": (1, 2)}
        assert again.transform[0].more == {"b": [True, None, 1.5]}
        x = draw("own", 3, 2)
        assert torch.equal(flow.log_prob(x), again.log_prob(x))

    def test_a_name_that_is_not_registered_is_never_called(self, tmp_path: Path):
        ef.save(self.flow(), tmp_path)
        known = CLASSES.pop("Shift")
        try:
            with pytest.raises(
                CheckpointError, match=r"Expected a class that is registered; got 'Shift'\. .*register_layer"
            ):
                ef.load(tmp_path)
        finally:
            CLASSES["Shift"] = known

    def test_a_class_that_is_not_registered(self, tmp_path: Path):
        class Other(T.ActNorm.__mro__[1]):
            _forward = Shift._forward
            _inverse = Shift._inverse

        with pytest.raises(
            TypeError, match=r'@expmflow\.register_layer\("NAME"\) has registered; got Other as model\.transform\.'
        ):
            ef.save(ef.Flow(T.Chain([Other()]), D.StandardNormal((2,))), tmp_path)

    def test_names(self):
        with pytest.raises(TypeError, match=r'Expected a name, as in @register_layer\("Mine"\); got Shift'):
            ef.register_layer(Shift)
        with pytest.raises(ValueError, match=r"Expected a name of letters, digits and underscores; got 'a\.b'"):
            ef.register_layer("a.b")
        with pytest.raises(ValueError, match="Expected a name for MLP that is free; got Shift"):
            ef.register_layer("Shift")(nn.MLP)
        assert CLASSES["Shift"] is Shift

    def test_arguments_that_no_file_holds(self, tmp_path: Path):
        shift = Shift(torch.zeros(2), names={}, how=torch.tanh)
        with pytest.raises(TypeError, match=r"got builtin_function_or_method as model\.transform\.how"):
            ef.save(ef.Flow(shift, D.StandardNormal((2,))), tmp_path)


class TestWhatChangesLater:
    def test_settings_and_layers_of_now_are_saved(self, tmp_path: Path):
        chain = T.Chain(layer for layer in [T.ActNorm(2), T.DenseSylvester(2, 4)])
        flow = ef.Flow(chain, D.StandardNormal((2,)))
        chain[1].max_iterations = 77
        chain.layers.append(T.LinearExp(2))
        chain[0].shift.requires_grad_(False)
        flow.base = D.DiagonalGaussian((2,))
        ef.save(flow, tmp_path)
        again = ef.load(tmp_path)
        assert again.transform[1].max_iterations == 77
        assert len(again.transform) == 3
        assert not again.transform[0].shift.requires_grad
        assert again.transform[0].log_scale.requires_grad
        assert isinstance(again.base, D.DiagonalGaussian)

    def test_a_layer_used_twice_remains_one(self, tmp_path: Path):
        layer = T.LinearExp(2)
        ef.save(ef.Flow(T.Chain([layer, T.Flip(), layer]), D.StandardNormal((2,))), tmp_path)
        again = ef.load(tmp_path)
        assert again.transform[0] is again.transform[2]

    def test_saving_again_replaces(self, tmp_path: Path):
        for features in (2, 3):
            ef.save(ef.Flow(T.ActNorm(features), D.StandardNormal((features,))), tmp_path)
            assert ef.load(tmp_path).event_shape == (features,)
        assert sorted(path.name for path in tmp_path.iterdir()) == [FLOW, "model.safetensors"]

    def test_randomness_of_the_caller_is_left_alone(self, tmp_path: Path):
        flow = ef.Flow(T.Chain([T.Permute(5), T.LinearExp(5)]), D.StandardNormal((5,)))
        torch.manual_seed(0)
        ef.save(flow, tmp_path)
        ef.load(tmp_path)
        first = torch.rand(())
        torch.manual_seed(0)
        assert first == torch.rand(())

    def test_what_is_not_in_arguments_or_state_is_noticed(self, tmp_path: Path):
        flow = ef.Flow(T.AffineCoupling(nn.MLP(1, 2), 2), D.StandardNormal((2,)))
        torch.nn.utils.parametrizations.orthogonal(flow.transform.net.layers[-1])
        with pytest.raises(
            TypeError, match=r"Expected a flow that its layers' arguments and state describe; got one whose"
        ):
            ef.save(flow, tmp_path)
        assert not list(tmp_path.iterdir())


class TestDamage:
    def folder(self, path: Path) -> Path:
        ef.save(ef.Flow(T.Chain([T.ActNorm(2), T.LinearExp(2)]), D.StandardNormal((2,))), path)
        return path

    def edit(self, path: Path, change) -> None:
        values = json.loads((path / FLOW).read_text())
        change(values)
        from expmflow.runs.composed import _checksum

        values[CHECKSUM] = _checksum({k: v for k, v in values.items() if k not in ("weights", CHECKSUM)})
        write_json(path / FLOW, values)

    def test_altered_descriptions(self, tmp_path: Path):
        path = self.folder(tmp_path)
        text = (path / FLOW).read_text()
        (path / FLOW).write_text(text.replace('"features": 2', '"features": 3'))
        with pytest.raises(CheckpointError, match="it was altered"):
            ef.load(path)
        (path / FLOW).write_text(text[:40])
        with pytest.raises(CheckpointError, match="Expected the description of a flow"):
            ef.load(path)
        (path / FLOW).write_text("[]")
        with pytest.raises(CheckpointError, match="got list"):
            ef.load(path)

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            (lambda v: v["modules"][0].update({"class": "os.system"}), "got 'os.system'"),
            (lambda v: v["modules"][0].update({"class": "torch.nn.Module"}), "got 'torch.nn.Module'"),
            (
                lambda v: v["modules"][0]["arguments"].update({"channels": -1}),
                r"arguments that transforms\.ActNorm takes",
            ),
            (lambda v: v["modules"][0]["arguments"].update({"other": 1}), r"arguments that transforms\.ActNorm takes"),
            (lambda v: v["modules"][0]["arguments"].update({"channels": 3}), "got"),
            (
                lambda v: v["modules"][0]["arguments"].update({"channels": {"module": 5}}),
                "Expected arguments of module 0",
            ),
            (
                lambda v: v["modules"][0]["arguments"].update({"channels": {"tensor": "5"}}),
                "Expected arguments of module 0",
            ),
            (lambda v: v["modules"].pop(), "Expected a "),
            (lambda v: v.update(modules=[]), "Expected a list of modules"),
            (lambda v: v.update(modules=[3]), "Expected the class and the arguments of module 0; got 3"),
            (lambda v: v.update(modules=None), "Expected a list of modules; got NoneType"),
            (lambda v: v.update(settings={"transform": {"forward": 1}}), "Expected settings that the layers"),
            (lambda v: v.update(settings={"nowhere": {"a": 1}}), "Expected settings that the layers"),
            (lambda v: v.update(settings=3), "Expected settings that the layers"),
            (lambda v: v.update(frozen=["nothing"]), "Expected settings that the layers"),
            (lambda v: v.update(format_version=99), "a newer expmflow wrote it"),
        ],
    )
    def test_what_is_no_flow_is_refused_with_a_sentence(self, change, message, tmp_path: Path):
        path = self.folder(tmp_path)
        self.edit(path, change)
        with pytest.raises(CheckpointError, match=message):
            ef.load(path)

    def test_weights_of_another_flow(self, tmp_path: Path):
        path, other = self.folder(tmp_path / "one"), tmp_path / "other"
        ef.save(ef.Flow(T.ActNorm(2), D.StandardNormal((2,))), other)
        (path / "model.safetensors").write_bytes((other / "model.safetensors").read_bytes())
        with pytest.raises(CheckpointError, match="got those of another flow"):
            ef.load(path)
        (path / "model.safetensors").unlink()
        with pytest.raises(CheckpointError, match="Expected weights in"):
            ef.load(path)

    def test_flows_in_two_dtypes(self, tmp_path: Path):
        flow = ef.Flow(T.Chain([T.ActNorm(2), T.Conv1x1(2).double()]), D.StandardNormal((2,)))
        with pytest.raises(
            ValueError, match=r"Expected a flow in one dtype; got transform\.layers\.1\..* beside torch"
        ):
            ef.save(flow, tmp_path)

    def test_places(self, tmp_path: Path):
        flow = ef.Flow(T.ActNorm(2), D.StandardNormal((2,)))
        (tmp_path / "config.json").write_text("{}")
        with pytest.raises(ValueError, match="Expected a folder without a run; got"):
            ef.save(flow, tmp_path)
        with pytest.raises(ValueError, match="Expected a folder; got the file"):
            ef.save(flow, tmp_path / "config.json")
        with pytest.raises(TypeError, match="Expected a flow, or another density; got ActNorm"):
            ef.save(T.ActNorm(2), tmp_path / "new")


class TestCopies:
    def flow(self) -> ef.Flow:
        torch.manual_seed(0)
        flow = ef.Flow(T.Chain([T.LinearExp(2), T.ActNorm(2)]), D.StandardNormal((2,)))
        randomise(flow)
        return flow.eval()

    def test_deep_copies_work_and_can_be_saved(self, tmp_path: Path):
        flow, x = self.flow(), torch.randn(3, 2)
        twin = copy.deepcopy(flow)
        assert torch.equal(twin.log_prob(x), flow.log_prob(x))
        assert not {p.data_ptr() for p in twin.parameters()} & {p.data_ptr() for p in flow.parameters()}
        with torch.no_grad():
            twin.transform[1].shift.add_(1)
        assert not torch.equal(twin.log_prob(x), flow.log_prob(x))
        ef.save(twin, tmp_path)
        assert torch.equal(ef.load(tmp_path).log_prob(x), twin.log_prob(x))
        assert torch.equal(copy.copy(flow).log_prob(x), flow.log_prob(x))

    def test_pickle_says_what_to_use(self, tmp_path: Path):
        flow = self.flow()
        for attempt in (lambda: pickle.dumps(flow), lambda: torch.save(flow, tmp_path / "flow.pt")):
            with pytest.raises(
                TypeError, match=r"Expected ef\.save\(flow, folder\), or torch\.save of flow\.state_dict\(\)"
            ):
                attempt()

    def test_pickle_works_without_constraints(self):
        flow, x = ef.Flow(T.Chain([T.ActNorm(2), T.Flip()]), D.StandardNormal((2,))).eval(), torch.randn(3, 2)
        assert torch.equal(pickle.loads(pickle.dumps(flow)).log_prob(x), flow.log_prob(x))
