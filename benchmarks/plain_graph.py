"""A graph flow as one writes it at first, in plain PyTorch: what the package's own is measured against."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class GraphNetwork(nn.Module):
    """An edge MLP on every pair of nodes, its messages summed over the neighbours, and a node MLP."""

    def __init__(self, in_features: int, out_features: int, hidden: int) -> None:
        super().__init__()
        self.edge_mlp = nn.Sequential(
            nn.Linear(2 * in_features, hidden),
            nn.ReLU(),
            nn.Linear(hidden, hidden),
            nn.ReLU(),
            nn.Linear(hidden, hidden),
        )
        self.node_mlp = nn.Sequential(
            nn.Linear(in_features + hidden, hidden),
            nn.ReLU(),
            nn.Linear(hidden, out_features),
        )
        nn.init.zeros_(self.node_mlp[-1].weight)
        nn.init.zeros_(self.node_mlp[-1].bias)

    def forward(self, x: Tensor, adjacency: Tensor) -> Tensor:
        nodes = x.shape[1]
        receivers = x.unsqueeze(2).expand(-1, -1, nodes, -1)
        senders = x.unsqueeze(1).expand(-1, nodes, -1, -1)
        messages = self.edge_mlp(torch.cat([receivers, senders], dim=-1))
        received = (messages * adjacency.unsqueeze(-1)).sum(dim=2)
        return self.node_mlp(torch.cat([x, received], dim=-1))


class Subflow(nn.Module):
    """ActNorm, 1×1, and affine couplings by which the two halves of the features move each other."""

    def __init__(self, features: int, hidden: int) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(features))
        self.log_scale = nn.Parameter(torch.zeros(features))
        self.weight = nn.Parameter(torch.linalg.qr(torch.randn(features, features))[0])
        self.kept = features // 2
        self.nets = nn.ModuleList(GraphNetwork(self.kept, 2 * (features - self.kept), hidden) for _ in range(2))

    def forward(self, x: Tensor, adjacency: Tensor) -> tuple[Tensor, Tensor]:
        nodes = x.shape[1]
        x = F.linear((x - self.shift) * torch.exp(self.log_scale), self.weight)
        logdet = nodes * (self.log_scale.sum() + torch.linalg.slogdet(self.weight)[1])
        x, first = self.couple(x, self.nets[0], adjacency)
        x = torch.cat([x[..., self.kept :], x[..., : self.kept]], dim=-1)
        x, second = self.couple(x, self.nets[1], adjacency)
        return x, logdet + first + second

    def couple(self, x: Tensor, net: nn.Module, adjacency: Tensor) -> tuple[Tensor, Tensor]:
        x1, x2 = x[..., : self.kept], x[..., self.kept :]
        s, t = net(x1, adjacency).chunk(2, dim=-1)
        log_scale = 2 * torch.tanh(s / 2)
        return torch.cat([x1, x2 * torch.exp(log_scale) + t], dim=-1), log_scale.sum(dim=(1, 2))


class PlainGraphFlow(nn.Module):
    """log p of the node features `(batch, N, features)` of complete graphs: `(batch,)`."""

    def __init__(self, features: int, subflows: int = 3, hidden: int = 64) -> None:
        super().__init__()
        self.subflows = nn.ModuleList(Subflow(features, hidden) for _ in range(subflows))

    def forward(self, x: Tensor) -> Tensor:
        adjacency = 1 - torch.eye(x.shape[1], dtype=x.dtype)
        total = x.new_zeros(x.shape[0])
        for subflow in self.subflows:
            x, logdet = subflow(x, adjacency)
            total = total + logdet
        return total + (-0.5 * (x**2 + math.log(2 * math.pi))).sum(dim=(1, 2))
