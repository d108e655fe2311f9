"""`torch.compile`: the same numbers and gradients as without, and one compilation for all training steps."""

from __future__ import annotations

import copy

import pytest
import torch

from expmflow import transforms as T
from transform_cases import CASES
from transform_registry import draw, points

QUICK = ["actnorm", "conv1x1-lu", "coupling-mlp-context", "dense-sylvester-one-feature", "linear-exp", "squeeze"]
READS_VALUES = (  # a graph's norm, a residual, a Jacobian: more than one graph
    "graph-",
    "chain-graph",
    "inverse-conv-sylvester",
    "iaf",
    "amortized-posterior",
    "amortized-images",
    "residual-",
)
WITH_STATE = [  # what moves in training: the two constraints, alone and inside other layers
    "conv-exp",
    "conv-exp-power",
    "conv-exp-skew-circular-groups",
    "conv-sylvester-context",
    "generalized-sylvester-chain",
    "generalized-sylvester-linear-exp",
    "inverse-conv-exp",
    "inverse-conv-sylvester",
    "chain-multiscale",
    "triangular-conv-sylvester-constrained",
    "residual-mlp",
]
SOLVED = ["emerging", "periodic", "woodbury", "planar", "householder-sylvester", "maf"]  # factorised, or searched for

pytestmark = [
    # torch's compiler warns of its own use of torch
    pytest.mark.filterwarnings(r"ignore:<class 'torch\.autograd\.function\.Function'> should not be instantiated"),
    pytest.mark.filterwarnings(r"ignore:`torch\.jit\.script_method` is deprecated"),
    pytest.mark.filterwarnings(r"ignore:The \.grad attribute of a Tensor that is not a leaf"),
]


@pytest.fixture(autouse=True)
def _forget_compilations():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compare(name: str, training: bool, backend: str) -> None:
    case = CASES.ready(name)
    layer, twin = case.layer.train(training), copy.deepcopy(case.layer)
    fullgraph = not name.startswith(READS_VALUES) or name == "graph-exp-terms"
    compiled = torch.compile(twin, backend=backend, fullgraph=fullgraph)
    found = []
    for run, parameters in ((layer, layer.parameters()), (compiled, twin.parameters())):
        x = points(name, case).requires_grad_()
        z, logdet = run(x, case.context)
        total = (z * draw(f"{name} z", *z.shape)).sum() + (logdet * draw(f"{name} logdet", *logdet.shape)).sum()
        found.append((z, logdet, *torch.autograd.grad(total, [x, *parameters], materialize_grads=True)))
    torch.testing.assert_close(found[1], found[0], rtol=1e-10, atol=1e-11)
    for (key, buffer), expected in zip(twin.state_dict().items(), layer.state_dict().values(), strict=True):
        torch.testing.assert_close(buffer, expected, rtol=1e-10, atol=1e-11, msg=key)


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("name", QUICK)
def test_compiled(name, training):
    compare(name, training, "aot_eager")


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(CASES.keys() - set(QUICK)))
def test_all_compiled(name):
    compare(name, False, "aot_eager")


@pytest.mark.slow
@pytest.mark.parametrize("name", WITH_STATE)
def test_all_compiled_in_training(name):
    compare(name, True, "aot_eager")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch._prims_common.check:FutureWarning")  # inductor's own
@pytest.mark.parametrize("name", ["conv-exp", "dense-sylvester"])
def test_inductor(name):
    compare(name, False, "inductor")


@pytest.mark.parametrize("name", ["linear-exp"])
def test_compiled_inverse_in_training(name):
    check_inverse(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*WITH_STATE, *SOLVED])
def test_all_compiled_inverses_in_training(name):
    check_inverse(name)


def check_inverse(name: str) -> None:
    """It undoes the pass before it, and follows weights that have moved, as without the compiler."""
    case = CASES.ready(name)
    layer, twin, x = case.layer.train(), copy.deepcopy(case.layer).train(), points(name, case)
    forward, inverse = torch.compile(twin, backend="aot_eager"), torch.compile(twin.inverse, backend="aot_eager")
    with torch.no_grad():
        for _ in range(2):
            torch.testing.assert_close(inverse(forward(x, case.context)[0], case.context)[0], x, rtol=0, atol=1e-12)
            layer.inverse(layer(x, case.context)[0], case.context)
            for parameter in (*layer.parameters(), *twin.parameters()):
                parameter.mul_(1.1)
            torch.testing.assert_close(inverse(x, case.context), layer.inverse(x, case.context), rtol=0, atol=1e-11)


@pytest.mark.parametrize("layer", [T.LinearExp(4), T.ActNorm(4)], ids=["LinearExp", "ActNorm"])
def test_training_compiles_once(layer):
    """The weights and the constraint's buffers move; the graph does not."""
    check_training(layer, torch.randn(8, 4))


@pytest.mark.slow
@pytest.mark.parametrize("layer", [T.ConvExp(2), T.ConvSylvester(2, 4)], ids=["ConvExp", "ConvSylvester"])
def test_training_of_images_compiles_once(layer):
    check_training(layer, torch.randn(8, 2, 4, 4))


def check_training(layer, x):
    compiled, optimizer = torch.compile(layer, backend="aot_eager"), torch.optim.SGD(layer.parameters(), lr=0.1)
    counts = []
    for _ in range(4):
        z, logdet = compiled(x)
        (z.square().sum() / 2 - logdet.sum()).backward()
        optimizer.step()
        optimizer.zero_grad()
        counts.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert counts[1] == counts[-1] > 0
    assert torch.isfinite(z).all()


def test_a_compiled_actnorm_starts_once():
    layer = T.ActNorm(3).double()
    compiled = torch.compile(layer, backend="aot_eager")
    z, _ = compiled(5 + 2 * draw("start", 32, 3))
    assert layer.initialised
    torch.testing.assert_close(z.mean(0), torch.zeros(3, dtype=torch.float64), rtol=0, atol=1e-12)
    before = layer.shift.clone()
    compiled(draw("next", 32, 3))
    assert torch.equal(layer.shift, before)
