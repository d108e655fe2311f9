"""Programs: the model's numbers in a process that knows torch alone, for any number of rows; or one sentence."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import expmflow as ef
from cli_runs import run_command, train_tiny
from expmflow import distributions as D
from expmflow import transforms as T
from expmflow.runs import export as exporting
from expmflow.runs.programs import Runnable

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's exporters warn of their own use of torch

READ = """
import sys
sys.modules["expmflow"] = None  # whoever imports it fails
import torch
for path in sys.argv[1:]:
    program = torch.export.load(path).module()
    batches = torch.load(path + ".inputs", weights_only=True)
    with torch.no_grad():
        torch.save([program(*inputs) for inputs in batches], path + ".results")
"""


def linear() -> D.Density:
    return ef.Flow(T.Chain([T.ActNorm(3), T.LinearExp(3)]), D.DiagonalGaussian((3,)))


def images() -> D.Density:
    flow = ef.Flow(T.Chain([T.Squeeze(), T.ConvExp(4), T.Conv1x1(4), T.Emerging(4)]), D.StandardNormal((4, 2, 2)))
    return D.DequantizedFlow(flow, D.UniformDequantization(), levels=256)


def sylvester() -> D.Density:
    return ef.Flow(T.Chain([T.ConvSylvester(2, 4), T.Flip()]), D.StandardNormal((2, 3, 3)))


def conditional() -> D.Density:
    net = ef.nn.MLP(2, 4, hidden=(8,), context_features=3)
    return ef.Flow(T.Chain([T.AffineCoupling(net, 4), T.Flip()]), D.StandardNormal((4,)))


def table() -> D.Density:
    density = D.StandardizedFlow(linear(), integers=(1,))
    density.start_from(torch.tensor([[1e6, 3, 0.1], [1e6 + 1, 4, 0.3], [1e6 + 5, 9, 0.2]], dtype=torch.float64))
    return density


def autoencoder() -> D.Density:
    encoder = nn.Sequential(nn.Flatten(), nn.Linear(16, 4))
    decoder = nn.Sequential(nn.Linear(2, 16), nn.Unflatten(1, (1, 4, 4)))
    posterior = D.FlowPosterior(T.Planar(2), D.AmortizedGaussian((2,)))
    return ef.models.VAE(encoder, posterior, decoder)


def graph() -> D.Density:
    return ef.Flow(T.GraphConvExp(2, terms=12), D.NodeNormal((4, 2)))


def foreign() -> D.Density:
    laplace = torch.distributions.Laplace(torch.zeros(2), torch.ones(2))
    return ef.Flow(T.LinearExp(2), torch.distributions.Independent(laplace, 1))


PATH = torch.diag(torch.ones(3), 1) + torch.diag(torch.ones(3), -1)
CASES: dict[str, tuple[Callable[[], D.Density], str, Tensor | None]] = {
    "linear": (linear, "likelihood", None),
    "linear-sample": (linear, "sample", None),
    "images": (images, "likelihood", None),
    "conditional": (conditional, "likelihood", torch.eye(3)),
    "conditional-sample": (conditional, "sample", torch.eye(3)),
    "table": (table, "likelihood", None),
    "table-sample": (table, "sample", None),
    "autoencoder": (autoencoder, "likelihood", None),
    "autoencoder-sample": (autoencoder, "sample", None),
    "graph": (graph, "likelihood", PATH),
    "graph-sample": (graph, "sample", PATH),
    "foreign": (foreign, "likelihood", None),
    "sylvester": (sylvester, "likelihood", None),
    "images-sample": (images, "sample", None),
}
SLOW = {"sylvester", "images-sample"}


def made(name: str) -> tuple[D.Density, str, Tensor | None]:
    torch.manual_seed(len(name))
    make, what, context = CASES[name]
    model = make().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model, what, context


def check(folder: Path, names: set[str]) -> None:
    expected: dict[str, list[Tensor]] = {}
    for name in sorted(names):
        model, what, context = made(name)
        before = {key: value.clone() for key, value in model.state_dict().items()}
        path = folder / f"{name}.pt2"
        ef.export(model, path, what=what, context=context)
        assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
        run = Runnable(model, what, context)
        batches = [tuple(run.example(rows, seed=10 + rows).values()) for rows in (1, 4, 17)]
        torch.save(batches, f"{path}.inputs")
        with torch.no_grad():
            expected[str(path)] = [run(*inputs) for inputs in batches]
    subprocess.run([sys.executable, "-c", READ, *expected], check=True, timeout=300)
    for path, results in expected.items():
        for found, result in zip(torch.load(f"{path}.results", weights_only=True), results, strict=True):
            if result.is_floating_point():
                torch.testing.assert_close(found, result, rtol=1e-4, atol=1e-4, msg=lambda text, path=path: path + text)
            else:  # rounding may cross a boundary between two integers
                assert (found - result).abs().max() <= 1


def test_programs_in_a_process_that_knows_torch_alone(tmp_path):
    check(tmp_path, CASES.keys() - SLOW)


@pytest.mark.slow
def test_long_programs(tmp_path):
    check(tmp_path, SLOW)


def test_arguments_are_described_in_the_file(tmp_path):
    program = ef.export(images(), tmp_path / "images.pt2")
    extra: dict[str, Any] = {"expmflow.json": ""}
    torch.export.load(tmp_path / "images.pt2", extra_files=extra)
    inside = json.loads(extra["expmflow.json"])
    assert [each["name"] for each in inside["inputs"]] == [each.name for each in program.inputs] == ["x", "noise"]
    assert inside["inputs"][0] | {"dtype": "uint8", "shape": [1, 4, 4]} == inside["inputs"][0]
    assert "lower bound" in inside["result"]


def test_what_the_weights_decide_is_a_constant(tmp_path):
    """Neither constraints nor determinants of weights are left in the program: one product, and the base."""
    ef.export(linear(), tmp_path / "flow.pt2")
    calls = [str(n.target) for n in torch.export.load(tmp_path / "flow.pt2").graph.nodes if n.op == "call_function"]
    assert sum("matmul" in call or "mm" in call for call in calls) == 1
    assert not [call for call in calls if "linalg" in call or "norm" in call]


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (sylvester, {"what": "sample"}, r"ConvSylvester \(model\.transform\.layers\.0\): it has an iteration"),
        (lambda: ef.Flow(T.MaskedAutoregressive(2, 4), D.StandardNormal((2,))), {"what": "sample"}, "an iteration"),
        (lambda: ef.Flow(T.GraphConvExp(2), D.NodeNormal((4, 2))), {"context": PATH}, "give the layer `terms`"),
        (foreign, {"what": "sample"}, "got a base that draws its own"),
        (lambda: ef.Flow(T.ResidualBlock(nn.Linear(2, 2)), D.StandardNormal((2,))), {}, "got random estimates in tran"),
        (linear, {"what": "density"}, "Expected what to be one of likelihood, sample; got 'density'"),
    ],
    ids=["sylvester", "autoregressive", "graph", "foreign", "residual", "what"],
)
def test_refusals(tmp_path, make, options, message):
    with pytest.raises(ValueError, match=message):
        ef.export(make(), tmp_path / "flow.pt2", **options)
    assert list(tmp_path.iterdir()) == []


def test_other_files_and_things_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"Expected a \.pt2 or \.onnx file; got"):
        ef.export(linear(), tmp_path / "flow.pt")
    with pytest.raises(TypeError, match="Expected a density, or the folder of one; got Linear"):
        ef.export(nn.Linear(2, 2), tmp_path / "flow.pt2")  # type: ignore[arg-type]


def test_a_program_of_other_numbers_gets_no_name(tmp_path, monkeypatch):
    def other(module: nn.Module, inputs: dict[str, Tensor], *args: Any) -> Any:
        class Shifted(nn.Module):
            def forward(self, *inputs: Tensor) -> Tensor:
                return module(*inputs) + 0.01 * inputs[0].sum(1)

        return real(Shifted(), inputs, *args)

    real = exporting.trace
    (tmp_path / "flow.pt2").write_text("before")
    monkeypatch.setattr(exporting, "trace", other)
    with pytest.raises(ValueError, match=r"Expected the model's numbers up to .* in the program; got others"):
        ef.export(linear(), tmp_path / "flow.pt2")
    assert [path.name for path in tmp_path.iterdir()] == ["flow.pt2"]
    assert (tmp_path / "flow.pt2").read_text() == "before"


def test_onnx_without_its_packages_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="Expected the extra `export` for ONNX; got no onnx, onnxscript, onnxruntime"):
        ef.export(linear(), tmp_path / "flow.onnx")


@pytest.mark.parametrize("name", ["linear", "images", "conditional-sample", "autoencoder", "graph"])
def test_onnx(tmp_path, name):
    runtime = pytest.importorskip("onnxruntime", reason="the extra `export` is not installed")
    model, what, context = made(name)
    program = ef.export(model, tmp_path / "model.onnx", what=what, context=context)
    session = runtime.InferenceSession(str(tmp_path / "model.onnx"))
    assert [each.name for each in session.get_inputs()] == [each.name for each in program.inputs]
    assert "inputs" in json.loads(session.get_modelmeta().custom_metadata_map["expmflow"])
    run = Runnable(model, what, context)
    for rows in (1, 6):
        inputs = run.example(rows, seed=rows)
        (found,) = session.run(None, {key: value.numpy() for key, value in inputs.items()})
        with torch.no_grad():
            torch.testing.assert_close(torch.from_numpy(found), run(*inputs.values()), rtol=1e-4, atol=1e-4)


def test_onnx_lacks_operators(tmp_path):
    pytest.importorskip("onnxruntime", reason="the extra `export` is not installed")
    with pytest.raises(ValueError, match=r"Expected operators that ONNX has; got aten\.\S+, which it lacks"):
        ef.export(ef.Flow(T.PeriodicConv(2), D.StandardNormal((2, 3, 3))), tmp_path / "flow.onnx", what="sample")


def test_the_command(tmp_path):
    run = train_tiny(tmp_path / "run")
    outcome = run_command("export", run, "--out", tmp_path / "moons.pt2")
    assert outcome.code == 0, outcome.err
    assert outcome.out.splitlines()[0].startswith("x: float")
    assert "result: (batch,): log p(x), in nats" in outcome.out
    model = ef.load(run)
    x = model.sample(5)
    found = torch.export.load(tmp_path / "moons.pt2").module()(x)
    with torch.no_grad():
        torch.testing.assert_close(found, model(x), rtol=1e-4, atol=1e-4)
    refused = run_command("export", run, "--out", tmp_path / "moons.bin")
    assert refused.code == 1
    assert "Expected a .pt2 or .onnx file; got" in refused.err
