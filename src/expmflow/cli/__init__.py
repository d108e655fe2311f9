"""The command line: the only part that knows of argv."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command that argv asks for, and exit with its code."""
    try:
        from expmflow.cli.app import app
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("typer", "rich"):
            raise
        print(f"Expected {error.name} for the command line; got none. Install the extra `train`.", file=sys.stderr)
        sys.exit(1)
    app(prog_name="expmflow")
