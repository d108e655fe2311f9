"""The command line: the only part that reads argv."""

from __future__ import annotations

import os
import sys

SPINS = "100000"  # about as long as the pause between two operations of a small model


def main() -> None:
    """Run the command that argv asks for, and exit with its code."""
    let_waiting_threads_sleep()
    try:
        from expmflow.cli.app import app
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("typer", "rich"):
            raise
        print(f"Expected {error.name} for the command line; got none. Install the extra `train`.", file=sys.stderr)
        sys.exit(1)
    app(prog_name="expmflow")


def let_waiting_threads_sleep() -> None:
    """Let waiting threads spin only briefly before they sleep, unless the environment says otherwise.

    Beside busy processes, a spinning thread occupies the core that the thread it waits for needs; a thread that sleeps
    at once has to be woken for every operation. This must be set before torch is loaded, and changes no result.
    """
    if not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & os.environ.keys():
        os.environ["GOMP_SPINCOUNT"] = SPINS
