"""What changes during training, and is stored in checkpoints."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass

import torch

from expmflow._validation import expect_count, expect_type
from expmflow.distributions import Density
from expmflow.training.checkpoint import Checkpoint, CheckpointError
from expmflow.training.optimizer import Average, load_optimizer_state, optimizer_state


@dataclass
class State:
    """Everything that a checkpoint stores."""

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
        """Continue from a checkpoint; `CheckpointError` if it is of another model."""
        try:
            self._restore(checkpoint)
        except (KeyError, RuntimeError, TypeError, ValueError) as error:
            reason = f"no {error}" if isinstance(error, KeyError) else " ".join(str(error).split()).rstrip(".")
            raise CheckpointError(
                f"Expected the checkpoint of step {checkpoint.step} to fit the model; got: {reason:.300}."
            ) from None

    def _restore(self, checkpoint: Checkpoint) -> None:
        self.model.load_state_dict(checkpoint.tensors["model"])
        load_optimizer_state(self.optimizer, self.model, checkpoint.tensors["optimizer"])
        if self.average is not None:
            self.average.load(checkpoint.tensors["average"])
        plain = {"nonfinite_validations": 0, **checkpoint.state}  # missing in older checkpoints
        for name in ("best_step", "stale", "skipped", "nonfinite_validations"):
            expect_count(plain[name], name, at_least=-1)
        best = plain["best"]
        expect_type(best is None or isinstance(best, int | float), "best to be a number", repr(best))
        self.step = checkpoint.step
        self.best = math.inf if best is None else float(best)
        self.best_step, self.stale, self.skipped = plain["best_step"], plain["stale"], plain["skipped"]
        self.nonfinite_validations = plain["nonfinite_validations"]


def evaluation_model(state: State) -> Density:
    """A copy in evaluation mode, with the averaged weights if there are any."""
    model = copy.deepcopy(state.model).eval()
    if state.average is not None:
        state.average.copy_to(model)
    return model
