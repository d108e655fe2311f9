"""Adamax with few operations for all parameters together; torch has a fused form only for Adam."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn


class FlatAdamax(torch.optim.Adamax):
    """`torch.optim.Adamax` with its moments in two long vectors; the entries of `state` are views of them.

    With many small parameters, most of a usual step is spent going from one to the next. If some parameters have no
    gradient, or had none before, or if devices or dtypes differ, it takes the usual step.
    """

    def __init__(
        self, parameters: Iterable[nn.Parameter], lr: float, betas: tuple[float, float], eps: float = 1e-8
    ) -> None:
        super().__init__(parameters, lr=lr, betas=betas, eps=eps, foreach=True)
        (group,) = self.param_groups
        self._parameters: list[Tensor] = group["params"]
        first = self._parameters[0]
        self._alike = all((p.dtype, p.device) == (first.dtype, first.device) for p in self._parameters)
        size = sum(p.numel() for p in self._parameters)
        self._average, self._largest, self._change = first.new_zeros(3, size).unbind()
        self._steps = torch.zeros(len(self._parameters))
        self._changes = self._parts(self._change)
        if self._alike:
            parts = zip(self._steps, self._parts(self._average), self._parts(self._largest), strict=True)
            for parameter, (step, average, largest) in zip(self._parameters, parts, strict=True):
                self.state[parameter] = {"step": step, "exp_avg": average, "exp_inf": largest}

    def _parts(self, vector: Tensor) -> list[Tensor]:
        pieces = vector.split([p.numel() for p in self._parameters])
        return [piece.view(p.shape) for piece, p in zip(pieces, self._parameters, strict=True)]

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> Any:
        gradients = [p.grad for p in self._parameters]
        together = self._alike and all(g is not None for g in gradients) and bool((self._steps == self._steps[0]).all())
        if closure is not None or not together:
            return super().step(closure)
        (group,) = self.param_groups
        (beta, decay), eps = group["betas"], group["eps"]
        gradient = torch.cat([g.flatten() for g in gradients if g is not None])
        self._steps += 1
        self._average.lerp_(gradient, 1 - beta)
        torch.maximum(self._largest.mul_(decay), gradient.abs_().add_(eps), out=self._largest)
        torch.div(self._average, self._largest, out=self._change)
        rate = group["lr"] / (1 - beta ** float(self._steps[0]))
        torch._foreach_add_(self._parameters, self._changes, alpha=-rate)
        return None
