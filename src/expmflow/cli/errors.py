"""Every expected error as one sentence; tracebacks only on request."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Annotated, Any

import torch
import typer
from safetensors import SafetensorError

from expmflow.cli.console import logged, say_error
from expmflow.distributions import NonFiniteError
from expmflow.numerics import ConvergenceError
from expmflow.training.checkpoint import CheckpointError
from expmflow.training.config import ConfigError
from expmflow.training.distributed import ExchangeError
from expmflow.training.locks import InUseError
from expmflow.training.validation import TrainingError

FAILED, MISUSED, INTERRUPTED = 1, 2, 130

Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]


def guarded(function: Callable[..., None]) -> Callable[..., None]:
    """The command with a `--debug` option; without it, errors are sentences instead of tracebacks."""

    @functools.wraps(function)
    def run(*args: Any, debug: bool = False, **kwargs: Any) -> None:
        try:
            with logged():
                function(*args, **kwargs)
        except KeyboardInterrupt:
            say_error("Interrupted.")
            raise typer.Exit(INTERRUPTED) from None
        except Exception as error:
            text = sentence(error)
            if debug or text is None:
                raise
            say_error(text, always=isinstance(error, ExchangeError))
            raise typer.Exit(MISUSED if isinstance(error, ConfigError) else FAILED) from None

    signature = inspect.signature(function, eval_str=True)
    option = inspect.Parameter("debug", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=Debug)
    parameters = [*signature.parameters.values(), option]
    run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    paragraphs = inspect.cleandoc(function.__doc__ or "").split("\n\n")
    run.__doc__ = "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)  # the terminal wraps lines
    run.__annotations__ = {p.name: p.annotation for p in parameters}
    return run


def sentence(error: Exception) -> str | None:
    """The message for the user; None for an unexpected error."""
    text = str(error)
    match error:
        case CheckpointError() | ExchangeError() | TrainingError() | InUseError():
            return text
        case ConvergenceError() | NonFiniteError():
            return text
        case ValueError() | TypeError() | ImportError() if "Expected " in text:
            return text
        case OSError():
            place = f" ({error.filename})" if error.filename else ""
            return f"Expected to read and write files; got: {error.strerror or text}{place}."
        case SafetensorError():
            return f"Expected to write tensors; got: {text}."
        case MemoryError() | torch.OutOfMemoryError():
            return "Expected enough memory; got too little. Try a smaller train.batch_size or model."
        case RuntimeError() if "allocate memory" in text or "overflow" in text.lower():  # for a size in bytes
            return "Expected enough memory; got too little. Try a smaller train.batch_size or model."
        case OverflowError() | RecursionError():
            return f"Expected numbers that this machine can work with; got: {text}."
    return None
