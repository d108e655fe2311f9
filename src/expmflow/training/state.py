"""What changes while a run is trained, and what a checkpoint holds."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass

import torch

from expmflow.distributions import Density
from expmflow.training.checkpoint import Checkpoint
from expmflow.training.optimizer import Average, load_optimizer_state, optimizer_state


@dataclass
class State:
    """Everything that a checkpoint holds."""

    model: Density
    optimizer: torch.optim.Optimizer
    average: Average | None
    step: int = 0
    best: float = math.inf
    best_step: int = -1
    stale: int = 0
    skipped: int = 0
    nonfinite_validations: int = 0

    def checkpoint(self) -> Checkpoint:
        tensors = {"model": self.model.state_dict(), "optimizer": optimizer_state(self.optimizer, self.model)}
        if self.average is not None:
            tensors["average"] = self.average.values
        plain = {"best": None if math.isinf(self.best) else self.best, "best_step": self.best_step}
        counts = {"skipped": self.skipped, "nonfinite_validations": self.nonfinite_validations}
        return Checkpoint(self.step, tensors, {**plain, "stale": self.stale, **counts})

    def restore(self, checkpoint: Checkpoint) -> None:
        self.model.load_state_dict(checkpoint.tensors["model"])
        load_optimizer_state(self.optimizer, self.model, checkpoint.tensors["optimizer"])
        if self.average is not None:
            self.average.load(checkpoint.tensors["average"])
        best = checkpoint.state["best"]
        self.step = checkpoint.step
        self.best = math.inf if best is None else best
        self.best_step, self.stale = checkpoint.state["best_step"], checkpoint.state["stale"]
        self.skipped = checkpoint.state["skipped"]
        self.nonfinite_validations = checkpoint.state.get("nonfinite_validations", 0)  # not in older checkpoints


def evaluation_model(state: State) -> Density:
    """A copy in evaluation mode, with the averaged weights if there are any."""
    model = copy.deepcopy(state.model).eval()
    if state.average is not None:
        state.average.copy_to(model)
    return model
