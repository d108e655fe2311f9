"""Optimizers, schedules and averages, each with a state of named tensors."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from expmflow._validation import expect
from expmflow.training.adamax import FlatAdamax
from expmflow.training.config import OptimConfig


def build_optimizer(model: nn.Module, config: OptimConfig) -> torch.optim.Optimizer:
    """Adam or Adamax over all parameters, in their fastest form.

    Weight decay is decoupled (Loshchilov and Hutter, 2019), and does not apply to biases, scales and shifts.
    """
    if config.optimizer == "adam" and config.weight_decay:
        matrices = [p for p in model.parameters() if p.ndim > 1]
        others = [p for p in model.parameters() if p.ndim <= 1]
        decays = ((matrices, config.weight_decay), (others, 0.0))
        groups = [{"params": params, "weight_decay": decay} for params, decay in decays if params]
        return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=True)
    if config.optimizer == "adam":
        return torch.optim.Adam(model.parameters(), lr=config.lr, betas=config.betas, eps=config.eps, fused=True)
    return FlatAdamax(model.parameters(), lr=config.lr, betas=config.betas, eps=config.eps)


def learning_rate(config: OptimConfig, step: int, steps_per_epoch: int) -> float:
    """The learning rate of a step: warm-up, then decay per epoch or per `decay_every` steps. A pure function."""
    warm = min(1.0, (step + 1) / config.warmup) ** config.warmup_power if config.warmup else 1.0
    every = config.decay_every or steps_per_epoch
    return config.lr * warm * config.decay ** (step // every)


def kl_weight(config: OptimConfig, step: int) -> float:
    """The weight of a bound's Kullback-Leibler part in a step: from 0 to 1, linearly. A pure function."""
    return min(1.0, step / config.kl_warmup) if config.kl_warmup else 1.0


def optimizer_state(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, Tensor]:
    """The optimizer's tensors as `quantity/parameter`."""
    names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    return {
        f"{quantity}/{names[parameter]}": value
        for parameter, state in optimizer.state.items()
        for quantity, value in state.items()
        if isinstance(value, Tensor)
    }


def load_optimizer_state(optimizer: torch.optim.Optimizer, model: nn.Module, tensors: dict[str, Tensor]) -> None:
    """Restore what `optimizer_state` returned."""
    parameters = dict(model.named_parameters())
    usual = {"step", "exp_avg", "exp_inf" if isinstance(optimizer, FlatAdamax) else "exp_avg_sq"}
    names = {key.partition("/")[2] for key in tensors}
    wanted = {f"{quantity}/{name}" for quantity in usual for name in names}
    expect(tensors.keys() == wanted, f"{', '.join(sorted(usual))} of each parameter", "others")
    for key, value in tensors.items():
        quantity, _, name = key.partition("/")
        parameter = parameters[name]
        shape = () if quantity == "step" else tuple(parameter.shape)
        expect(tuple(value.shape) == shape, f"{key} of shape {shape}", tuple(value.shape))
        # as in torch: moments on the device of their parameter, counters on the CPU unless the optimizer is fused
        aside = quantity == "step" and not optimizer.param_groups[0].get("fused")
        state = optimizer.state[parameter]
        fitting = value if aside else value.to(parameter.device, value.dtype if quantity == "step" else parameter.dtype)
        if quantity in state:  # may be a view of a longer vector
            state[quantity].copy_(fitting)
        else:
            state[quantity] = fitting


class Average:
    """An exponential moving average of the parameters; buffers are copied.

    The decay is smaller in the first steps: after k steps it is at most (1 + k)/(10 + k).
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        self.values = {name: p.detach().clone() for name, p in model.named_parameters()}

    @torch.no_grad()
    def update(self, model: nn.Module, step: int) -> None:
        decay = min(self.decay, (1 + step) / (10 + step))
        for name, parameter in model.named_parameters():
            self.values[name].lerp_(parameter, 1 - decay)

    def load(self, tensors: dict[str, Tensor]) -> None:
        shapes, given = ({name: tuple(t.shape) for name, t in of.items()} for of in (self.values, tensors))
        expect(shapes == given, "an average of the model's own parameters", "one of others")
        for name, value in tensors.items():
            self.values[name].copy_(value)

    @torch.no_grad()
    def copy_to(self, model: nn.Module) -> None:
        """Copy the averages into a model."""
        for name, parameter in model.named_parameters():
            parameter.copy_(self.values[name])


def gradient_norm(model: nn.Module, limit: float | None) -> Tensor:
    """The norm of all gradients; scales them down if it exceeds `limit`."""
    if limit is None:
        return torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    return torch.nn.utils.clip_grad_norm_(model.parameters(), limit)
