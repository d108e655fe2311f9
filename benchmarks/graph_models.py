"""A training step of a whole graph flow, against the same model in plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from expmflow.data.graphs import MIXTURES
from expmflow.distributions import Flow
from expmflow.models import graph_flow
from plain_graph import PlainGraphFlow, Subflow
from timing import medians, table

BATCH = 256
DATA = ("mog-4", "mog-9", "mog-16")


def training_step(rounds: int) -> str:
    """Forward, backward and optimizer, and that both compute the same."""
    rows = []
    for data in DATA:
        nodes = MIXTURES[data].nodes
        models = {"plain": PlainGraphFlow(2), "ours": graph_flow(nodes, 2, network="gnf")}
        ms = medians({name: step(model, data) for name, model in models.items()}, rounds)
        ratio, off = ms["ours"] / ms["plain"], difference(nodes)
        rows.append([f"{data}, *gnf*", *(f"{ms[name]:.1f}" for name in models), f"**{ratio:.2f}**", f"{off:.1e}"])
    return table(["data, model", "plain, ms", "ours, ms", "ratio", "same weights, off by"], rows)


def step(model: nn.Module, data: str) -> Callable[[], None]:
    """One step of training on one batch."""
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-4)
    x = MIXTURES[data].sample(BATCH, torch.Generator().manual_seed(0))

    def once() -> None:
        optimizer.zero_grad()
        (-model(x).mean()).backward()
        optimizer.step()

    return once


@torch.no_grad()
def difference(nodes: int) -> float:
    """The largest relative difference of log-likelihoods when the plain model has our weights, in float64."""
    torch.manual_seed(0)
    ours, plain = graph_flow(nodes, 2, network="gnf").double().eval(), PlainGraphFlow(2).double()
    for parameter in ours.parameters():  # the networks' outputs start at zero, where any two models agree
        parameter.add_(0.05 * torch.randn_like(parameter))
    copy_weights(ours, plain)
    x = torch.randn(BATCH, nodes, 2, dtype=torch.float64)
    a, b = ours(x), plain(x)
    return float(((a - b).abs() / b.abs()).max())


def copy_weights(ours: Flow, plain: PlainGraphFlow) -> None:
    """Ours splits the first edge layer into what a node receives and what it sends; the rest is the same."""
    layers = iter(ours.transform)  # type: ignore[call-overload]
    for subflow, (norm, mix, one, _, other) in zip(plain.subflows, zip(*[layers] * 5, strict=True), strict=True):
        assert isinstance(subflow, Subflow)
        subflow.shift.copy_(norm.shift)
        subflow.log_scale.copy_(norm.log_scale)
        subflow.weight.copy_(mix.matrix())
        for plain_net, net in zip(subflow.nets, (one.net, other.net), strict=True):
            edges, nodes = plain_net.edge_mlp, plain_net.node_mlp
            edges[0].weight.copy_(torch.cat([net.receive.weight, net.send.weight], dim=1))
            edges[0].bias.copy_(net.receive.bias)
            same = {edges[2]: net.edge, edges[4]: net.message, nodes[0]: net.node, nodes[2]: net.last}
            for copy, linear in same.items():
                copy.load_state_dict(linear.state_dict())
