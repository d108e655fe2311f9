"""The registry's flows on vectors: autoregressive, planar, and the original Sylvester flows, amortised or not."""

from __future__ import annotations

import torch

from expmflow import transforms as T
from transform_registry import BATCH, F64, Case, Cases, draw

CASES = Cases()

# --- autoregressive ---------------------------------------------------------------------------------------------------

KINDS = {"maf": T.MaskedAutoregressive, "iaf": T.InverseAutoregressive}

for kind, make in KINDS.items():
    CASES.add(kind)(lambda make=make: Case(make(4, 8), (4,), wrong_event=(3,)))
    CASES.add(f"{kind}-one-hidden-layer")(lambda make=make: Case(make(5, [7]), (5,), wrong_event=(5, 1)))
    CASES.add(f"{kind}-one-feature")(
        lambda make=make: Case(
            make(1, 4),
            (1,),
            wrong_event=(2,),
            idle=("net.layers.0.parametrizations.weight.original",),  # x₀ sees none
        )
    )
    CASES.add(f"{kind}-context")(
        lambda make=make, kind=kind: Case(
            make(4, 8, context_features=2),
            (4,),
            context=draw(f"{kind}-context", BATCH, 2),
            wrong_event=(5,),
            wrong_contexts=[None, "a word", torch.zeros(BATCH, 4), torch.zeros(2, 2)],
        )
    )
    CASES.add(f"{kind}-images")(lambda make=make: Case(make(2, 4, dims=2), (2, 3, 2), wrong_event=(3, 3, 2)))
    CASES.add(f"{kind}-sequences")(lambda make=make: Case(make(2, 4, dims=1), (2, 4), wrong_event=(2,)))
    CASES.add(f"{kind}-images-context")(
        lambda make=make, kind=kind: Case(
            make(1, 3, dims=2, context_features=2),
            (1, 2, 4),
            context=draw(f"{kind}-images-context", BATCH, 2, 2, 4),
            wrong_event=(2, 2, 4),
            wrong_contexts=[None, torch.zeros(BATCH, 4, 2, 4), torch.zeros(2, 2, 2, 4), torch.zeros(BATCH, 2, 2, 2)],
        )
    )
    CASES.add(f"{kind}-images-context-vector")(
        lambda make=make, kind=kind: Case(
            make(2, 4, dims=2, context_features=5),
            (2, 2, 2),
            context=draw(f"{kind}-images-context-vector", BATCH, 5),
            wrong_event=(2, 2),
            wrong_contexts=[None, torch.zeros(BATCH, 4), torch.zeros(2, 5)],
        )
    )


@CASES.add("maf-relu")
def _():
    return Case(T.MaskedAutoregressive(4, 8, activation="relu"), (4,), wrong_event=(3,))


@CASES.add("maf-mixture")
def _():
    return Case(T.MaskedAutoregressive(4, 6, transformer="mixture", components=4), (4,), wrong_event=(3,))


@CASES.add("maf-mixture-images-context")
def _():
    layer = T.MaskedAutoregressive(2, 4, transformer="mixture", components=2, dims=2, context_features=2)
    return Case(
        layer,
        (2, 2, 2),
        context=draw("maf-mixture-images-context", BATCH, 2),
        wrong_event=(3, 2, 2),
        wrong_contexts=[None, torch.zeros(BATCH, 4)],
    )


@CASES.add("maf-spline")
def _():
    return Case(T.MaskedAutoregressive(4, 6, transformer="spline", components=4), (4,), wrong_event=(3,))


@CASES.add("maf-spline-images")
def _():
    layer = T.MaskedAutoregressive(2, 4, transformer="spline", components=2, dims=2)
    return Case(layer, (2, 2, 2), wrong_event=(3, 2, 2))


# --- with parameters of their own, or of each sample ------------------------------------------------------------------

AMORTIZABLE = {
    "planar": lambda **more: T.Planar(4, **more),
    "planar-one-feature": lambda **more: T.Planar(1, **more),
    "orthogonal-sylvester": lambda **more: T.OrthogonalSylvester(5, 2, **more),
    "orthogonal-sylvester-all-vectors": lambda **more: T.OrthogonalSylvester(4, 4, **more),
    "orthogonal-sylvester-one-vector": lambda **more: T.OrthogonalSylvester(4, 1, **more),
    "householder-sylvester": lambda **more: T.HouseholderSylvester(4, 2, **more),
    "householder-sylvester-many-reflections": lambda **more: T.HouseholderSylvester(2, 5, **more),
    "triangular-sylvester": lambda **more: T.TriangularSylvester(4, **more),
    "triangular-sylvester-reverse": lambda **more: T.TriangularSylvester(5, reverse=True, **more),
}
IDLE = {  # in one dimension w/‖w‖² cancels u; D has a diagonal only
    "planar-one-feature": (),
    "orthogonal-sylvester-one-vector": ("matrix",),
}
AMORTIZED: list[str] = []  # their layers have no parameters

for name, make in AMORTIZABLE.items():
    CASES.add(name)(
        lambda make=make, name=name: Case(
            make(), (make().features,), wrong_event=(make().features + 1,), idle=IDLE.get(name, ())
        )
    )
    AMORTIZED.append(f"{name}-amortised")

    @CASES.add(AMORTIZED[-1])
    def _(make=make, name=name):
        layer = make(amortized=True)
        count = layer.params_per_sample
        return Case(
            layer,
            (layer.features,),
            context=draw(f"{name}-amortised", BATCH, count),
            wrong_event=(layer.features + 1,),
            wrong_contexts=[
                None,
                "a word",
                torch.zeros(BATCH, count + 1, dtype=F64),
                torch.zeros(BATCH + 1, count, dtype=F64),
                torch.zeros(BATCH, count, 1, dtype=F64),
            ],
        )


# --- one context for several layers -----------------------------------------------------------------------------------


@CASES.add("amortized-posterior")
def _():
    """As a VAE's: amortised layers, layers of their own, and layers that share a context."""
    layer = T.Amortized(
        [
            T.Planar(4, amortized=True),
            T.Chain(
                [
                    T.HouseholderSylvester(4, 2, amortized=True),
                    T.Flip(),
                    T.MaskedAutoregressive(4, 6, context_features=2),
                ]
            ),
            T.Inverse(T.Chain([T.Conv1x1(4), T.TriangularSylvester(4, amortized=True)])),
            T.OrthogonalSylvester(4, 2),
        ],
        context_features=2,
    )
    count = layer.params_per_sample
    return Case(
        layer,
        (4,),
        context=draw("amortized-posterior", BATCH, count),
        wrong_event=(5,),
        wrong_contexts=[None, torch.zeros(BATCH, count - 1, dtype=F64), torch.zeros(2, count, dtype=F64)],
        culprit="Amortized|Planar|OrthogonalSylvester",
    )


@CASES.add("amortized-images")
def _():
    layer = T.Amortized(
        [
            T.InverseAutoregressive(2, 4, dims=2, context_features=2),
            T.Flip(),
            T.ConvSylvester(2, 4, context_channels=2),
            T.Flipped(T.Chain([T.Conv1x1(2), T.InverseAutoregressive(2, 4, dims=2, context_features=2)])),
        ],
        context_features=2,
    )
    return Case(
        layer,
        (2, 2, 4),
        context=draw("amortized-images", BATCH, 2, 2, 4),
        wrong_event=(4, 2, 4),
        wrong_contexts=[None, torch.zeros(BATCH, 4, 2, 4, dtype=F64), torch.zeros(BATCH, 2, 4, 2, dtype=F64)],
        culprit="Amortized|InverseAutoregressive|ConvSylvester",
    )


@CASES.add("flipped-vectors")
def _():
    return Case(
        T.Flipped(T.MaskedAutoregressive(4, 6, context_features=2)),
        (4,),
        context=draw("flipped-vectors", BATCH, 2),
        wrong_event=(5,),
        wrong_contexts=[None, torch.zeros(BATCH, 3, dtype=F64)],
        culprit="MaskedAutoregressive",
    )


@CASES.add("flipped-images")
def _():
    return Case(
        T.Flipped(T.ConvSylvester(2, 4, context_channels=2)),
        (2, 2, 3),
        context=draw("flipped-images", BATCH, 2, 2, 3),
        wrong_event=(3, 2, 3),
        wrong_contexts=[None, torch.zeros(BATCH, 2, 3, 2, dtype=F64)],
        culprit="ConvSylvester",
    )


@CASES.add("amortized-without-context")
def _():
    return Case(T.Amortized(T.Chain([T.Planar(4), T.Flip()])), (4,), wrong_event=(3,), culprit="Planar")
