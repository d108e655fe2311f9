"""Densities of graphs whose rows contain their own edges and numbers of nodes."""

from __future__ import annotations

from typing import Any, final

import torch
from torch import Tensor

from expmflow._validation import expect
from expmflow.distributions.flow import Flow
from expmflow.distributions.protocol import Density, Draw, Noise, given_noise


@final
class StructuredFlow(Density):
    """p(features | graph) for rows `(N, F + N + 1)` of node features, adjacency, and which nodes are real.

    The graph is given, not modelled: the likelihood is that of the features, and samples take the graphs of training
    rows, chosen at random. Graphs with fewer than N nodes are padded with zeros; likelihoods work for any N.

    Args:
        flow: a density of node features `(N, F)`, whose context is a pair `(adjacency, mask)`.
        keep: how many of the training rows' graphs are stored for sampling.

    Example:
        >>> from expmflow.models import graph_flow
        >>> density = StructuredFlow(graph_flow(4, 2, hidden=8))
        >>> density.sample(3).shape
        torch.Size([3, 4, 7])
    """

    graphs: Tensor

    def __init__(self, flow: Flow, keep: int = 64) -> None:
        super().__init__()
        self.flow = flow
        nodes, self.features = flow.event_shape
        self.register_buffer("graphs", torch.zeros(keep, nodes, nodes + 1))
        self.graphs[..., -1] = 1  # before training, nodes without edges

    @property
    def event_shape(self) -> tuple[int, ...]:
        nodes, features = self.flow.event_shape
        return nodes, features + nodes + 1

    @property
    def sample_draws(self) -> tuple[Draw, ...]:
        return (Draw("uniform", ()), *self.flow.sample_draws)

    @torch.no_grad()
    def start_from(self, rows: Tensor) -> None:
        self.graphs.copy_(rows[torch.arange(len(self.graphs)) % len(rows)][..., self.features :])

    def forward(self, x: Tensor, context: Any = None, *, noise: Noise = None) -> Tensor:
        """log p of the features, given the graphs, `(batch,)`."""
        shape = tuple(x.shape[1:])
        fits = len(shape) == 2 and shape[1] == self.features + shape[0] + 1
        expect(fits, f"rows of features, adjacency and mask, (N, {self.features} + N + 1)", shape)
        expect(noise is None or len(noise) == 0, "no noise for the likelihood of a flow", "some")
        return self.flow.log_prob(x[..., : self.features], self._graph(x[..., self.features :]))

    @torch.no_grad()
    def sample(self, n: int, context: Any = None, *, temperature: float = 1.0, noise: Noise = None) -> Tensor:
        """Rows `(n, N, F + N + 1)`."""
        which, *normal = given_noise(self.sample_draws, noise, n, self.graphs)
        graphs = self.graphs[(which * len(self.graphs)).long().clamp_max(len(self.graphs) - 1)]
        adjacency, mask = self._graph(graphs)
        features = self.flow.sample(n, (adjacency, mask), temperature=temperature, noise=normal)
        return torch.cat([features * mask.unsqueeze(-1), graphs], dim=-1)

    @torch.no_grad()
    def round_trip_error(self, x: Tensor, context: Any = None) -> Tensor:
        features, graph = x[..., : self.features], self._graph(x[..., self.features :])
        return self.flow.round_trip_error(features, graph)

    def description(self) -> str:
        return f"{self.flow.description()}\nof the features of nodes, given their graph"

    def _graph(self, columns: Tensor) -> tuple[Tensor, Tensor]:
        return columns[..., :-1], columns[..., -1] > 0.5
