"""Errors of the data modules."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

WORDS = {"null", "true", "false", "yes", "no", "on", "off", "y", "n"}  # strings that YAML reads as something else


class DataError(ValueError):
    """A file that cannot be used as data; the message names it and says why."""


def list_setting(key: str, names: Sequence[str], more: bool = False) -> str:
    """`key=[names]` in the form that a shell takes, quoted if names have spaces or other special characters.

    Example:
        >>> print(list_setting("data.drop", ["name", "body mass", "no"]))
        'data.drop=[name,body mass,"no"]'
    """
    text = f"{key}=[{','.join([*map(_as_yaml, names), *(['…'] if more else [])])}]"
    return text if re.fullmatch(r"[\w.=,\[\]…-]*", text) else "'" + text.replace("'", "'\\''") + "'"


def _as_yaml(name: str) -> str:
    plain = re.fullmatch(r"[^\W\d]\w*( \w+)*", name) is not None and name.lower() not in WORDS
    return name if plain else json.dumps(name, ensure_ascii=False)


def first_line(error: Exception) -> str:
    """The first line of an error's message, to be put into a sentence."""
    return (str(error).splitlines() or [""])[0].rstrip(".") or type(error).__name__
