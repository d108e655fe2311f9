"""How the data floor refuses a file."""

from __future__ import annotations


class DataError(ValueError):
    """A file that cannot be used as data; the message names it and says why."""


def first_line(error: Exception) -> str:
    """What an error says, to be put into a sentence."""
    return (str(error).splitlines() or [""])[0].rstrip(".") or type(error).__name__
