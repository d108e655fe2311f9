"""A report, taken apart and shown by a browser."""

from __future__ import annotations

import base64
import os
import re
import shutil
import struct
import subprocess
from html.parser import HTMLParser
from pathlib import Path

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


class Page(HTMLParser):
    """The images' addresses, and the cells of each table by its id or class."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.images: list[str] = []
        self.tables: dict[str, list[list[str]]] = {}
        self.links: list[str] = []
        self._rows: list[list[str]] = []
        self._open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        known = dict(attrs)
        self.links += [value or "" for name, value in attrs if name in ("src", "href")]
        if tag == "img":
            self.images.append(known.get("src") or "")
            assert known.get("alt")
        if tag == "table":
            self._rows = self.tables.setdefault(known.get("id") or known.get("class") or "", [])
        if tag == "tr":
            self._rows.append([])
        if tag in ("td", "th"):
            self._rows[-1].append("")
        if tag not in ("img", "meta", "link"):
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if {"td", "th"} & set(self._open):
            self._rows[-1][-1] += data


def png_size(address: str) -> tuple[int, int]:
    prefix = "data:image/png;base64,"
    assert address.startswith(prefix)
    content = base64.b64decode(address.removeprefix(prefix))
    assert content.startswith(b"\x89PNG")
    width, height = struct.unpack(">II", content[16:24])
    return width, height


def shown_widths(report: Path, scratch: Path) -> list[int]:
    """How wide a browser finds the pictures of a report."""
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", f"--user-data-dir={scratch / 'user'}"]
    script = "window.onload=()=>{document.title=[...document.images].map(i=>i.naturalWidth).join()}"
    text = report.read_text(encoding="utf-8").replace("</body>", f"<script>{script}</script></body>")
    (scratch / "probed.html").write_text(text, encoding="utf-8")
    done = subprocess.run(
        [str(CHROMIUM), *flags, "--dump-dom", (scratch / "probed.html").as_uri()],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "HOME": str(scratch)},
    )
    widths = re.search(r"<title>([\d,]+)</title>", done.stdout)
    assert widths is not None, done.stderr[-500:]
    return [int(width) for width in widths.group(1).split(",")]
