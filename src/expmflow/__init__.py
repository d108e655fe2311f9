"""Exact-likelihood models built from exponentials of linear operators."""

from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from expmflow import data, distributions, interop, models, nn, operators, testing, transforms
    from expmflow._recipes import register_layer
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
    from expmflow.runs.composed import save
    from expmflow.runs.export import export
    from expmflow.runs.pretrained import load, save_pretrained
    from expmflow.training.api import train

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
    "data",
    "distributions",
    "expm_apply",
    "export",
    "fixed_point",
    "heat_kernel",
    "interop",
    "load",
    "models",
    "nn",
    "operators",
    "plan_series",
    "power_iteration",
    "register_layer",
    "save",
    "save_pretrained",
    "testing",
    "train",
    "transforms",
]

_HOMES = {
    "distributions": ("Flow",),
    "numerics": (
        "ConvergenceError",
        "SeriesPlan",
        "Solution",
        "certify",
        "certify_heat",
        "expm_apply",
        "fixed_point",
        "heat_kernel",
        "plan_series",
        "power_iteration",
    ),
    "operators": ("ConvOperator", "DenseOperator", "FunctionOperator", "GraphConvOperator", "LinearOperator"),
    "_recipes": ("register_layer",),
    "runs.composed": ("save",),
    "runs.export": ("export",),
    "runs.pretrained": ("load", "save_pretrained"),
    "training.api": ("train",),
}
_HOME = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    """Load names on first use, so that the command line answers before torch is loaded."""
    if name in _HOME:
        value = getattr(import_module(f"expmflow.{_HOME[name]}"), name)
    elif name in __all__:
        value = import_module(f"expmflow.{name}")
    else:
        raise AttributeError(f"module 'expmflow' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
