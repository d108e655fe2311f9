"""Power iteration: an estimate of an operator's 2-norm from below."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, overload

import torch
from torch import Tensor

from expmflow._transformed import batched
from expmflow._validation import expect, expect_count
from expmflow.operators import LinearOperator


@overload
def power_iteration(
    op: LinearOperator,
    event_shape: Sequence[int],
    *,
    iterations: int = ...,
    start: Tensor | None = ...,
    return_vector: Literal[False] = ...,
) -> Tensor: ...


@overload
def power_iteration(
    op: LinearOperator,
    event_shape: Sequence[int],
    *,
    iterations: int = ...,
    start: Tensor | None = ...,
    return_vector: Literal[True],
) -> tuple[Tensor, Tensor]: ...


def power_iteration(
    op: LinearOperator,
    event_shape: Sequence[int],
    *,
    iterations: int = 50,
    start: Tensor | None = None,
    return_vector: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """σ = ‖A v‖ after `iterations` rounds of v ← Aᵀ A v / ‖Aᵀ A v‖: never above ‖A‖, and increasing towards it.

    As an estimate from below it may constrain a kernel in training, as in the paper, but it certifies nothing; use
    `op.norm_bound` for that.

    Args:
        op: the operator.
        event_shape: the shape of one event, without the batch.
        iterations: the number of rounds, two products each.
        start: `(batch, *event)`, the initial vector: with that of an earlier call, one round is enough. Random (with a
            fixed seed) if None.
        return_vector: return `(sigma, vector)`.

    Returns:
        A scalar with a gradient in the operator's parameters (none flows through the vector).

    Example:
        >>> power_iteration(ef.DenseOperator(torch.diag(torch.tensor([3.0, 1.0]))), (2,))
        tensor(3.)
    """
    expect_count(iterations, "iterations", at_least=0)
    shape = (op.batch_size or 1, *event_shape)
    if start is None:
        expect(not batched(*op.parameters), "a start, inside torch.vmap, which draws no numbers", "none")
        like = op.parameters[0] if op.parameters else torch.empty(0)
        generator = torch.Generator().manual_seed(0)
        start = torch.randn(shape, generator=generator, dtype=like.dtype, device="cpu").to(like.device)
    expect(tuple(start.shape) == shape, f"a start of shape {shape}", tuple(start.shape))
    op.check_input(start)
    with torch.no_grad():
        v = _normalise(start)
        for _ in range(iterations):
            v = _normalise(op.apply_adjoint(op.apply(v)))
    sigma = torch.linalg.vector_norm(op.apply(v))
    return (sigma, v) if return_vector else sigma


def _normalise(v: Tensor) -> Tensor:
    return v / torch.linalg.vector_norm(v).clamp_min(torch.finfo(v.dtype).tiny)
