"""What is alive between the forward and the backward pass.

Every storage that any operation allocates is followed by a weak reference, whoever holds it: Python, autograd's graph
or a custom function. So nothing is overlooked that a hook on saved tensors would not see.
"""

from __future__ import annotations

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import expmflow as ef
from operator_cases import CASES

GROWS = [name for name in CASES if any(p.requires_grad for p in CASES[name](torch.float64)[0].parameters)]
GROWS.remove("function-unused-parameter")


class Storages(TorchDispatchMode):
    """The storages that operations inside allocate; what they are given is not theirs."""

    def __init__(self) -> None:
        super().__init__()
        self._seen: dict[int, tuple[StorageWeakRef, int]] = {}

    def _remember(self, values: object, *, given: bool) -> None:
        for leaf in tree_leaves(values):
            if isinstance(leaf, torch.Tensor) and leaf.layout == torch.strided:
                storage = leaf.untyped_storage()
                self._seen.setdefault(storage._cdata, (StorageWeakRef(storage), 0 if given else storage.nbytes()))

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self._remember((args, kwargs), given=True)
        out = func(*args, **(kwargs or {}))
        self._remember(out, given=False)
        return out

    def live_bytes(self) -> int:
        return sum(size for ref, size in self._seen.values() if not ref.expired())


def live_bytes(name: str, terms: int | ef.SeriesPlan, gradient: str, t: float = 1.0) -> tuple[int, int]:
    """Bytes that live because of the exponential, and the bytes of x."""
    op, event = CASES[name](torch.float64)
    x = torch.randn(op.batch_size or 2, *event, dtype=torch.float64).requires_grad_()
    op(x)  # a function is checked at its first call
    with Storages() as storages:
        z = ef.expm_apply(op, x, t, terms=terms, gradient=gradient)
    assert z.requires_grad
    return storages.live_bytes(), x.nbytes


def parameter_bytes(name: str) -> int:
    return sum(p.nbytes for p in CASES[name](torch.float64)[0].parameters)


def folded_bytes(name: str) -> int:
    """What remains of folding a kernel on an image smaller than itself: the kernel, and the matrices that fold it."""
    op, event = CASES[name](torch.float64)
    kernels = [kernel for kernel in op.parameters if kernel.ndim > 2] if op.folded(event) is not op else []
    return sum(kernel.nbytes + 8 * sum(k * k for k in kernel.shape[2:]) for kernel in kernels)


@pytest.mark.parametrize("name", CASES)
def test_recompute_keeps_the_same_for_6_and_24_terms(name):
    few, size = live_bytes(name, 6, "recompute")
    many, _ = live_bytes(name, 24, "recompute")
    assert few == many
    assert few <= 2 * size + folded_bytes(name)  # the result, and x in the layout of the products


@pytest.mark.parametrize("name", CASES)
def test_recompute_keeps_the_same_for_many_steps(name):
    few, size = live_bytes(name, ef.SeriesPlan(1, 3, 0.0), "recompute", t=0.5)
    many, _ = live_bytes(name, ef.SeriesPlan(9, 5, 0.0), "recompute", t=0.5)
    assert few == many
    assert few <= 2 * size + parameter_bytes(name) + folded_bytes(name)  # and the scaled parameters


@pytest.mark.parametrize("name", GROWS)
def test_autograd_does_grow(name):
    """So the tests above can fail: every further term is kept."""
    few, size = live_bytes(name, 6, "autograd")
    many, _ = live_bytes(name, 24, "autograd")
    assert many - few >= 18 * size


def test_recompute_frees_everything_after_the_backward_pass():
    op, event = CASES["conv2d-3x3-zeros"](torch.float64)
    x = torch.randn(2, *event, dtype=torch.float64).requires_grad_()
    with Storages() as storages:
        ef.expm_apply(op, x, terms=12).sum().backward()
    assert storages.live_bytes() == x.nbytes + op.kernel.nbytes  # their gradients
