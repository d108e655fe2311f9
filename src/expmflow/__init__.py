"""Exact-likelihood models made of exponentials of linear operators."""

from importlib.metadata import version

from expmflow import distributions, interop, nn, operators, transforms
from expmflow.distributions import Flow
from expmflow.numerics import (
    ConvergenceError,
    SeriesPlan,
    Solution,
    expm_apply,
    fixed_point,
    plan_series,
    power_iteration,
)
from expmflow.operators import ConvOperator, DenseOperator, FunctionOperator, GraphConvOperator, LinearOperator

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
    "distributions",
    "expm_apply",
    "fixed_point",
    "interop",
    "nn",
    "operators",
    "plan_series",
    "power_iteration",
    "transforms",
]
