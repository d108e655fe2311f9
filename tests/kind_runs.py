"""Small runs on images and on graphs."""

from __future__ import annotations

from pathlib import Path

from cli_runs import run_command

STEPS = "train: {steps: 3, batch_size: 16, log_every: 1, validate_every: 3, checkpoint_every: 3, sample_every: 3}"
IMAGES = (
    "{data: {name: digits}, model: {kind: image, levels: 1, subflows: 1, hidden: 4, growth: 4, depth: 1}, "
    f"optim: {{lr: 0.01}}, {STEPS}}}"
)
GRAPHS = f"{{data: {{name: mog-4, samples: 50}}, model: {{kind: graph, subflows: 1, hidden: 4}}, {STEPS}}}"


def train_kind(folder: Path, settings: str, *overrides: str) -> Path:
    """The run that the settings describe."""
    folder.parent.mkdir(exist_ok=True)
    config = folder.with_suffix(".yaml")
    config.write_text(settings)
    outcome = run_command("train", config, *overrides, "--out", folder)
    assert outcome.code == 0, outcome.err
    return folder
