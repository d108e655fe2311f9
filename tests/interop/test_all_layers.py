"""Every layer of the registry, as it is, inside nflows, and by its adapter inside zuko and `torch.distributions`."""

from __future__ import annotations

import pytest
import torch
from torch.distributions import ComposeTransform

from expmflow import interop
from transform_cases import CASES
from transform_registry import points


def forward_and_back(name: str):
    case = CASES.ready(name)
    x = points(name, case)
    with torch.no_grad():
        z, logdet = case.layer(x, case.context)
    return case, x, z, logdet


def close(found, expected) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", CASES)
@torch.no_grad()
def test_nflows(name):
    base = pytest.importorskip("nflows.transforms.base")
    case, x, z, logdet = forward_and_back(name)
    theirs = base.CompositeTransform([case.layer])
    close(theirs(x, case.context), (z, logdet))
    close(theirs.inverse(z, case.context), (x, -logdet))
    close(base.InverseTransform(case.layer)(z, case.context), (x, -logdet))


@pytest.mark.parametrize("name", CASES)
@torch.no_grad()
def test_zuko(name):
    zuko = pytest.importorskip("zuko")
    case, x, z, logdet = forward_and_back(name)
    layer = interop.as_transform(case.layer, context=case.context, event_dim=len(case.event))
    theirs = zuko.transforms.ComposedTransform(layer)
    close(theirs.call_and_ladj(x), (z, logdet))
    close(theirs.inv.call_and_ladj(z), (x, -logdet))


@pytest.mark.parametrize("name", CASES)
@torch.no_grad()
def test_torch_distributions(name):
    case, x, z, logdet = forward_and_back(name)
    layer = interop.as_transform(case.layer, context=case.context, event_dim=len(case.event))
    theirs = ComposeTransform([layer])
    close((theirs(x), theirs.log_abs_det_jacobian(x, z)), (z, logdet))
    close((theirs.inv(z), theirs.inv.log_abs_det_jacobian(z, x)), (x, -logdet))
