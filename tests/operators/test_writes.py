"""What an operator knows of itself is known of its parameters as they are, by whatever route they were written to."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import expmflow as ef

BUILD: dict[str, tuple[Callable[[Tensor], ef.LinearOperator], tuple[int, ...], tuple[int, ...]]] = {
    "dense": (ef.DenseOperator, (3, 3), (3,)),
    "batched": (ef.DenseOperator, (2, 3, 3), (3,)),
    "conv": (ef.ConvOperator, (2, 2, 3), (2, 5)),
    "circular": (lambda k: ef.ConvOperator(k, padding="circular"), (2, 2, 3), (2, 2)),
    "graph": (lambda w: ef.GraphConvOperator(w, w, torch.ones(4, 4).to(w)), (2, 2), (4, 2)),
    "sparse graph": (lambda w: ef.GraphConvOperator(w, w, torch.ones(4, 4).to(w).to_sparse()), (2, 2), (4, 2)),
    "function": (
        lambda m: ef.FunctionOperator(
            lambda x: x @ m.T, (m,), norm_bound=lambda shape: torch.linalg.matrix_norm(m.double(), 2)
        ),
        (3, 3),
        (3,),
    ),
    "adjoint": (lambda m: ef.DenseOperator(m).adjoint(), (3, 3), (3,)),
    "sum": (lambda k: ef.ConvOperator(k) + ef.ConvOperator(k, padding="circular"), (2, 2, 3), (2, 5)),
}


def through_data(parameter: Tensor) -> None:
    parameter.data.mul_(30)


def through_numpy(parameter: Tensor) -> None:
    parameter.detach().numpy()[...] *= 30


def in_inference_mode(parameter: Tensor) -> None:
    with torch.inference_mode():
        parameter.mul_(30)


def check_seen(name: str, write: Callable[[Tensor], None], parameter: Tensor) -> None:
    """After a write, bounds and exponentials are those of an operator that never saw what was before."""
    build, _, event_shape = BUILD[name]
    op, x = build(parameter), torch.ones(2, *event_shape, dtype=parameter.dtype)
    before = ef.expm_apply(op, x), ef.expm_apply(op, x, -1.0), op.norm_bound(event_shape)
    write(parameter)
    fresh = build(parameter.clone())
    torch.testing.assert_close(op.norm_bound(event_shape), fresh.norm_bound(event_shape))
    assert op.norm_bound(event_shape) > 20 * before[2]
    for t, old in zip((1.0, -1.0), before, strict=False):
        after = ef.expm_apply(op, x, t)
        torch.testing.assert_close(after, ef.expm_apply(fresh, x, t), rtol=1e-9, atol=1e-9)
        assert not torch.allclose(after, old)


@pytest.mark.parametrize("write", [through_data, through_numpy, in_inference_mode])
@pytest.mark.parametrize("name", BUILD)
def test_writes_by_any_route_are_seen(name: str, write: Callable[[Tensor], None]) -> None:
    parameter = 0.02 * torch.randn(BUILD[name][1], generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    check_seen(name, write, parameter)


@pytest.mark.parametrize("name", BUILD)
def test_writes_to_inference_tensors_are_seen(name: str) -> None:
    with torch.inference_mode():
        parameter = 0.02 * torch.randn(BUILD[name][1], generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        assert parameter.is_inference()
        check_seen(name, lambda p: p.mul_(30), parameter)


def test_writes_to_what_learns_are_seen() -> None:
    parameter = (0.02 * torch.randn(3, 3, dtype=torch.float64)).requires_grad_()
    check_seen("dense", through_data, parameter)


def test_what_is_known_is_computed_once() -> None:
    calls = []

    def bound(shape: tuple[int, ...]) -> float:
        calls.append(shape)
        return 1.0

    matrix = torch.eye(2)
    op = ef.FunctionOperator(lambda x: x @ matrix, (matrix,), norm_bound=bound)
    for _ in range(3):
        ef.expm_apply(op, torch.ones(1, 2))
    assert len(calls) == 1
