"""What the process does with memory that it has freed."""

from __future__ import annotations

import ctypes

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of mallopt
_LARGEST_MAPPED = 2**25  # the largest that glibc accepts: blocks beyond are always mapped anew
_NEVER = 2**31 - 1


def keep_freed_memory() -> None:
    """Ask glibc to keep freed memory for later; systems with another allocator are left as they are.

    A step of training frees what the next one needs. Handed back and fetched again, every page of it is cleared by the
    kernel, at each step.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError, TypeError):
        return
    mallopt(_MMAP_THRESHOLD, _LARGEST_MAPPED)
    mallopt(_TRIM_THRESHOLD, _NEVER)
