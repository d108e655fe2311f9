"""The multi-layer perceptron inside couplings of vectors."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor, nn

from expmflow.nn.activations import activation_named
from expmflow.nn.context import check_context


class MLP(nn.Module):
    """A multi-layer perceptron over the last axis of `(batch, …, features)`, with an output that starts at zero.

    Args:
        in_features, out_features: of the input and output.
        hidden: the widths of the hidden layers.
        activation: `"relu"`, `"leaky_relu"` or `"elu"`.
        context_features: features of a context `(batch, features)`, appended to the input everywhere; 0 for none.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        hidden: tuple[int, ...] = (64, 64),
        activation: str = "relu",
        context_features: int = 0,
    ) -> None:
        super().__init__()
        self.activation = activation_named(activation)
        self.context_channels = context_features
        widths = [in_features + context_features, *hidden, out_features]
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in itertools.pairwise(widths))
        nn.init.zeros_(self.layers[-1].weight)  # type: ignore[arg-type]
        nn.init.zeros_(self.layers[-1].bias)  # type: ignore[arg-type]

    def forward(self, x: Tensor, context: Any = None) -> Tensor:
        if self.context_channels:
            context = context.reshape(x.shape[0], *(1,) * (x.ndim - 2), self.context_channels)
            x = torch.cat([x, context.expand(*x.shape[:-1], self.context_channels)], dim=-1)
        for layer in self.layers[:-1]:
            x = self.activation(layer(x))
        return self.layers[-1](x)

    def check_context(self, context: Any, x: Tensor) -> None:
        """Raise `ValueError` unless `context` fits `x`."""
        vectors = x[:, :1].flatten(1)  # a context is one vector for each row, however many points the row has
        check_context(context, vectors, self.context_channels)
