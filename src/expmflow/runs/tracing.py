"""Models as programs: recorded by torch.export, with everything that depends on the weights alone precomputed."""

from __future__ import annotations

import logging
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._ops import OpOverload
from torch.export import Dim, ExportedProgram
from torch.fx.node import map_arg

from expmflow.transforms.base import Transform, layer_name

NOISY = ("torch.fx.experimental.symbolic_shapes", "torch.export", "torch._export", "torch.onnx")
Table = Mapping[Any, Callable[..., Any]]


@torch.no_grad()
def trace(
    module: nn.Module, inputs: Mapping[str, Tensor], shared: Sequence[str] = (), decompositions: Table | None = None
) -> ExportedProgram:
    """The program of a module that maps tensors to one tensor, for any number of rows.

    Args:
        module: `forward(*inputs)`, in evaluation mode, without gradients.
        inputs: an example of at least two rows; the keys name the program's arguments.
        shared: names of inputs that all rows share, with fixed shapes.
        decompositions: operators to replace, as for `ExportedProgram.run_decompositions`.

    Raises:
        ValueError: with the name of the layer, if it depends on values that are known only at run time.
    """
    batch = Dim("batch")
    shapes = tuple(None if name in shared else {0: batch} for name in inputs)
    example = tuple(inputs.values())
    with quiet():
        try:
            program = torch.export.export(module, example, dynamic_shapes=(shapes,))
            flat = program.run_decompositions(dict(decompositions or {}))
        except Exception as error:
            raise ValueError(_sentence(error, module)) from error
        try:
            return torch.export.export(folded(flat.module(), list(inputs)), example, dynamic_shapes=shapes)
        except Exception:  # writes into views, and some strides, are right only as recorded
            return torch.export.export(module, example, dynamic_shapes=(shapes,))


def folded(program: fx.GraphModule, names: Sequence[str]) -> fx.GraphModule:
    """The same program, with values that no input changes as constants: masks, norms, determinants.

    Args:
        program: the result of `ExportedProgram.module`, with one output.
        names: the names of its inputs.
    """
    remaining = iter(names)
    known: dict[fx.Node, Any] = {}
    constants: dict[str, Tensor] = {}
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}

    def argument(node: fx.Node) -> Any:
        if node in copies:
            return copies[node]
        if not isinstance(known[node], Tensor):
            return known[node]
        name = f"constant_{len(constants)}"
        constants[name] = known[node].detach().clone()
        copies[node] = graph.get_attr(name)
        return copies[node]

    for node in program.graph.nodes:
        match node.op:
            case "placeholder":
                copies[node] = graph.placeholder(next(remaining))
            case "get_attr":
                known[node] = _attribute(program, node.target)
            case "call_function" if _is_pure(node) and all(source in known for source in node.all_input_nodes):
                args, kwargs = map_arg((node.args, node.kwargs), lambda source: known[source])
                known[node] = node.target(*args, **kwargs)
            case "call_function" if node.users:
                args, kwargs = map_arg((node.args, node.kwargs), argument)
                copies[node] = graph.call_function(node.target, args, kwargs)
            case "output":
                (results,) = node.args
                graph.output(map_arg(results[0], argument))
    return fx.GraphModule(constants, graph)


def _attribute(program: fx.GraphModule, path: str) -> Any:
    value: Any = program
    for name in path.split("."):
        value = getattr(value, name)
    return value


def _is_pure(node: fx.Node) -> bool:
    return not (isinstance(node.target, OpOverload) and torch.Tag.nondeterministic_seeded in node.target.tags)


def _sentence(error: Exception, module: nn.Module) -> str:
    layer = _layer_of(error.__traceback__)
    names = {part: name for name, part in module.named_modules()}
    where = "it" if layer is None else f"{layer_name(layer)} ({names.get(layer, 'inside of a layer')})"
    reason = str(error).partition("\n")[0].rstrip(".")
    expected, _, _ = reason.removeprefix("Expected no torch.export around ").partition("; got")
    reason = f"it has {expected}" if reason.startswith("Expected no torch.export") else reason
    return f"Expected layers that a program can run without Python; got {where}: {reason}."


def _layer_of(trace: TracebackType | None) -> Transform | None:
    """The innermost layer that was running when an error was raised."""
    running = [frame.f_locals.get("self") for frame, _ in traceback.walk_tb(trace)]
    layers = [each for each in running if isinstance(each, Transform)]
    return layers[-1] if layers else None


@contextmanager
def quiet() -> Iterator[None]:
    """Silence the warnings that torch's exporters have for their own authors."""
    loggers = [logging.getLogger(name) for name in NOISY]
    before = [logger.level for logger in loggers]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            for logger in loggers:
                logger.setLevel(logging.CRITICAL)
            yield
        finally:
            for logger, level in zip(loggers, before, strict=True):
                logger.setLevel(level)
