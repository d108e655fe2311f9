"""Modules as descriptions: class names and arguments, as JSON values, with tensors beside them."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributions import Distribution
from torch.nn.utils import parametrize

import expmflow.distributions
import expmflow.models
import expmflow.nn
import expmflow.transforms  # noqa: F401  (what they export is registered by then)
from expmflow._recipes import CLASSES, recipe_of
from expmflow.training.checkpoint import CheckpointError

TORCH_MODULES = """
    BatchNorm1d BatchNorm2d Conv1d Conv2d Conv3d ConvTranspose1d ConvTranspose2d ConvTranspose3d Dropout ELU
    Flatten GELU GroupNorm Identity LayerNorm LeakyReLU Linear Mish ModuleList ReLU SELU Sequential Sigmoid SiLU
    Softplus Tanh Unflatten
"""
TORCH_DISTRIBUTIONS = """
    Beta Categorical Cauchy Exponential Gamma Gumbel Independent Laplace LogNormal MixtureSameFamily
    MultivariateNormal Normal StudentT Uniform
"""
MODULES: dict[str, type[nn.Module]] = {f"torch.nn.{name}": getattr(nn, name) for name in TORCH_MODULES.split()}
DISTRIBUTIONS = {name: getattr(torch.distributions, name) for name in TORCH_DISTRIBUTIONS.split()}
MOST_MODULES = 100_000
Description = list[dict[str, Any]]


def describe(module: nn.Module) -> tuple[Description, dict[str, Tensor]]:
    """A list of modules, each built from those before it, the last being `module`; and the tensors among arguments.

    Raises:
        TypeError: if a module inside is of a class that is not registered.
    """
    description: Description = []
    tensors: dict[str, Tensor] = {}
    places: dict[int, int] = {}

    def place(part: nn.Module, name: str) -> int:
        if id(part) not in places:  # a layer that is used twice remains one layer
            kind, positional, arguments = _parts(part, name)
            entry: dict[str, Any] = {"class": kind}
            if positional:
                entry["positional"] = [encode(value, f"{name}[{k}]") for k, value in enumerate(positional)]
            entry["arguments"] = {key: encode(value, f"{name}.{key}") for key, value in arguments.items()}
            description.append(entry)
            places[id(part)] = len(description) - 1
        return places[id(part)]

    def encode(value: Any, name: str) -> Any:
        if value is None or isinstance(value, bool | int | float | str):
            return value if type(value) in (bool, int, float, str, type(None)) else _plain_number(value)
        if isinstance(value, nn.Module):
            return {"module": place(value, name)}
        if isinstance(value, Tensor):
            tensors[f"{len(tensors)}"] = value
            return {"tensor": f"{len(tensors) - 1}"}
        if isinstance(value, list | range):
            return [encode(part, f"{name}[{k}]") for k, part in enumerate(value)]
        if isinstance(value, tuple):
            return {"tuple": [encode(part, f"{name}[{k}]") for k, part in enumerate(value)]}
        if isinstance(value, dict) and all(isinstance(key, str) for key in value):
            return {"dict": {key: encode(part, f"{name}[{key!r}]") for key, part in value.items()}}
        if isinstance(value, torch.dtype):
            return {"dtype": str(value).removeprefix("torch.")}
        if isinstance(value, Distribution) and DISTRIBUTIONS.get(type(value).__name__) is type(value):
            parts = _distribution_arguments(value)
            return {"distribution": type(value).__name__, "arguments": {k: encode(v, name) for k, v in parts.items()}}
        raise TypeError(
            f"Expected numbers, words, tensors, modules, and lists of them as arguments of a model that is saved; got "
            f"{type(value).__name__} as {name}."
        )

    place(module, "model")
    return description, tensors


def rebuild(description: Any, tensors: Mapping[str, Tensor]) -> nn.Module:
    """Rebuild a described module, with its own state; only registered classes are ever called.

    Raises:
        CheckpointError: if this is not a description, or names classes that are not registered here.
    """
    if not isinstance(description, list) or not 0 < len(description) <= MOST_MODULES:
        raise CheckpointError(f"Expected a list of modules; got {type(description).__name__}.")
    made: list[nn.Module] = []

    def decode(value: Any) -> Any:
        if isinstance(value, list):
            return [decode(part) for part in value]
        if not isinstance(value, dict):
            return value
        match value:
            case {"module": int(k)} if 0 <= k < len(made):
                return made[k]
            case {"tensor": str(name)} if name in tensors:
                return tensors[name]
            case {"tuple": list(parts)}:
                return tuple(decode(parts))
            case {"dict": dict(parts)}:
                return {key: decode(part) for key, part in parts.items()}
            case {"dtype": str(name)} if isinstance(getattr(torch, name, None), torch.dtype):
                return getattr(torch, name)
            case {"distribution": str(name), "arguments": dict(parts)} if name in DISTRIBUTIONS:
                return DISTRIBUTIONS[name](**{key: decode(part) for key, part in parts.items()})
        raise CheckpointError(f"Expected arguments of module {len(made)}; got {value!r:.200}.")

    for entry in description:
        match entry:
            case {"class": str(name), "arguments": dict(arguments)}:
                cls = CLASSES.get(name) or MODULES.get(name)
            case _:
                raise CheckpointError(
                    f"Expected the class and the arguments of module {len(made)}; got {entry!r:.200}."
                )
        if cls is None:
            raise CheckpointError(
                f"Expected a class that is registered; got {name!r}. Classes of your own are registered by "
                f'@expmflow.register_layer("{name}") before they are loaded.'
            )
        try:
            positional = decode(list(entry.get("positional", [])))
            made.append(cls(*positional, **{key: decode(value) for key, value in arguments.items()}))
        except (
            TypeError,
            ValueError,
            RuntimeError,
            ArithmeticError,
            LookupError,
            MemoryError,
            AttributeError,
        ) as error:
            if isinstance(error, CheckpointError):
                raise
            raise CheckpointError(
                f"Expected arguments that {name} takes; got: {' '.join(str(error).split())}"
            ) from None
    return made[-1]


def _parts(module: nn.Module, name: str) -> tuple[str, tuple[Any, ...], dict[str, Any]]:
    """The registered name of a module's class, and its constructor arguments."""
    recipe = recipe_of(module)
    if recipe is not None:
        return recipe.name, recipe.positional, recipe.arguments
    cls = type(module)
    if parametrize.is_parametrized(module):  # the owner's constructor does so again, or the state will not fit
        cls = cls.__mro__[1]
    kind = f"torch.nn.{cls.__name__}"
    if MODULES.get(kind) is not cls:
        raise TypeError(
            f"Expected layers and networks of expmflow, common ones of torch.nn, or classes that "
            f'@expmflow.register_layer("NAME") has registered; got {cls.__name__} as {name}.'
        )
    if isinstance(module, nn.Sequential):
        return kind, tuple(module), {}
    if isinstance(module, nn.ModuleList):
        return kind, (list(module),), {}
    names = [key for key in inspect.signature(cls).parameters if key not in ("device", "dtype")]
    values = {key: getattr(module, key) for key in names if hasattr(module, key)}
    return kind, (), {k: v is not None if k == "bias" and not isinstance(v, bool) else v for k, v in values.items()}


def _distribution_arguments(value: Distribution) -> dict[str, Any]:
    if isinstance(value, torch.distributions.Independent):
        return {"base_distribution": value.base_dist, "reinterpreted_batch_ndims": value.reinterpreted_batch_ndims}
    if isinstance(value, torch.distributions.MixtureSameFamily):
        parts = (value.mixture_distribution, value.component_distribution)
        return dict(zip(("mixture_distribution", "component_distribution"), parts, strict=True))
    known = [name for name in value.arg_constraints if name in vars(value)] or list(value.arg_constraints)
    if len(known) > 1 and known[0] in ("probs", "logits"):  # two forms of the same parameter
        known = ["logits"]
    if isinstance(value, torch.distributions.MultivariateNormal):
        known = ["loc", "scale_tril"]
    return {name: getattr(value, name) for name in known}


def _plain_number(value: Any) -> Any:
    """Converts subclasses, such as numbers of numpy or enumerations."""
    return next(kind(value) for kind in (bool, int, float, str) if isinstance(value, kind))
