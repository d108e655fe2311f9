"""The invertible layer: one protocol, one place that checks inputs, and the composition of layers."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar, final, overload

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from expmflow._validation import expect_finite, expect_tensor, expect_type, expect_untraced
from expmflow.nn.constraints import constant_constraints
from expmflow.nn.precision import HALF, full_precision, raised

Output = tuple[Tensor, Tensor]
Watcher = Callable[["Transform", Tensor, Tensor, Tensor], None]

MISSING = ("not implemented for", "Low precision dtypes not supported", "Unsupported dtype")


class Transform(nn.Module, ABC):
    """An invertible map with a tractable Jacobian determinant.

    `forward` goes from data to noise, `inverse` back. Both take `(batch, *event)` and return `(output, logdet)`, where
    `logdet`, of shape `(batch,)`, is log |det| of the map just applied; so `Inverse` only swaps two names. `context` is
    what the map is conditioned on; layers that need none ignore it, so a chain can pass it to all of them.

    A new layer implements `_forward` and `_inverse`, and `check_event_shape` and `check_context` to refuse wrong input
    with a clear message. A layer that changes the shape of events declares this in `output_shape` and `input_shape`.
    `expmflow.testing.check_transform` tests it.
    """

    exact_logdet: bool = True
    """Whether the log-determinant is exact; False where it is a random estimate."""

    closed_form: ClassVar[tuple[str, ...]] = ("forward", "inverse")
    """The directions that need no iteration."""

    @abstractmethod
    def _forward(self, x: Tensor, context: Any) -> Output: ...

    @abstractmethod
    def _inverse(self, z: Tensor, context: Any) -> Output: ...

    def check_event_shape(self, event_shape: tuple[int, ...]) -> None:
        """Raise `ValueError` unless the layer acts on events of this shape."""

    def output_shape(self, event_shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of an event after `forward`; the same by default."""
        return event_shape

    def input_shape(self, event_shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of an event after `inverse`; the same by default."""
        return event_shape

    def check_context(self, context: Any, x: Tensor) -> None:
        """Raise `ValueError` unless the layer can take `context` with `x`."""

    @final  # type: ignore[misc]
    def forward(self, x: Tensor, context: Any = None) -> Output:
        """z and log |det dz/dx|."""
        return self._run(self._forward, x, context)

    @final
    def inverse(self, z: Tensor, context: Any = None) -> Output:
        """x and log |det dx/dz|."""
        with constant_constraints():  # so that it inverts the preceding forward pass, in training too
            return self._run(self._inverse, z, context)

    def _expect(self, condition: bool, expected: str, got: object) -> None:
        """Raise `ValueError` with the layer's name: for problems that only `_forward` or `_inverse` can detect."""
        if not condition:
            raise ValueError(f"{layer_name(self)}: Expected {expected}; got {got}.")

    def _run(self, direction: Callable[[Tensor, Any], Output], x: Tensor, context: Any) -> Output:
        if isinstance(x, Tensor) and torch.is_autocast_enabled(x.device.type):
            parameter = _first_parameter(self)
            dtype = torch.float32 if parameter is None else parameter.dtype
            x, context = raised(x, dtype), raised(context, dtype)
        if torch.compiler.is_compiling():
            return _exactly(direction, x, context)
        try:
            if self.training:
                expect_untraced("a layer in training mode, which may change as it runs: call eval()")
            self._check(x, context)
        except (TypeError, ValueError) as error:
            raise type(error)(f"{layer_name(self)}: {error}") from None
        _state.depth += 1  # of nested layers, only the outermost reads its whole input
        try:
            out, logdet = _exactly(direction, x, context)
        except RuntimeError as error:  # NotImplementedError is one too
            if x.dtype in HALF and any(words in str(error) for words in MISSING):
                wide = "an input and weights of dtype torch.float32 or torch.float64, as torch has no parts for less"
                raise TypeError(f"{layer_name(self)}: Expected {wide}; got {x.dtype}.") from None
            raise
        finally:
            _state.depth -= 1
        for watcher in _state.watchers:
            watcher(self, x, out, logdet)
        return out, logdet

    def _check(self, x: Tensor, context: Any) -> None:
        expect_tensor(x, "the input")
        if x.ndim < 2:
            raise ValueError(f"Expected an input of shape (batch, *event); got {tuple(x.shape)}.")
        parameter = _first_parameter(self)
        if parameter is not None:
            expect_type(x.dtype == parameter.dtype, f"an input of dtype {parameter.dtype}, as the layer", x.dtype)
        self.check_event_shape(tuple(x.shape[1:]))
        self.check_context(context, x)
        if _state.depth == 0:
            expect_finite(x, "the input")


def layer_name(layer: Transform) -> str:
    """The name of the layer's class, for messages, without the prefix that parametrized weights add to it."""
    name = type(layer).__name__
    return name.removeprefix("Parametrized") if parametrize.is_parametrized(layer) else name


class _State(threading.local):
    def __init__(self) -> None:
        self.depth = 0
        self.watchers: list[Watcher] = []


_state = _State()


@contextmanager
def unread() -> Iterator[None]:
    """Do not read inputs: for callers that check the result instead, as `Flow` does."""
    _state.depth += 1
    try:
        yield
    finally:
        _state.depth -= 1


def _exactly(direction: Callable[[Tensor, Any], Output], x: Tensor, context: Any) -> Output:
    """Turn mixed precision off, if it is on: a context manager would cost as much as a small layer."""
    if not torch.is_autocast_enabled(x.device.type):
        return direction(x, context)
    with full_precision(x.device.type):
        return direction(x, context)


def _first_parameter(module: nn.Module) -> Tensor | None:
    """Like `next(module.parameters(), None)`, which walks through the whole module first."""
    for parameter in module._parameters.values():
        if parameter is not None:
            return parameter
    children = (_first_parameter(child) for child in module._modules.values() if child is not None)
    return next((parameter for parameter in children if parameter is not None), None)


@contextmanager
def watching(watcher: Watcher) -> Iterator[None]:
    """Call `watcher(layer, input, output, logdet)` after every layer that runs, innermost first."""
    _state.watchers.append(watcher)
    try:
        yield
    finally:
        _state.watchers.remove(watcher)


class Composite(Transform):
    """A layer made of layers, its children: its properties hold if they hold for all of them."""

    @property
    def exact_logdet(self) -> bool:  # type: ignore[override]
        """Whether the log-determinants of all its layers are exact."""
        return all(layer.exact_logdet for layer in self._parts())

    @property
    def closed_form(self) -> tuple[str, ...]:  # type: ignore[override]
        """The directions in which none of its layers needs an iteration."""
        return tuple(way for way in Transform.closed_form if all(way in layer.closed_form for layer in self._parts()))

    def _parts(self) -> Iterator[Transform]:
        for child in self.children():
            layers = child if isinstance(child, nn.ModuleList) else [child]
            yield from (layer for layer in layers if isinstance(layer, Transform))


@final
class Chain(Composite):
    """A sequence of layers, applied in the order of the list; log-determinants add up.

    Example:
        >>> chain = T.Chain([T.Flip(), T.ActNorm(3)])
        >>> z, logdet = chain(torch.randn(4, 3))
        >>> z.shape, logdet.shape
        (torch.Size([4, 3]), torch.Size([4]))
        >>> chain[1], len(chain[:1])
        (ActNorm(), 1)
    """

    def __init__(self, layers: Iterable[Transform]) -> None:
        super().__init__()
        expect_type(isinstance(layers, Iterable), "a list of layers", type(layers).__name__)
        layers = list(layers)
        for layer in layers:
            expect_type(isinstance(layer, Transform), "layers in a chain", type(layer).__name__)
        self.layers = nn.ModuleList(layers)

    @overload
    def __getitem__(self, index: int) -> Transform: ...

    @overload
    def __getitem__(self, index: slice) -> Chain: ...

    def __getitem__(self, index: int | slice) -> Transform | Chain:
        """A layer; for a slice, a chain of some of the layers, which both chains then share."""
        chosen = list(self)[index]
        return Chain(chosen) if isinstance(chosen, list) else chosen

    def __iter__(self) -> Iterator[Transform]:
        return iter(self.layers)  # type: ignore[arg-type]

    def __len__(self) -> int:
        return len(self.layers)

    def output_shape(self, event_shape: tuple[int, ...]) -> tuple[int, ...]:
        for layer in self:
            event_shape = layer.output_shape(event_shape)
        return event_shape

    def input_shape(self, event_shape: tuple[int, ...]) -> tuple[int, ...]:
        for layer in reversed(list(self)):
            event_shape = layer.input_shape(event_shape)
        return event_shape

    def _forward(self, x: Tensor, context: Any) -> Output:
        total = x.new_zeros(x.shape[0])
        for layer in self.layers:
            x, logdet = layer(x, context)
            total = total + logdet
        return x, total

    def _inverse(self, z: Tensor, context: Any) -> Output:
        total = z.new_zeros(z.shape[0])
        for layer in reversed(self.layers):
            z, logdet = layer.inverse(z, context)  # type: ignore[operator]
            total = total + logdet
        return z, total


@final
class Inverse(Composite):
    """A layer with `forward` and `inverse` swapped."""

    def __init__(self, transform: Transform) -> None:
        super().__init__()
        self.transform = transform

    @property
    def closed_form(self) -> tuple[str, ...]:  # type: ignore[override]
        """The directions of the layer, swapped."""
        there, back = Transform.closed_form
        return tuple(way for way, its in ((there, back), (back, there)) if its in self.transform.closed_form)

    def output_shape(self, event_shape: tuple[int, ...]) -> tuple[int, ...]:
        return self.transform.input_shape(event_shape)

    def input_shape(self, event_shape: tuple[int, ...]) -> tuple[int, ...]:
        return self.transform.output_shape(event_shape)

    def _forward(self, x: Tensor, context: Any) -> Output:
        return self.transform.inverse(x, context)

    def _inverse(self, z: Tensor, context: Any) -> Output:
        return self.transform(z, context)


def real_points(x: Tensor, channels: int, mask: Tensor | None) -> Tensor:
    """`(batch,)`: how many vectors of `channels` entries each row of `x` has, without the padding of graphs."""
    if mask is not None:
        return mask.sum(1).to(x.dtype)
    return x.new_full((x.shape[0],), x.shape[1:].numel() // channels)


def keep_padding(z: Tensor, x: Tensor, mask: Tensor | None) -> Tensor:
    """`z` at the real nodes, `x` at the others."""
    return z if mask is None else torch.where(mask.unsqueeze(-1), z, x)


def expanded(logdet: Tensor, x: Tensor) -> Tensor:
    """A log-determinant that is the same for all rows, expanded to shape `(batch,)`."""
    return logdet.expand(x.shape[0]) if logdet.ndim == 0 else logdet
