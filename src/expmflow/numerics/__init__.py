"""Numerical methods on operators: exponentials, norms, fixed points."""

from expmflow.numerics.certificate import certify
from expmflow.numerics.heat import certify_heat, heat_kernel
from expmflow.numerics.norms import power_iteration
from expmflow.numerics.plan import SeriesPlan, plan_series
from expmflow.numerics.series import expm_apply
from expmflow.numerics.solve import ConvergenceError, Solution, fixed_point

__all__ = [
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
]
