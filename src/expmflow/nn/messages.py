"""The sum over neighbours inside graph networks, in blocks that stay in the processor's cache."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from expmflow.nn.fused import must_record, recorded_vjp, transformed

PAIRS = 4096  # pairs of nodes whose hidden features are alive at a time


def sum_messages(adjacency: Tensor, receive: Tensor, send: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Σ_j A_ij relu(W relu(r_i + s_j) + b), `(batch, N, hidden)`.

    There are N² pairs, and hidden features of each: they are made and used up block by block, and made again in the
    backward pass, so that memory grows with N only, and time is not spent on moving them to and from it.

    Args:
        adjacency: `(N, N)` or `(batch, N, N)`.
        receive, send: `(batch, N, hidden)`.
        weight, bias: of the layer between the pairs' two activations.
    """
    if _plain(adjacency, receive, send, weight, bias):
        return _formula(adjacency, receive, send, weight, bias)
    return _SumMessages.apply(adjacency, receive, send, weight, bias)


def _formula(adjacency: Tensor, receive: Tensor, send: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """All pairs at once, by operations that autograd knows."""
    pairs = F.relu(F.linear(F.relu(receive.unsqueeze(2) + send.unsqueeze(1)), weight, bias))
    return (adjacency.unsqueeze(-2) @ pairs).squeeze(-2)


def _plain(adjacency: Tensor, *tensors: Tensor) -> bool:
    """Whether autograd has to see every operation."""
    return adjacency.requires_grad or must_record(adjacency, *tensors)


class _SumMessages(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, adjacency: Tensor, receive: Tensor, send: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(adjacency, receive, send, weight, bias)
        summed = torch.empty_like(receive)
        for place, first, second in _blocks(receive, 2):
            _hidden(receive[place], send[place], weight, bias, first, second)
            torch.sum(second.mul_(_rows(adjacency, place).unsqueeze(-1)), 2, out=summed[place])
        return summed

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled() or transformed(grad):
            return recorded_vjp(_formula, ctx.saved_tensors, ctx.needs_input_grad, grad)
        adjacency, receive, send, weight, bias = ctx.saved_tensors
        to_weight, to_bias = torch.zeros_like(weight), torch.zeros_like(bias)
        to_receive, to_send = torch.empty_like(receive), torch.empty_like(send)
        for place, first, second, back in _blocks(receive, 3):
            _hidden(receive[place], send[place], weight, bias, first, second)
            torch.mul(_rows(adjacency, place).unsqueeze(-1), grad[place].unsqueeze(2), out=back)
            flat = _through_relu(back, second).flatten(0, 2)
            to_weight.addmm_(flat.T, first.flatten(0, 2))
            to_bias += flat.sum(0)
            torch.mm(flat, weight, out=second.flatten(0, 2))
            _through_relu(second, first)
            torch.sum(second, 2, out=to_receive[place])
            torch.sum(second, 1, out=to_send[place])
        return None, to_receive, to_send, to_weight, to_bias


def _blocks(x: Tensor, buffers: int) -> Iterator[tuple[Any, ...]]:
    """A few graphs at a time: where they are, and as many buffers `(graphs, N, N, hidden)`, the same for all blocks."""
    rows, nodes, hidden = x.shape
    size = max(1, PAIRS // max(1, nodes * nodes))
    space = [x.new_empty(min(size, rows), nodes, nodes, hidden) for _ in range(buffers)]
    for start in range(0, rows, size):
        count = min(size, rows - start)
        yield (slice(start, start + count), *(buffer[:count] for buffer in space))


def _rows(adjacency: Tensor, place: slice) -> Tensor:
    return adjacency if adjacency.ndim == 2 else adjacency[place]


def _hidden(receive: Tensor, send: Tensor, weight: Tensor, bias: Tensor, first: Tensor, second: Tensor) -> None:
    """Fill `first` and `second` with the two layers of hidden features."""
    torch.add(receive.unsqueeze(2), send.unsqueeze(1), out=first).relu_()
    torch.addmm(bias, first.flatten(0, 2), weight.T, out=second.flatten(0, 2))
    second.relu_()


def _through_relu(grad: Tensor, out: Tensor) -> Tensor:
    """The gradient before an activation whose result is `out`; in place."""
    return torch.ops.aten.threshold_backward.grad_input(grad, out, 0, grad_input=grad)
