"""Recipes of modules: the registered names of their classes, and the arguments of their constructors.

With a recipe and the state dict a module can be rebuilt, with nothing unpickled. The constructors of registered classes
record their arguments; nothing else about the classes changes.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import Tensor, nn
from torch.distributions import Distribution

from expmflow._validation import expect, expect_type

Module = TypeVar("Module", bound=type[nn.Module])

CLASSES: dict[str, type[nn.Module]] = {}


@dataclass(frozen=True)
class Recipe:
    """How a module was constructed.

    Args:
        name: the registered name of the class.
        positional: arguments without a name.
        arguments: all other arguments.
        attributes: the modules stored under the names of its arguments at the end of the constructor.
    """

    name: str
    positional: tuple[Any, ...]
    arguments: dict[str, Any]
    attributes: dict[str, Any]


def register_layer(name: str) -> Callable[[Module], Module]:
    """A decorator that lets `ef.save` store flows with a layer or network of this class, under this name.

    The arguments of the constructor are recorded: numbers, strings, tensors, modules, lists and dicts of them. The
    state dict must hold everything else. The class must also be registered where `ef.load` reads such a flow.

    Args:
        name: the name of the class in files; without dots, which names of this package have.

    Example:
        >>> @ef.register_layer("Negate")
        ... class Negate(T.Transform):
        ...     def _forward(self, x, context):
        ...         return -x, x.new_zeros(len(x))
        ...     _inverse = _forward
        >>> flow = ef.Flow(T.Chain([Negate(), T.ActNorm(2)]), ef.distributions.StandardNormal((2,)))
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     ef.save(flow, folder)
        ...     type(ef.load(folder).transform[0]).__name__
        'Negate'
    """
    expect_type(isinstance(name, str), 'a name, as in @register_layer("Mine")', getattr(name, "__name__", name))
    expect(name.isidentifier(), "a name of letters, digits and underscores", repr(name))

    def registered(cls: Module) -> Module:
        expect_type(isinstance(cls, type) and issubclass(cls, nn.Module), "a class of modules", cls)
        known = CLASSES.get(name)
        other = known is not None and known.__qualname__ != cls.__qualname__  # a notebook may define a class again
        expect(not other, f"a name for {cls.__qualname__} that is free", f"{name}, which is {known}")
        return keep_arguments(cls, name)

    return registered


def register_all(package: str, names: Iterable[str], values: Mapping[str, Any]) -> None:
    """Register the concrete modules that a package exports, under names such as `transforms.ActNorm`."""
    for name in names:
        value = values[name]
        if isinstance(value, type) and issubclass(value, nn.Module) and not inspect.isabstract(value):
            keep_arguments(value, f"{package.removeprefix('expmflow.')}.{name}")


def keep_arguments(cls: Module, name: str) -> Module:
    """Register a class, and let its constructor record its arguments."""
    CLASSES[name] = cls
    construct = cls.__init__
    signature = inspect.signature(construct)
    kinds = [parameter.kind for parameter in list(signature.parameters.values())[1:]]
    unnamed = any(kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.POSITIONAL_ONLY) for kind in kinds)

    @functools.wraps(construct)
    def initialise(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        if type(self) is not cls:  # a subclass, which has arguments of its own
            construct(self, *args, **kwargs)
            return
        args = tuple(map(_read, args))
        kwargs = {key: _read(value) for key, value in kwargs.items()}
        bound = _bound(signature, self, args, kwargs)
        construct(self, *args, **kwargs)
        if bound is None:  # the constructor has refused them, or will explain
            return
        named = bound.kwargs if unnamed else _flat(bound.arguments, signature)
        attributes = {key: _part(self, key) for key in named}
        self.__dict__["_recipe"] = Recipe(name, bound.args[1:] if unnamed else (), named, attributes)

    cls.__init__ = initialise  # type: ignore[method-assign]
    return cls


def recipe_of(module: nn.Module) -> Recipe | None:
    """How the module would be constructed now, including modules replaced since. None if it has no recipe."""
    made = module.__dict__.get("_recipe")
    if not isinstance(made, Recipe):
        return None
    arguments = dict(made.arguments)
    for name, before in made.attributes.items():
        now = _part(module, name)
        wrapped = isinstance(arguments[name], Distribution) and isinstance(now, nn.Module)
        if wrapped or (now is not before and now != before):
            arguments[name] = now
    return Recipe(made.name, made.positional, arguments, {})


def _part(module: nn.Module, name: str) -> Any:
    """A child of that name, a list of children, or a distribution; everything else is state, or a setting."""
    value = module._modules.get(name, module.__dict__.get(name))
    if isinstance(value, nn.ModuleList):
        return list(value)
    return value if isinstance(value, nn.Module | Distribution) else None


def _read(value: Any) -> Any:
    """Iterators become lists, because they can be read only once."""
    return list(value) if isinstance(value, Iterator) else value


def _kept(value: Any) -> Any:
    """A copy: lists belong to the caller, who may change them, and tensors in a graph cannot be copied later."""
    if isinstance(value, Tensor):
        return value.detach()
    return value.copy() if type(value) in (list, dict) else value


def _bound(
    signature: inspect.Signature, self: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> inspect.BoundArguments | None:
    try:
        return signature.bind(self, *map(_kept, args), **{key: _kept(value) for key, value in kwargs.items()})
    except TypeError:
        return None


def _flat(arguments: Mapping[str, Any], signature: inspect.Signature) -> dict[str, Any]:
    """Arguments by name, without `self`, and with those of `**kwargs`."""
    flat: dict[str, Any] = {}
    for name, value in list(arguments.items())[1:]:
        if signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD:
            flat |= value
        else:
            flat[name] = value
    return flat
