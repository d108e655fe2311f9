"""The sum over neighbours inside graph networks, in blocks that fit the processor's cache."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from expmflow._transformed import transformed
from expmflow.nn.fused import must_record, recorded_vjp

PAIRS = 4096  # pairs of nodes whose hidden features are in memory at a time
KEPT = 2**23  # bytes, the most for storing which features of the pairs are active


def sum_messages(adjacency: Tensor, receive: Tensor, send: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Σ_j A_ij relu(W relu(r_i + s_j) + b), `(batch, N, hidden)`.

    There are N² pairs with hidden features each. They are computed and used block by block, and recomputed in the
    backward pass, so memory grows only with N, and no time is spent moving them to and from memory. If there are few
    pairs, one byte per feature stores whether the second layer is active, which is all that the backward pass needs.

    Args:
        adjacency: `(N, N)` or `(batch, N, N)`.
        receive, send: `(batch, N, hidden)`.
        weight, bias: of the layer between the pairs' two activations.
    """
    if _plain(adjacency, receive, send, weight, bias):
        return _formula(adjacency, receive, send, weight, bias)
    return _SumMessages.apply(adjacency, receive, send, weight, bias)


def _formula(adjacency: Tensor, receive: Tensor, send: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """All pairs at once, in operations that autograd knows."""
    pairs = F.relu(F.linear(F.relu(receive.unsqueeze(2) + send.unsqueeze(1)), weight, bias))
    return (adjacency.unsqueeze(-2) @ pairs).squeeze(-2)


def _plain(adjacency: Tensor, *tensors: Tensor) -> bool:
    """Whether autograd has to see every operation."""
    return adjacency.requires_grad or must_record(adjacency, *tensors)


class _SumMessages(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, adjacency: Tensor, receive: Tensor, send: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        rows, nodes, hidden = receive.shape
        few = any(ctx.needs_input_grad) and rows * nodes**2 * hidden <= KEPT
        active = receive.new_empty(rows, nodes, nodes, hidden, dtype=torch.bool) if few else None
        ctx.save_for_backward(adjacency, receive, send, weight, bias, active)
        summed = torch.empty_like(receive)
        for place, first, second in _blocks(receive, 2):
            _first(receive[place], send[place], first)
            _second(first, weight, bias, second)
            if active is not None:
                active[place].copy_(second)
            torch.sum(second.mul_(_rows(adjacency, place).unsqueeze(-1)), 2, out=summed[place])
        return summed

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled() or transformed(grad):
            return recorded_vjp(_formula, ctx.saved_tensors[:-1], ctx.needs_input_grad, grad)
        adjacency, receive, send, weight, bias, active = ctx.saved_tensors
        to_weight, to_bias = torch.zeros_like(weight), torch.zeros_like(bias)
        to_receive, to_send = torch.empty_like(receive), torch.empty_like(send)
        for place, first, second, back in _blocks(receive, 3):
            _first(receive[place], send[place], first)
            if active is None:
                _second(first, weight, bias, second)
            else:
                second.copy_(active[place].view(torch.uint8))  # bytes are read several times as fast as booleans
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
    """A few graphs at a time: their indices, and buffers `(graphs, N, N, hidden)`, reused by all blocks."""
    rows, nodes, hidden = x.shape
    size = max(1, PAIRS // max(1, nodes * nodes))
    space = [x.new_empty(min(size, rows), nodes, nodes, hidden) for _ in range(buffers)]
    for start in range(0, rows, size):
        count = min(size, rows - start)
        yield (slice(start, start + count), *(buffer[:count] for buffer in space))


def _rows(adjacency: Tensor, place: slice) -> Tensor:
    return adjacency if adjacency.ndim == 2 else adjacency[place]


def _first(receive: Tensor, send: Tensor, out: Tensor) -> None:
    """The first layer of the pairs' features."""
    torch.add(receive.unsqueeze(2), send.unsqueeze(1), out=out).relu_()


def _second(first: Tensor, weight: Tensor, bias: Tensor, out: Tensor) -> None:
    """The second layer of the pairs' features."""
    torch.addmm(bias, first.flatten(0, 2), weight.T, out=out.flatten(0, 2))
    out.relu_()


def _through_relu(grad: Tensor, out: Tensor) -> Tensor:
    """The gradient before an activation whose result is `out`; in place."""
    return torch.ops.aten.threshold_backward.grad_input(grad, out, 0, grad_input=grad)
