"""What follows from a seed is drawn on the CPU, also where torch makes new tensors on a GPU unless told otherwise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

import expmflow as ef
from expmflow import transforms as T
from expmflow.training.randomness import Randomness
from expmflow.transforms.randomness import poisson, signs

EDGES = torch.tensor([[0, 1, 1, 2], [1, 0, 2, 1]])
DRAWS = (torch.rand, torch.randn, torch.randint, torch.randperm)


class DefaultGPU(TorchFunctionMode):
    """As after `torch.set_default_device("cuda")`, a generator of the CPU draws only tensors that name the CPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in DRAWS and kwargs.get("generator") is not None:
            assert kwargs.get("device") == "cpu", f"{func.__name__} on the default device"
        return func(*args, **kwargs)


def keyed_signs() -> None:
    layer = T.Flip()
    with T.keyed_draws(layer, "step 0", range(3)):
        signs(layer, torch.zeros(3, 2))


PLACES: dict[str, Callable[[], object]] = {
    "constraint": lambda: T.ConvExp(2),
    "power iteration": lambda: ef.power_iteration(ef.DenseOperator(torch.eye(2)), (2,)),
    "graph": lambda: ef.heat_kernel(EDGES, torch.ones(3), 1.0),
    "signs": keyed_signs,
    "latents": lambda: ef.models.vector_vae(2, latents=2).latents(torch.zeros(2, 2)),
    "noise": lambda: Randomness(0).noise("normal", (2,), "noise"),
    "order": lambda: Randomness(0).order(0, 3),
    "training": lambda: ef.train(ef.models.dense_flow(2, blocks=1, hidden=4), torch.eye(2).repeat(4, 1), steps=1),
}


@pytest.mark.parametrize("place", PLACES)
def test_draws_from_a_seed_name_the_cpu(place: str):
    with DefaultGPU():
        PLACES[place]()


def test_the_number_of_terms_is_known_to_the_cpu():
    with torch.device("meta"):
        assert poisson(T.Flip(), 2.0, 3, per_row=True).device.type == "cpu"
