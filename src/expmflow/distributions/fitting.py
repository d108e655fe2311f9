"""Checks that the parts of a flow fit each other: shapes of layers and base, and whether any takes a context."""

from __future__ import annotations

from torch import nn
from torch.nn.utils import parametrize

from expmflow._validation import expect_type
from expmflow.distributions.gaussian import Base
from expmflow.nn import GraphInner, GraphNetwork
from expmflow.transforms import Amortized, Chain, Flipped, GraphConvExp, Inverse, Split, Transform
from expmflow.transforms.base import layer_name

GRAPHS = (GraphConvExp, GraphInner, GraphNetwork)


def fitting_shape(transform: Transform, base: Base) -> tuple[int, ...]:
    """The data shape of a flow; raises if the layers map no shape to that of the base."""
    expect_type(
        isinstance(transform, Transform),
        "a layer, as T.Chain makes of a list of them" if isinstance(transform, list | tuple) else "a layer",
        type(transform).__name__,
    )
    try:
        event_shape = transform.input_shape(base.event_shape)
        _after(transform, event_shape)
    except ValueError as error:
        raise ValueError(
            f"Expected a base of the shape that the layers give; got {base.description()}: {error}"
        ) from None
    return event_shape


def takes_context(flow: nn.Module) -> bool:
    """Whether any part may use a context; layers and networks from elsewhere count as if they do."""
    return any(_looks(part) for part in flow.modules())


def _looks(part: nn.Module) -> bool:
    ours = _module(part).split(".")[0] in ("expmflow", "torch")
    on_nodes = isinstance(part, Transform) and getattr(part, "dim", 1) == -1  # it takes the mask of a graph
    conditioned = getattr(part, "context_channels", 0) > 0 or getattr(part, "sees_context", False)
    return not ours or on_nodes or conditioned or isinstance(part, GRAPHS)


def _module(part: nn.Module) -> str:
    """The module that defines the part's class, without the subclass that parametrized weights add."""
    cls = type(part)
    return (cls.__bases__[0] if parametrize.is_parametrized(part) else cls).__module__


def _after(layer: Transform, event_shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape after a layer; each layer inside is asked about the shape that reaches it."""
    if isinstance(layer, Chain | Amortized):
        for part in layer:
            event_shape = _after(part, event_shape)
        return event_shape
    if isinstance(layer, Flipped):
        return _after(layer.transform, event_shape)
    if isinstance(layer, Inverse):
        before = layer.output_shape(event_shape)
        _after(layer.transform, before)
        return before
    try:
        layer.check_event_shape(event_shape)
    except ValueError as error:
        raise ValueError(f"{layer_name(layer)}: {error}") from None
    if isinstance(layer, Split):
        if layer.prior is not None:
            _after(layer.prior, event_shape)
        _after(layer.rest, (event_shape[0] // 2, *event_shape[1:]))
    return layer.output_shape(event_shape)
