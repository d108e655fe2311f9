"""The registry's exponential layers, and the graphs that layers are tried on."""

from __future__ import annotations

import torch

from expmflow import transforms as T
from transform_registry import BATCH, F64, Case, Cases, draw

CASES = Cases()

# --- vectors ----------------------------------------------------------------------------------------------------------

LINEAR = {
    "linear-exp": {},
    "linear-exp-skew": {"skew": True},
    "linear-exp-terms": {"terms": 24},
    "linear-exp-tol": {"tol": 1e-13},
    "linear-exp-recompute": {"gradient": "recompute"},
    "linear-exp-large": {"coeff": 4.0},
}

for name, options in LINEAR.items():
    CASES.add(name)(lambda o=options: Case(T.LinearExp(5, **o), (5,), wrong_event=(4,)))

# --- images -----------------------------------------------------------------------------------------------------------

CONV = {
    "conv-exp": ((2, 4, 3), {}),
    "conv-exp-1d": ((2, 5), {"dims": 1}),
    "conv-exp-3d": ((2, 2, 3, 2), {"dims": 3}),
    "conv-exp-5x3": ((1, 4, 4), {"kernel_size": (5, 3)}),
    "conv-exp-1x1": ((3, 2, 2), {"kernel_size": 1}),
    "conv-exp-circular": ((2, 3, 4), {"padding": "circular"}),
    "conv-exp-reflect": ((2, 4, 3), {"padding": "reflect"}),
    "conv-exp-1d-reflect": ((2, 5), {"dims": 1, "padding": "reflect"}),
    "conv-exp-dilation": ((1, 5, 4), {"dilation": 2}),
    "conv-exp-groups": ((4, 3, 2), {"groups": 2}),
    "conv-exp-depthwise-circular": ((2, 4, 3), {"groups": 2, "padding": "circular"}),
    "conv-exp-skew": ((2, 3, 3), {"skew": True}),
    "conv-exp-skew-circular-groups": ((4, 3, 2), {"skew": True, "padding": "circular", "groups": 2}),
    "conv-exp-power": ((2, 4, 3), {"norm": "power"}),
    "conv-exp-power-reflect": ((2, 3, 4), {"norm": "power", "padding": "reflect"}),
    "conv-exp-power-skew": ((2, 3, 3), {"norm": "power", "skew": True}),
    "conv-exp-terms": ((2, 3, 3), {"terms": 24}),
    "conv-exp-recompute": ((2, 4, 3), {"gradient": "recompute"}),
    "conv-exp-large": ((1, 4, 4), {"coeff": 4.0, "gradient": "recompute"}),
}

for name, (event, options) in CONV.items():
    CASES.add(name)(lambda e=event, o=options: Case(T.ConvExp(e[0], **o), e, wrong_event=(e[0] + 1, *e[1:])))

# --- graphs -----------------------------------------------------------------------------------------------------------

PATH = torch.diag(torch.ones(3, dtype=F64), 1)
PATH = PATH + PATH.T
TRIANGLES = (torch.ones(4, 4, dtype=F64) - torch.eye(4, dtype=F64)).repeat(BATCH, 1, 1)
TRIANGLES[1, 0, 3] = TRIANGLES[1, 3, 0] = 0
TRIANGLES[2] = PATH
MASK = torch.tensor([[True, True, True, False], [True, True, True, True], [True, True, False, False]])
WEIGHTED = draw("weighted", BATCH, 4, 4).abs()
WEIGHTED = WEIGHTED + WEIGHTED.mT
DIRECTED = (draw("directed", 4, 4) > 0).to(F64)
NOT_A_GRAPH = [
    "a word",
    torch.zeros(5, 5, dtype=F64),
    torch.zeros(2, 4, 4, dtype=F64),
    -PATH,
    PATH * torch.nan,
    (PATH, MASK[:2]),
    (PATH, MASK[:, :2]),
    (PATH, MASK, MASK),
]

GRAPH = {
    "graph-exp": (PATH, {}),
    "graph-exp-batched": (TRIANGLES, {}),
    "graph-exp-masked": ((TRIANGLES, MASK), {}),
    "graph-exp-masked-shared": ((PATH, MASK), {}),
    "graph-exp-weighted": (WEIGHTED, {"gradient": "recompute"}),
    "graph-exp-directed": (DIRECTED, {}),
    "graph-exp-sparse": (PATH.to_sparse(), {}),
    "graph-exp-max-neighbours": (TRIANGLES, {"max_neighbours": 3}),
    "graph-exp-masked-max-neighbours": ((TRIANGLES, MASK), {"max_neighbours": 5, "gradient": "recompute"}),
    "graph-exp-terms": (PATH, {"terms": 30}),
}

for name, (context, options) in GRAPH.items():
    CASES.add(name)(
        lambda c=context, o=options: Case(
            T.GraphConvExp(2, **o), (4, 2), context=c, wrong_event=(4, 3), wrong_contexts=NOT_A_GRAPH
        )
    )
