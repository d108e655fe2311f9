"""Validation during training, and the handling of likelihoods that are not finite."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from expmflow.distributions import Density, NonFiniteError
from expmflow.training.checkpoint import list_checkpoints
from expmflow.training.job import Run
from expmflow.training.state import State, evaluation_model


class TrainingError(RuntimeError):
    """Training stopped; the message names the step, the layer, and the last good checkpoint."""


def validate(run: Run, state: State) -> None:
    """The mean negative log-likelihood of the validation rows under the averaged weights; writes the best weights."""
    part = 1 if len(run.data.validation) else 0
    rows = (run.data.train, run.data.validation)[part][: run.config.train.validation_rows]
    labels = None if run.data.labels is None else run.data.labels[part]
    value, problem = mean_nll(run, evaluation_model(state), rows, "validation", labels)
    if not math.isfinite(value):
        if run.config.train.on_nonfinite == "stop":
            raise stopped(run, f"validation at step {state.step}", problem)
        state.nonfinite_validations += 1
    better = value < state.best
    state.stale = 0 if better else state.stale + 1
    lost = {"nonfinite_validations": state.nonfinite_validations} if state.nonfinite_validations else {}
    run.record({"step": state.step, "validation_nll": value, "best": better, **lost})
    if better:
        state.best, state.best_step = value, state.step
        if run.among.writes:
            run.folder.save_weights(evaluation_model(state).state_dict())


@torch.no_grad()
def mean_nll(run: Run, model: Density, rows: Tensor, label: str, labels: Tensor | None = None) -> tuple[float, str]:
    """Computed in batches, shared by all processes; the result does not depend on their number.

    NaN if it is not finite, with the layer where this process found that.
    """
    problem = ""
    size = run.config.train.batch_size
    total = torch.zeros(2, dtype=torch.float64, device=run.device)
    for k, batch in enumerate(rows.split(size)):
        if k % run.among.count == run.among.rank:
            noise = run.noise(model, len(batch), label, k)
            context = run.context(None if labels is None else labels[k * size : (k + 1) * size])
            try:
                with run.layer_draws(model, range(len(batch)), f"{label} layers", k):
                    total[0] -= model(run.rows(batch), context, noise=noise).double().sum()
            except NonFiniteError as error:  # the other processes still wait for this one's sum
                total[0], problem = math.nan, error.layer
            total[1] += len(batch)
    if not problem and not bool(total[0].isfinite()):
        problem = "the likelihood"
    total = run.among.total(total)
    mean = float(total[0] / total[1])
    return (mean, "") if math.isfinite(mean) else (math.nan, problem)


def stopped(run: Run, what: str, problem: str) -> TrainingError:
    """The error to raise if `what` is not finite."""
    known = list_checkpoints(run.folder.checkpoints)
    last = f"the last good checkpoint is {known[0]}" if known else "there is no checkpoint yet"
    return TrainingError(f"Expected a finite {what}; got NaN or infinity in {problem or 'another process'}; {last}.")
