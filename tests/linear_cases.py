"""The registry's linear maps over channels and points: emerging and periodic convolutions, Woodbury transformations."""

from __future__ import annotations

from expmflow import transforms as T
from transform_registry import Case, Cases

CASES = Cases()

EMERGING = {
    "emerging": ((2, 4, 3), {}),
    "emerging-wide": ((3, 2, 4), {}),
    "emerging-5x5": ((2, 3, 4), {"kernel_size": 5}),
    "emerging-1x1": ((3, 2, 2), {"kernel_size": 1}),
    "emerging-one-row": ((2, 1, 5), {}),
    "emerging-larger-than-the-image": ((2, 2, 1), {"kernel_size": 7}),
}

for name, (event, options) in EMERGING.items():
    CASES.add(name)(lambda e=event, o=options: Case(T.Emerging(e[0], **o), e, wrong_event=(e[0] + 1, *e[1:])))


@CASES.add("emerging-one-channel")
def _():
    idle = ("conv1x1.lower", "conv1x1.upper")  # a matrix of one entry has no triangles
    return Case(T.Emerging(1), (1, 4, 4), wrong_event=(2, 4, 4), idle=idle)


@CASES.add("emerging-free")
def _():
    return Case(T.Emerging(2, conv1x1=T.Conv1x1(2, "free")), (2, 3, 3), wrong_event=(2, 3))


WOODBURY = {
    "woodbury": ((2, 3, 2), 1, 2),
    "woodbury-points": ((2, 2, 4), 0, 3),
    "woodbury-channels": ((4, 2, 2), 2, 0),
    "woodbury-full-rank": ((2, 2, 2), 3, 5),
    "woodbury-one-point": ((3, 1, 1), 1, 1),
}

for name, (event, *ranks) in WOODBURY.items():
    CASES.add(name)(lambda e=event, r=ranks: Case(T.Woodbury(*e, *r), e, wrong_event=(e[0], e[1] + 1, e[2])))

PERIODIC = {
    "periodic": ((2, 4, 3), {}),
    "periodic-odd": ((2, 3, 5), {}),
    "periodic-even": ((1, 4, 6), {}),
    "periodic-5x5": ((2, 5, 2), {"kernel_size": 5}),
    "periodic-1x1": ((3, 2, 2), {"kernel_size": 1}),
    "periodic-one-row": ((2, 1, 4), {}),
}

for name, (event, options) in PERIODIC.items():
    CASES.add(name)(lambda e=event, o=options: Case(T.PeriodicConv(e[0], **o), e, wrong_event=(e[0] + 1, *e[1:])))
