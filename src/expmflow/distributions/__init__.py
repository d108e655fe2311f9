"""Densities: flows, their bases, dequantization, bounds."""

from expmflow._recipes import register_all
from expmflow.distributions.bounds import bits_per_dim, elbo, estimate_log_weights, importance_weighted
from expmflow.distributions.dequantization import (
    DequantizedFlow,
    Dequantizer,
    UniformDequantization,
    VariationalDequantization,
)
from expmflow.distributions.discretized import LogisticMixture
from expmflow.distributions.exchangeable import Exchangeable
from expmflow.distributions.flow import Flow, NonFiniteError
from expmflow.distributions.foreign import TorchBase
from expmflow.distributions.gaussian import Base, DiagonalGaussian, Logistic, NodeNormal, StandardNormal
from expmflow.distributions.likelihood import Bernoulli, Likelihood, Normal
from expmflow.distributions.posterior import AmortizedGaussian, FlowPosterior
from expmflow.distributions.protocol import Density, Draw
from expmflow.distributions.standardized import StandardizedFlow
from expmflow.distributions.structured import StructuredFlow

__all__ = [
    "AmortizedGaussian",
    "Base",
    "Bernoulli",
    "Density",
    "DequantizedFlow",
    "Dequantizer",
    "DiagonalGaussian",
    "Draw",
    "Exchangeable",
    "Flow",
    "FlowPosterior",
    "Likelihood",
    "Logistic",
    "LogisticMixture",
    "NodeNormal",
    "NonFiniteError",
    "Normal",
    "StandardNormal",
    "StandardizedFlow",
    "StructuredFlow",
    "TorchBase",
    "UniformDequantization",
    "VariationalDequantization",
    "bits_per_dim",
    "elbo",
    "estimate_log_weights",
    "importance_weighted",
]

register_all(__name__, __all__, globals())
