"""The shapes of events that layers act on: checks with one message for all layers."""

from __future__ import annotations

from expmflow._validation import expect


def expect_vectors(event_shape: tuple[int, ...], features: int) -> None:
    """Raise unless events are vectors `(features,)`."""
    expect(event_shape == (features,), f"vectors of {features} features", f"events {event_shape}")


def expect_nodes(event_shape: tuple[int, ...], features: int) -> None:
    """Raise unless events are node features `(N, features)`."""
    fits = len(event_shape) == 2 and event_shape[1] == features
    expect(fits, f"node features of shape (batch, N, {features})", f"events {event_shape}")


def expect_images(event_shape: tuple[int, ...], channels: int) -> None:
    """Raise unless events are images `(channels, h, w)`."""
    fits = len(event_shape) == 3 and event_shape[0] == channels
    expect(fits, f"an input of shape (batch, {channels}, h, w)", f"events {event_shape}")


def expect_filled_images(event_shape: tuple[int, ...], channels: int) -> None:
    """Raise unless events are images `(channels, h, w)` of at least one point."""
    fits = len(event_shape) == 3 and event_shape[0] == channels and 0 not in event_shape
    expect(fits, f"images of {channels} channels", f"events {event_shape}")


def expect_channels(event_shape: tuple[int, ...], channels: int, dim: int) -> None:
    """Raise unless events have `channels` entries along the axis `dim` of a batch: 1 or −1."""
    size = event_shape[0 if dim == 1 else -1]
    expect(size == channels, f"{channels} channels on axis {dim}", size)
