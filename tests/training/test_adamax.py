"""Adamax in long vectors is torch's Adamax."""

from __future__ import annotations

import copy

import pytest
import torch
from safetensors.torch import load, save
from torch import nn

from expmflow.training.adamax import FlatAdamax
from expmflow.training.optimizer import load_optimizer_state, optimizer_state

BETAS = (0.9, 0.99)


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(16, 2))


def step(net: nn.Module, optimizer: torch.optim.Optimizer, seed: int, *, skipped: int = 0) -> None:
    """One step on a batch of its own; the last `skipped` parameters have no gradient."""
    x = torch.randn(5, 3, 4, 4, generator=torch.Generator().manual_seed(seed))
    optimizer.zero_grad()
    net(x).square().sum().backward()
    for parameter in list(net.parameters())[len(list(net.parameters())) - skipped :]:
        parameter.grad = None
    optimizer.step()


def pair() -> tuple[tuple[nn.Module, torch.optim.Optimizer], tuple[nn.Module, torch.optim.Optimizer]]:
    ours, theirs = model(), model()
    return (
        (ours, FlatAdamax(ours.parameters(), lr=1e-2, betas=BETAS)),
        (theirs, torch.optim.Adamax(theirs.parameters(), lr=1e-2, betas=BETAS)),
    )


def assert_alike(ours: nn.Module, theirs: nn.Module) -> None:
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("skipped", [0, 1])
def test_it_is_adamax(skipped):
    """Also when its learning rate is changed, and while some parameters get no gradient."""
    (ours, flat), (theirs, usual) = pair()
    for seed in range(6):
        for optimizer in (flat, usual):
            optimizer.param_groups[0]["lr"] = 1e-2 / (1 + seed)
            step(*((ours, flat) if optimizer is flat else (theirs, usual)), seed, skipped=skipped)
    assert_alike(ours, theirs)


def test_parameters_that_join_later_count_their_own_steps():
    (ours, flat), (theirs, usual) = pair()
    for seed in range(6):
        for net, optimizer in ((ours, flat), (theirs, usual)):
            step(net, optimizer, seed, skipped=2 if seed < 3 else 0)
    assert_alike(ours, theirs)


def test_its_state_goes_through_a_file():
    """Whoever goes on from it takes the same steps, to the last bit."""
    (ours, flat), _ = pair()
    for seed in range(3):
        step(ours, flat, seed)
    resumed = copy.deepcopy(ours)
    again = FlatAdamax(resumed.parameters(), lr=1e-2, betas=BETAS)
    load_optimizer_state(again, resumed, load(save(optimizer_state(flat, ours))))
    for seed in range(3, 6):
        step(ours, flat, seed)
        step(resumed, again, seed)
    for a, b in zip(ours.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(a, b)


def test_mixed_dtypes():
    net = nn.ParameterList([torch.ones(3), torch.ones(2, dtype=torch.float64)])
    optimizer = FlatAdamax(net.parameters(), lr=0.1, betas=BETAS)
    sum(p.sum().double() for p in net).backward()
    optimizer.step()
    for parameter in net:
        torch.testing.assert_close(parameter.detach(), torch.full_like(parameter, 0.9))
