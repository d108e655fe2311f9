"""Exact-likelihood models made of exponentials of linear operators."""

from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from expmflow import distributions, interop, models, nn, operators, transforms
from expmflow.distributions import Flow
from expmflow.numerics import (
    ConvergenceError,
    SeriesPlan,
    Solution,
    certify,
    certify_heat,
    expm_apply,
    fixed_point,
    heat_kernel,
    plan_series,
    power_iteration,
)
from expmflow.operators import ConvOperator, DenseOperator, FunctionOperator, GraphConvOperator, LinearOperator

if TYPE_CHECKING:
    from expmflow.runs.pretrained import load, save_pretrained

__version__ = version("expmflow")

__all__ = [
    "ConvOperator",
    "ConvergenceError",
    "DenseOperator",
    "Flow",
    "FunctionOperator",
    "GraphConvOperator",
    "LinearOperator",
    "SeriesPlan",
    "Solution",
    "certify",
    "certify_heat",
    "distributions",
    "expm_apply",
    "fixed_point",
    "heat_kernel",
    "interop",
    "load",
    "models",
    "nn",
    "operators",
    "plan_series",
    "power_iteration",
    "save_pretrained",
    "transforms",
]


def __getattr__(name: str) -> Any:
    """Training is loaded when it is first asked for: layers alone need none of it."""
    if name in ("load", "save_pretrained"):
        from expmflow.runs import pretrained

        return getattr(pretrained, name)
    raise AttributeError(f"module 'expmflow' has no attribute {name!r}")
