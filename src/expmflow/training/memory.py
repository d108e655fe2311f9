"""Settings for memory that the process has freed."""

from __future__ import annotations

import ctypes

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of mallopt
_LARGEST_MAPPED = 2**25  # the largest that glibc accepts: larger blocks are always mapped anew
_NEVER = 2**31 - 1


def keep_freed_memory() -> None:
    """Ask glibc to keep freed memory for later use; other allocators are left alone.

    A training step frees the memory that the next one needs. If it were returned to the system and fetched again, the
    kernel would clear every page of it at each step.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError, TypeError):
        return
    mallopt(_MMAP_THRESHOLD, _LARGEST_MAPPED)
    mallopt(_TRIM_THRESHOLD, _NEVER)
