"""The published data sets: in the user's folder, or downloaded from their sources."""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from expmflow.data.errors import DataError, first_line
from expmflow.data.paths import expand_home

VARIABLE = "EXPMFLOW_DATA"
CHUNK = 1 << 16

Progress = Callable[[str, int, int], None]
"""Called during slow work with its name, the amount done, and the total amount (0 if unknown)."""

log = logging.getLogger(__name__)


def user_folder(folder: Path | None) -> Path | None:
    """The folder where the user keeps data: `folder`, or EXPMFLOW_DATA, or None."""
    named = folder or os.environ.get(VARIABLE)
    return expand_home(Path(named)) if named else None


def cache_folder() -> Path:
    """Where downloads are stored: in the operating system's cache folder of the user."""
    return Path(_pooch().os_cache("expmflow"))


def download(url: str, md5: str, to: Path, progress: Progress | None = None) -> Path:
    """The file `to`, downloaded unless it exists; its checksum is compared in both cases.

    The file gets its name when it is complete, so an interrupted download leaves none.
    """
    bar = None if progress is None else _Bar(to.name, progress)
    pooch = _pooch()
    try:
        downloader = pooch.HTTPDownloader(progressbar=bar or False, chunk_size=CHUNK)
        pooch.retrieve(url, f"md5:{md5}", fname=to.name, path=to.parent, downloader=downloader)
    except (OSError, ValueError) as error:  # requests raises OSErrors; pooch raises ValueError for a wrong checksum
        raise DataError(
            f"Expected to download {url}, or to find its files in the folder that data.dir or {VARIABLE} names; "
            f"got: {_reason(error)}."
        ) from None
    return to


def compare(path: Path, content: bytes, md5: str) -> None:
    """Warn unless the bytes are the published ones: results would not be comparable."""
    if hashlib.md5(content, usedforsecurity=False).hexdigest() != md5:
        log.warning("%s differs from the published file; results on it do not compare with published ones.", path)


class _Bar:
    """The interface of a progress bar that pooch expects."""

    def __init__(self, name: str, progress: Progress) -> None:
        self.name, self.progress = name, progress
        self.total = self.done = 0

    def update(self, count: int) -> None:
        self.done += count
        self.progress(self.name, min(self.done, self.total) if self.total else self.done, self.total)

    def reset(self) -> None:
        self.done = 0

    def close(self) -> None:
        pass


def _reason(error: Exception) -> str:
    import requests

    match error:
        case requests.Timeout():
            return "no answer"
        case requests.ConnectionError():
            return "no connection"
        case ValueError() if "hash" in str(error):
            return "a file with another checksum"
    return first_line(error)


def _pooch() -> Any:
    try:
        import pooch
    except ImportError as error:
        raise ImportError("Expected pooch to download data; got none. Install the extra `train`.") from error
    return pooch
