"""Paths as users write them."""

from __future__ import annotations

from pathlib import Path

from expmflow.data.errors import DataError


def expand_home(path: Path) -> Path:
    """The path with `~` or `~user` replaced by that home folder.

    Raises:
        DataError: if there is no such user.
    """
    try:
        return path.expanduser()
    except RuntimeError:
        raise DataError(f"Expected the home folder of a user in {path}; got none for {path.parts[0]}.") from None
