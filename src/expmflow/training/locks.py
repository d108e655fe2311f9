"""One process at a time in a folder: two that train one run, or write one table, would undo each other's work."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

try:
    import fcntl
except ImportError:  # where the system has no such locks, folders are not locked
    fcntl = None  # type: ignore[assignment]

_held: set[Path] = set()
log = logging.getLogger(__name__)


class InUseError(RuntimeError):
    """Another process works in the folder; the message says which folder."""


@contextmanager
def locked(folder: Path, *, wait: bool = False) -> Iterator[None]:
    """Keep other processes out of a folder that exists.

    The lock is the system's, on the folder itself: nothing is left behind, and a process that is killed lets go of it.
    Whoever has it may ask for it again.

    Args:
        folder: which.
        wait: until the other process is done, instead of raising.

    Raises:
        InUseError: if another process has it.

    Example:
        >>> with locked(Path(".")):
        ...     pass
    """
    place = folder.resolve()
    if fcntl is None or place in _held:
        yield
        return
    descriptor = os.open(place, os.O_RDONLY)
    try:
        _acquire(descriptor, folder, wait)
        _held.add(place)
        yield
    finally:
        _held.discard(place)
        os.close(descriptor)


def _acquire(descriptor: int, folder: Path, wait: bool) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise InUseError(f"Expected a folder that no other process works in; got {folder}.") from None
    except OSError as error:  # some file systems of networks have no locks
        log.debug("%s cannot be locked: %s", folder, error)
