"""Kill a training run at a chosen file operation, or at a chosen moment, in processes forked from this one.

    python kill_points.py FOLDER flow|vae operations STRIDE | moments COUNT

Prints one JSON line per kill. Forking saves importing torch again for each of them; there is one thread, so it is safe.
"""

import builtins
import json
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from image_run import run

import expmflow.training.checkpoint as checkpoint_module


class FileOperations:
    """Counts what changes the disk, and kills this process right before the operation number `fatal`."""

    def __init__(self, fatal: int | None) -> None:
        self.fatal = fatal
        self.count = 0

    def install(self) -> None:
        for module, name in (
            (os, "fsync"),
            (os, "replace"),
            (os, "rename"),
            (os, "unlink"),
            (os, "rmdir"),
            (os, "mkdir"),
        ):
            setattr(module, name, self._counted(getattr(module, name)))
        shutil.rmtree = checkpoint_module.shutil.rmtree = self._counted(shutil.rmtree)
        opened = builtins.open

        def open_counted(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
            if any(letter in mode for letter in "wax+"):
                self._tick()
            return opened(file, mode, *args, **kwargs)

        builtins.open = open_counted  # type: ignore[assignment]

    def _counted(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            self._tick()
            return function(*args, **kwargs)

        return counted

    def _tick(self) -> None:
        self.count += 1
        if self.count == self.fatal:
            os.kill(os.getpid(), signal.SIGKILL)


def in_child(work: Callable[[], None], seconds: float | None = None) -> int:
    """Run in a forked process, killed after `seconds` if given; the exit status as `wait` gives it."""
    child = os.fork()
    if child == 0:
        try:
            work()
        except BaseException as error:
            print(repr(error), file=sys.stderr, flush=True)
            os._exit(1)
        os._exit(0)
    if seconds is not None:
        time.sleep(seconds)
        os.kill(child, signal.SIGKILL)
    return os.waitpid(child, 0)[1]


def fingerprint(folder: Path) -> dict[str, str]:
    """All that a finished run leaves, byte for byte; times differ between runs and are left out."""
    newest = checkpoint_module.list_checkpoints(folder / "checkpoints")[0]
    files = [folder / "model.safetensors", *sorted(newest.iterdir())]
    found = {str(p.relative_to(folder)): p.read_bytes().hex() for p in files if p.name != "manifest.json"}
    metrics = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    found["metrics"] = json.dumps([{k: v for k, v in m.items() if k != "seconds_per_step"} for m in metrics])
    return found


def main() -> None:
    base, model, way, amount = Path(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4])
    reference = base / "reference"
    counter = base / "count"

    def uninterrupted() -> None:
        operations = FileOperations(None)
        operations.install()
        run(reference, kind=model)
        counter.write_text(str(operations.count))

    started = time.perf_counter()
    assert in_child(uninterrupted) == 0
    duration = time.perf_counter() - started
    expected, total = fingerprint(reference), int(counter.read_text())

    def attempt(name: str, first: Callable[[Path], int]) -> None:
        folder = base / name
        status = first(folder)
        killed = os.WIFSIGNALED(status)
        resumed = in_child(lambda: run(folder, kind=model))
        same = resumed == 0 and fingerprint(folder) == expected
        print(json.dumps({"name": name, "killed": killed, "resumed": resumed == 0, "same": same}), flush=True)
        shutil.rmtree(folder)

    def killed_at(fatal: int) -> Callable[[Path], int]:
        def first(folder: Path) -> int:
            def work() -> None:
                FileOperations(fatal).install()
                run(folder, kind=model)

            return in_child(work)

        return first

    if way == "operations":
        for fatal in range(1, total + 1, amount):
            attempt(f"operation-{fatal}", killed_at(fatal))
    else:
        moments = random.Random(0)
        for k in range(amount):
            moment = moments.uniform(0.02, duration)
            attempt(f"moment-{k}", lambda folder, moment=moment: in_child(lambda: run(folder, kind=model), moment))


if __name__ == "__main__":
    main()
