"""A training step of a whole image flow, against the same model in plain PyTorch."""

from __future__ import annotations

import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import nn

from expmflow import transforms as T
from expmflow.models.mixing import TRAINING_TOL
from expmflow.training.build import build_model
from expmflow.training.config import OptimConfig, load_config
from expmflow.training.memory import keep_freed_memory
from expmflow.training.optimizer import build_optimizer
from plain_image import ActNorm, Conv1x1, ConvExp, Coupling, PlainImageFlow, PlainSylvesterFlow, Sylvester, plain_model
from timing import table, times_apart, undisturbed

BATCH = 32
EVENT = (3, 32, 32)
MIXINGS: dict[str, tuple[str, float, float]] = {  # with norms and the error in training: terms follow
    "1x1": ("1x1", 0.0, 0.0),
    "convexp, norms 0.01": ("convexp", 0.01, TRAINING_TOL),
    "convexp, norms 0.9": ("convexp", 0.9, TRAINING_TOL),
    "convexp, norms 0.9, six terms": ("convexp", 0.9, 2e-4),
    "sylvester, norms 0.01": ("sylvester", 0.01, TRAINING_TOL),
    "sylvester, norms 0.9": ("sylvester", 0.9, TRAINING_TOL),
}
STILL = 1e-9  # a learning rate at which norms stay what they are
PROCESSES = 3


def training_step(rounds: int) -> str:
    """Of flows of couplings."""
    return against_plain(("1x1", "convexp"), 2 * rounds)


def sylvester_step(rounds: int) -> str:
    """Of flows of Sylvester layers: apart, so that either table is measured in minutes."""
    return against_plain(("sylvester",), rounds)


def against_plain(kinds: Sequence[str], rounds: int) -> str:
    """Forward, backward and optimizer: time, memory, and that both compute the same.

    A model that is trained has a process of its own, and so it has here: two in one would share what memory the process
    keeps. The plain model, for which norms make no difference, and all of ours that it is compared with take turns,
    step by step.
    """
    rows = []
    for kind in kinds:
        mixings = [mixing for mixing, (its, *_) in MIXINGS.items() if its == kind]
        arguments = {"plain": ("plain", mixings[0]), **{mixing: ("ours", mixing) for mixing in mixings}}
        found = [times_apart("image_models", "step", arguments, rounds) for _ in range(PROCESSES)]
        ms, middle = (
            {name: statistics.median(typical(times[name]) for times in found) for name in arguments}
            for typical in (undisturbed, statistics.median)
        )
        peaks = {name: peak(*its) for name, its in arguments.items()}
        for mixing in mixings:
            rows.append(
                [
                    mixing,
                    *(f"{ms[name]:.0f}" for name in ("plain", mixing)),
                    f"**{ms[mixing] / ms['plain']:.2f}**",
                    f"{middle[mixing] / middle['plain']:.2f}",
                    *(f"{peaks[name]:.0f}" for name in ("plain", mixing)),
                    f"**{peaks[mixing] / peaks['plain']:.2f}**",
                    f"{difference(mixing):.1e}",
                ]
            )
    header = ["mixing", "plain, ms", "ours, ms", "ratio", "of medians", "plain, MiB", "ours, MiB", "ratio"]
    return table([*header, "same weights, off by"], rows)


def ours(mixing: str) -> nn.Module:
    """The model of the presets cifar10-anchor-*."""
    kind, norm, tol = MIXINGS[mixing]
    config = load_config(f"cifar10-anchor-{kind}")
    model = build_model(config, EVENT)
    with torch.no_grad():
        for layer in _all(model, T.ConvExp):
            layer.training_tol = tol
            weight, constraint = layer.parametrizations.kernel.original, layer.parametrizations.kernel[-1]
            weight.mul_(norm / constraint.norm(weight))
    return model


def plain(mixing: str) -> nn.Module:
    return plain_model(MIXINGS[mixing][0])


MODELS: dict[str, Callable[[str], nn.Module]] = {"plain": plain, "ours": ours}


def step(name: str, mixing: str) -> Callable[[], None]:
    """One step of training on images of noise, each with the optimizer as one gets it, ours as `train` runs it."""
    if name == "ours":
        keep_freed_memory()
    model = MODELS[name](mixing)
    plain = torch.optim.Adamax(model.parameters(), lr=STILL)
    optimizer = plain if name == "plain" else build_optimizer(model, OptimConfig(optimizer="adamax", lr=STILL))
    x = torch.randint(256, (BATCH, *EVENT), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))

    def once() -> None:
        optimizer.zero_grad()
        (-model(x).mean()).backward()
        optimizer.step()

    return once


def difference(mixing: str) -> float:
    """The largest relative difference of log-likelihoods in evaluation, when the plain model has our weights."""
    torch.manual_seed(0)
    mine, copied = ours(mixing), plain(mixing)
    x, noise = torch.randint(256, (BATCH, *EVENT), dtype=torch.uint8), torch.rand(BATCH, *EVENT)
    with torch.no_grad():
        for parameter in mine.parameters():  # the networks' outputs start at zero, where any two models agree
            parameter.add_(0.05 * torch.randn_like(parameter))
        for _ in range(20):  # until the norm constraints have settled
            mine(x, noise=noise)
        for coupling, original in zip(_couplings(copied), _all(mine, T.AffineCoupling), strict=True):
            for copy, parameter in zip(coupling.parameters(), original.parameters(), strict=True):
                copy.copy_(parameter)
        for copy, original in zip(_all(copied, Conv1x1), _all(mine, T.Conv1x1), strict=True):
            copy.weight.copy_(original.matrix())
        for copy, original in zip(_all(copied, ConvExp), _all(mine, T.ConvExp), strict=True):
            copy.weight.copy_(original.kernel)
        copied(x, noise=noise)  # one power iteration, which finds no norm to reduce; the start of ActNorm
        for copy, original in zip(_all(copied, ActNorm), _all(mine, T.ActNorm), strict=True):
            for name in ("shift", "log_scale"):
                getattr(copy, name).copy_(getattr(original, name)[:, None, None])
        for copy, original in zip(_all(copied, Sylvester), _all(mine, T.ConvSylvester), strict=True):
            copy.vectors.copy_(original.basis.layers[0].vectors)
            for name in ("first", "middle", "last"):
                getattr(copy, name).weight.copy_(getattr(original.inner, name).weight)
                getattr(copy, name).bias.copy_(getattr(original.inner, name).bias)
        if isinstance(copied, PlainSylvesterFlow):
            copied.mean.copy_(mine.flow.base.mean)
            copied.log_std.copy_(mine.flow.base.log_std)
        a, b = mine.eval()(x, noise=noise), copied.eval()(x, noise=noise)
    return float(((a - b).abs() / b.abs()).max())


def _couplings(model: nn.Module) -> list[nn.Module]:
    """In the order of ours, where what leaves a level comes behind the levels below."""
    if not isinstance(model, PlainImageFlow):
        return _all(model, Coupling)
    first, second = model.levels
    return [*_all(first.layers, Coupling), *_all(second, Coupling), first.prior]


def _all(model: nn.Module, kind: type[nn.Module]) -> list[nn.Module]:
    return [module for module in model.modules() if isinstance(module, kind)]


def peak(name: str, mixing: str) -> float:
    """What the peak of a process's memory grows by in three steps, in MiB."""
    done = subprocess.run([sys.executable, __file__, name, mixing], capture_output=True, text=True, check=True)
    return float(done.stdout)


def _peak() -> float:
    """Of this program alone: `ru_maxrss` would begin with the peak of the one that started it."""
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM")) / 1024


if __name__ == "__main__":  # a process of its own for `peak`
    _, name, mixing = sys.argv
    once, before = step(name, mixing), _peak()
    for _ in range(3):
        once()
    print(_peak() - before)
