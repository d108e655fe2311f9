"""Programs of torch.export as ONNX; needs the extra `export`."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram

from expmflow._validation import expect
from expmflow.runs.tracing import quiet

PACKAGES = ("onnx", "onnxscript", "onnxruntime")
DESCRIPTION = "expmflow"  # the key of the description of the arguments


def check_onnx() -> None:
    """Raise `ValueError` unless the necessary packages are installed."""
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    expect(not missing, "the extra `export` for ONNX", f"no {', '.join(missing)}")


def _triangular(a: Tensor, b: Tensor, *, upper: bool, left: bool = True, unitriangular: bool = False) -> Tensor:
    """A solve as a product: the inverse of a constant matrix is a constant too, and ONNX has no solver."""
    kept = a.triu() if upper else a.tril()
    if unitriangular:
        kept = kept - torch.diag_embed(kept.diagonal(dim1=-2, dim2=-1)) + torch.eye(a.shape[-1]).to(a)
    inverse = torch.linalg.inv(kept)
    return inverse @ b if left else b @ inverse


PRODUCTS: dict[Any, Callable[..., Any]] = {torch.ops.aten.linalg_solve_triangular.default: _triangular}


def write_onnx(program: ExportedProgram, names: list[str], result: str, text: str, path: Path) -> None:
    """Write the program with its arguments' names; `ValueError` names an operator that ONNX lacks."""
    with quiet():
        try:
            written = torch.onnx.export(
                program, input_names=names, output_names=[result], dynamo=True, verbose=False, optimize=True
            )
        except Exception as error:
            found = [part for part in str(error).split("'") if part.startswith("aten.")]
            lacking = f"{found[0]}, which it lacks" if found else str(error).partition("\n")[0]
            raise ValueError(f"Expected operators that ONNX has; got {lacking}: export a .pt2 file.") from error
    if written is None:
        raise ValueError("Expected an ONNX program; got none.")
    written.model.metadata_props[DESCRIPTION] = text
    written.save(str(path))


def run_onnx(path: Path, inputs: dict[str, Tensor]) -> Tensor:
    """The result of ONNX Runtime for a file."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    try:
        session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        (found,) = session.run(None, {name: value.numpy() for name, value in inputs.items()})
    except Exception as error:
        reason = str(error).partition("\n")[0]
        raise ValueError(f"Expected a program that ONNX Runtime runs; got: {reason}: export a .pt2 file.") from error
    return torch.from_numpy(found)
