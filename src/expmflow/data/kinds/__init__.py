"""The kinds of data. A new one is a file beside these, and one call of `register`."""

from __future__ import annotations

from expmflow.data.kinds.base import NATS, Kind, Layout, Rows, Source, Unit
from expmflow.data.kinds.binary import BinaryImages
from expmflow.data.kinds.graphs import Graphs
from expmflow.data.kinds.images import Images
from expmflow.data.kinds.networks import Networks
from expmflow.data.kinds.vectors import Vectors

__all__ = ["KINDS", "NATS", "Kind", "Layout", "Rows", "Source", "Unit", "kind_of_source", "register", "sources"]

KINDS: dict[str, Kind] = {}
"""Every kind, by its name."""


def register(kind: Kind) -> None:
    """Register a kind; its name and those of its sources must be new."""
    clash = ({kind.name} & KINDS.keys()) | (kind.sources.keys() & sources().keys())
    if clash:
        raise ValueError(f"Expected a kind of data whose names are new; got {', '.join(sorted(clash))} again.")
    KINDS[kind.name] = kind


def sources() -> dict[str, Source]:
    """Every source, by its name in configs."""
    return {name: source for kind in KINDS.values() for name, source in kind.sources.items()}


def kind_of_source(name: str) -> Kind:
    """The kind of a source's rows."""
    for kind in KINDS.values():
        if name in kind.sources:
            return kind
    raise ValueError(f"Expected data called one of {', '.join(sources())}; got {name!r}.")


for _kind in (Vectors(), Networks(), Images(), BinaryImages(), Graphs()):
    register(_kind)
