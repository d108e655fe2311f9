"""Where the published data sets are: in the user's folder, or downloaded from their homes."""

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
"""Told of slow work: what it is, how much is done, and how much there is (0 if nobody knows)."""

log = logging.getLogger(__name__)


def user_folder(folder: Path | None) -> Path | None:
    """The folder that the user keeps data in: `folder`, or EXPMFLOW_DATA, or none."""
    named = folder or os.environ.get(VARIABLE)
    return expand_home(Path(named)) if named else None


def cache_folder() -> Path:
    """Where downloads are kept: the user's cache, as the operating system has it."""
    return Path(_pooch().os_cache("expmflow"))


def download(url: str, md5: str, to: Path, progress: Progress | None = None) -> Path:
    """The file `to`, downloaded unless it is there already; its checksum is compared in both cases.

    The file appears under its name when it is complete, so that an interrupted download leaves none.
    """
    bar = None if progress is None else _Bar(to.name, progress)
    pooch = _pooch()
    try:
        downloader = pooch.HTTPDownloader(progressbar=bar or False, chunk_size=CHUNK)
        pooch.retrieve(url, f"md5:{md5}", fname=to.name, path=to.parent, downloader=downloader)
    except (OSError, ValueError) as error:  # those of requests are OSErrors; of another checksum pooch says ValueError
        raise DataError(
            f"Expected to download {url}, or to find its files in the folder that data.dir or {VARIABLE} names; "
            f"got: {_reason(error)}."
        ) from None
    return to


def compare(path: Path, content: bytes, md5: str) -> None:
    """Warn unless the bytes are the published ones: numbers would not compare with those of others."""
    if hashlib.md5(content, usedforsecurity=False).hexdigest() != md5:
        log.warning("%s differs from the published file; results on it do not compare with published ones.", path)


class _Bar:
    """What pooch asks of a progress bar."""

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
