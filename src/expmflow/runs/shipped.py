"""Runs by name: the folder of a run, or a model that ships with the package."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

from expmflow.training.checkpoint import CheckpointError

FOLDER = Path(str(resources.files("expmflow"))) / "pretrained"


def shipped() -> dict[str, Path]:
    """The models inside the package: name to folder."""
    if not FOLDER.is_dir():
        return {}
    return {path.name: path for path in sorted(FOLDER.iterdir()) if (path / "config.json").is_file()}


def find_run(source: str | Path) -> Path:
    """An existing folder; otherwise the shipped model of that name."""
    path = Path(source)
    known = shipped()
    if path.is_dir():
        return path
    if str(source) in known:
        return known[str(source)]
    names = f" Models that come with expmflow: {', '.join(known)}." if known else ""
    raise CheckpointError(f"Expected a run in {path}; got no such folder.{names}")


def run_name(folder: Path) -> str:
    """The name of a run: that of a shipped model, or of its folder."""
    return folder.name if folder.parent == FOLDER else str(folder)


def place_beside(folder: Path) -> Path:
    """Where to store results about a run: its folder, or `runs/NAME` for a shipped model."""
    return Path("runs") / folder.name if folder.parent == FOLDER else folder
