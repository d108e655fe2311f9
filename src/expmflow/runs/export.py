"""A trained model as one file that runs without this package: a program of torch.export, or ONNX."""

from __future__ import annotations

import copy
import json
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import get_args

import torch
from torch import Tensor

from expmflow._validation import expect, expect_one_of, expect_type
from expmflow.distributions import Density
from expmflow.runs.composed import is_composed
from expmflow.runs.onnx import PRODUCTS, check_onnx, run_onnx, write_onnx
from expmflow.runs.pretrained import load
from expmflow.runs.programs import Program, Runnable, What, check_exportable
from expmflow.runs.shipped import find_run
from expmflow.runs.tracing import quiet, trace
from expmflow.training.build import DTYPES, class_context
from expmflow.training.files import write_whole
from expmflow.training.run import RunFolder

FORMATS = (".pt2", ".onnx")
ROWS = 3  # in the example: sizes 0 and 1 would be special
CHECKED = (1, 2, 5)  # numbers of rows for which a program is compared with the model
DESCRIPTION = "expmflow.json"  # inside the archive


def export(
    model: Density | str | Path, path: str | Path, *, what: What = "likelihood", context: Tensor | None = None
) -> Program:
    """Write a program that needs torch alone (`.pt2`), or an ONNX runtime (`.onnx`), for any number of rows.

    The likelihood program maps `x`, rows as the model takes them, to `(batch,)` in nats: log p(x), or, for a model with
    a bound, the bound for the random numbers in `noise`. The sampling program maps `noise` to rows. If the model has a
    context, it comes before the noise.

    Everything that depends only on the weights is computed once, and is a constant of the program. The program has no
    gradients, and returns NaN or infinity where the model would raise an error. The file is compared with the model,
    for several numbers of rows, before it gets its name. A description of its arguments is stored inside: in
    `extra_files` of `torch.export.load`, or in the metadata of ONNX.

    Args:
        model: a density, or the folder of one, or the name of one that ships with the package.
        path: a `.pt2` or `.onnx` file.
        what: `"likelihood"` or `"sample"`.
        context: an example of the context, with at least one row, or a graph `(N, N)` that all rows share. Not needed
            for a run with classes, which takes one-hot vectors.

    Raises:
        ValueError: if a layer depends on values that are known only at run time, like the iterative inverses of
            Sylvester layers; or if ONNX lacks an operator.

    Example:
        >>> import tempfile
        >>> flow = ef.Flow(T.Chain([T.ActNorm(2), T.LinearExp(2)]), ef.distributions.StandardNormal((2,))).eval()
        >>> x = torch.randn(4, 2)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     program = ef.export(flow, f"{folder}/flow.pt2")
        ...     again = torch.export.load(f"{folder}/flow.pt2").module()
        >>> [each.name for each in program.inputs], torch.allclose(again(x), flow.log_prob(x), atol=1e-4)
        (['x'], True)
    """
    path = Path(path)
    expect_one_of(what, get_args(What), "what")
    expect(path.suffix in FORMATS, f"a {' or '.join(FORMATS)} file", path)
    if path.suffix == ".onnx":
        check_onnx()
    expect_type(isinstance(model, Density | str | Path), "a density, or the folder of one", type(model).__name__)
    if not isinstance(model, Density):
        context = _class_of(model) if context is None else context
        model = load(model)
    check_exportable(model, what)
    run = Runnable(copy.deepcopy(model).cpu().eval().requires_grad_(False), what, context)
    with torch.no_grad():
        program = run.program()
        shared = [each.name for each in program.inputs if each.shared]
        traced = trace(run, run.example(ROWS), shared, PRODUCTS if path.suffix == ".onnx" else None)
    text = json.dumps({"expmflow": version("expmflow"), **asdict(program)}, indent=2)

    def write(temporary: Path) -> None:
        if path.suffix == ".onnx":
            write_onnx(traced, [each.name for each in program.inputs], what, text, temporary)
        else:
            with quiet():
                torch.export.save(traced, temporary, extra_files={DESCRIPTION: text})
        _compare(temporary, run)

    write_whole(path, write)
    return program


def _class_of(source: str | Path) -> Tensor | None:
    """An example of the context that a run's model takes, if it has classes."""
    folder = RunFolder(find_run(source))
    if is_composed(folder.path):
        return None
    config, _ = folder.read_config()
    classes = getattr(config.model, "classes", None)
    return class_context(torch.zeros(1, dtype=torch.int64), classes, DTYPES[config.train.precision])


@torch.no_grad()
def _compare(path: Path, run: Runnable) -> None:
    """Raise unless the file gives the model's own results, for any number of rows."""
    loaded = None if path.suffix == ".onnx" else torch.export.load(path).module()
    for rows in CHECKED:
        inputs = run.example(rows, seed=rows)
        results = run_onnx(path, inputs) if loaded is None else loaded(*inputs.values())
        expected = run(*inputs.values())
        expect(results.shape == expected.shape, f"results of shape {tuple(expected.shape)}", tuple(results.shape))
        rounding = torch.finfo(next(iter(run.parameters()), expected).dtype).eps ** 0.5
        floored = (expected == expected.round()).double() * (run.what == "sample")  # entries that may differ by one
        scale = expected.abs().amax().clamp_min(1)
        worst = float(((results - expected).abs().double() - floored).amax() / scale)
        expect(worst <= rounding, f"the model's numbers up to {rounding:.1g} in the program", f"others: {worst:.1g}")
