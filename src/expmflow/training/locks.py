"""Locks on folders: two processes that train one run, or write one table, would destroy each other's work."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

try:
    import fcntl
except ImportError:  # without system locks, folders are not locked
    fcntl = None  # type: ignore[assignment]

_held: set[Path] = set()
log = logging.getLogger(__name__)


class InUseError(RuntimeError):
    """Another process works in the folder; the message says which folder."""


@contextmanager
def locked(folder: Path, *, wait: bool = False) -> Iterator[None]:
    """Keep other processes out of an existing folder.

    The lock is the system's, on the folder itself: it leaves nothing behind, and is released if the process is killed.
    Its owner may acquire it again.

    Args:
        folder: the folder.
        wait: wait until the other process has finished, instead of raising.

    Raises:
        InUseError: if another process has the lock.

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
    except OSError as error:  # some network file systems have no locks
        log.debug("%s cannot be locked: %s", folder, error)
