"""Every layer, relative to a 1×1 convolution in the same run.

A new layer is one entry of `IMAGES`, `VECTORS` or `GRAPHS`; the benchmark does not begin while one is missing.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch import nn as torch_nn
from torch.nn.utils import parametrize

from expmflow import nn as N
from expmflow import transforms as T
from timing import medians, table

SHAPES = [(12, 16), (24, 8)]
FEATURES = 64
NODES, NODE_FEATURES = 16, 8
BATCH = 64
HIDDEN = 64
RANK = 24  # of the paper's row
MADE_OF_LAYERS = {"Amortized", "Chain", "Flipped", "Inverse", "Split"}

IMAGES: dict[str, Callable[[int, int], T.Transform]] = {  # from channels and size
    "Conv1x1": lambda c, n: T.Conv1x1(c),
    "Conv1x1, free": lambda c, n: T.Conv1x1(c, "free"),
    "Householder": lambda c, n: T.Householder(c),
    "ActNorm": lambda c, n: T.ActNorm(c),
    "Squeeze": lambda c, n: T.Squeeze(),
    "Flip": lambda c, n: T.Flip(),
    "Permute": lambda c, n: T.Permute(c),
    "ConvExp": lambda c, n: T.ConvExp(c),
    "ConvExp, skew": lambda c, n: T.ConvExp(c, skew=True),
    "Emerging": lambda c, n: T.Emerging(c),
    "Woodbury, points": lambda c, n: T.Woodbury(c, n, n, 0, RANK),
    "Woodbury, channels and points": lambda c, n: T.Woodbury(c, n, n, RANK, RANK),
    "PeriodicConv": lambda c, n: T.PeriodicConv(c),
    "AffineCoupling, DenseNet": lambda c, n: T.AffineCoupling(N.DenseNet(c // 2, c, growth=HIDDEN), c),
    "MixtureCoupling, DenseNet": lambda c, n: T.MixtureCoupling(
        N.DenseNet(c // 2, c // 2 * (3 * 4 + 2), growth=HIDDEN), c, components=4
    ),
    "MaskedAutoregressive": lambda c, n: T.MaskedAutoregressive(c, HIDDEN, dims=2),
    "InverseAutoregressive": lambda c, n: T.InverseAutoregressive(c, HIDDEN, dims=2),
    "ConvSylvester": lambda c, n: T.ConvSylvester(c, HIDDEN),
    "ConvSylvester, no basis": lambda c, n: T.ConvSylvester(c, HIDDEN, use_basis=False),
    "TriangularConvSylvester": lambda c, n: T.TriangularConvSylvester(c, HIDDEN // c),
    "ResidualBlock": lambda c, n: T.ResidualBlock(N.LipschitzConvNet(c, HIDDEN)),
    "GeneralizedSylvester, 1×1 basis": lambda c, n: T.GeneralizedSylvester(T.Conv1x1(c), N.ConvInner(c, HIDDEN)),
}

VECTORS: dict[str, Callable[[int], T.Transform]] = {  # from features
    "Conv1x1": lambda d: T.Conv1x1(d),
    "LinearExp": lambda d: T.LinearExp(d),
    "AffineCoupling, MLP": lambda d: T.AffineCoupling(N.MLP(d // 2, d, hidden=(HIDDEN, HIDDEN)), d),
    "MaskedAutoregressive": lambda d: T.MaskedAutoregressive(d, HIDDEN),
    "MaskedAutoregressive, spline": lambda d: T.MaskedAutoregressive(d, HIDDEN, transformer="spline"),
    "InverseAutoregressive": lambda d: T.InverseAutoregressive(d, HIDDEN),
    "Planar": lambda d: T.Planar(d),
    "Whiten": lambda d: T.Whiten(d),
    "OrthogonalSylvester": lambda d: T.OrthogonalSylvester(d, vectors=d // 4),
    "HouseholderSylvester": lambda d: T.HouseholderSylvester(d, reflections=8),
    "TriangularSylvester": lambda d: T.TriangularSylvester(d),
    "ResidualBlock": lambda d: T.ResidualBlock(N.LipschitzMLP(d, (HIDDEN, HIDDEN))),
    "DenseSylvester": lambda d: T.DenseSylvester(d, HIDDEN),
}

GRAPHS: dict[str, Callable[[int], T.Transform]] = {  # from features
    "Conv1x1": lambda f: T.Conv1x1(f, dim=-1),
    "GraphConvExp": lambda f: T.GraphConvExp(f),
    "AffineCoupling, GraphNetwork": lambda f: T.AffineCoupling(N.GraphNetwork(f // 2, f, hidden=HIDDEN), f, dim=-1),
    "GraphSylvester": lambda f: T.GraphSylvester(f, HIDDEN),
}


def trained_like(layer: T.Transform, x: Tensor) -> T.Transform:
    """Weights as after training: kernels at their coefficient, others such that activations keep their size."""
    constraints = (N.SpectralConstraint, N.PowerConstraint)
    parametrized = [module for module in layer.modules() if isinstance(module, parametrize.ParametrizationList)]
    limited = {id(weight.original) for weight in parametrized if any(isinstance(step, constraints) for step in weight)}
    with torch.no_grad():
        for parameter in layer.parameters():
            std = 0.5 / (1 if id(parameter) in limited else parameter[0].numel() ** 0.5) if parameter.ndim > 1 else 0.1
            parameter.copy_(torch.randn_like(parameter) * std)
        for _ in range(20):
            layer(x)
    return layer


def images(rounds: int) -> str:
    """Forward, forward and backward, inverse, in units of Conv1x1's."""
    check_complete()
    columns = {}
    for channels, size in SHAPES:
        shape = f"{channels}×{size}×{size}"
        made = {name: make(channels, size) for name, make in IMAGES.items()}
        columns[shape] = times(made, (channels, size, size), rounds)
    return relative(list(IMAGES), columns)


def vectors_and_graphs(rounds: int) -> str:
    """The same for layers on vectors and on complete graphs, each in units of Conv1x1 on them."""
    check_complete()
    tables = []
    for title, layers, event in (
        (f"{FEATURES} features", VECTORS, (FEATURES,)),
        (f"graphs of {NODES} nodes with {NODE_FEATURES} features", GRAPHS, (NODES, NODE_FEATURES)),
    ):
        made = {name: make(event[-1]) for name, make in layers.items()}
        tables.append(relative(list(layers), {title: times(made, event, rounds)}))
    return "\n\n".join(tables)


Times = Mapping[str, Mapping[str, float]]
"""By direction, by layer, milliseconds."""


def times(layers: Mapping[str, T.Transform], event: tuple[int, ...], rounds: int) -> Times:
    torch.manual_seed(0)
    x = torch.randn(BATCH, *event)
    made = {name: trained_like(layer, x) for name, layer in layers.items()}
    with torch.no_grad():
        outputs = {name: layer(x)[0] for name, layer in made.items()}
    frozen = {name: copy.deepcopy(layer).eval() for name, layer in made.items()}
    return {
        "forward": medians({name: no_grad(layer, x) for name, layer in frozen.items()}, rounds),
        "forward+backward": medians({name: backward(layer, x) for name, layer in made.items()}, rounds),
        "inverse": medians({name: no_grad(layer.inverse, outputs[name]) for name, layer in frozen.items()}, rounds),
    }


def relative(names: list[str], columns: Mapping[str, Times]) -> str:
    """A table of how many times as long as Conv1x1 each layer takes, with the milliseconds."""
    header, rows = ["layer"], [[name] for name in names]
    for title, found in columns.items():
        for direction, ms in found.items():
            header.append(f"{title}, {direction}")
            for row in rows:
                row.append(f"{ms[row[0]] / ms['Conv1x1']:.1f} ({ms[row[0]]:.1f} ms)")
    return table(header, rows)


def check_complete() -> None:
    """Raise unless every layer of the package is measured."""
    layers = [make(4, 4) for make in IMAGES.values()]
    layers += [make(4) for entries in (VECTORS, GRAPHS) for make in entries.values()]
    measured = {type(layer).__name__.removeprefix("Parametrized") for layer in layers}
    exported = {name for name in T.__all__ if isinstance(getattr(T, name), type)} - {"Transform"}
    missing = exported - MADE_OF_LAYERS - measured
    if missing:
        raise SystemExit(f"Expected an entry for every layer; got none for {', '.join(sorted(missing))}.")


def no_grad(run: Callable[[Tensor], tuple[Tensor, Tensor]], x: Tensor) -> Callable[[], None]:
    def once() -> None:
        with torch.no_grad():
            run(x)

    return once


def backward(layer: torch_nn.Module, x: Tensor) -> Callable[[], None]:
    """A training pass, gradients in input and parameters."""
    inputs = x.clone().requires_grad_()

    def once() -> None:
        z, logdet = layer(inputs)
        (z.square().mean() - logdet.mean()).backward()

    return once
