"""Networks inside the layers, and constraints on their weights."""

from expmflow._recipes import register_all
from expmflow.nn.autoregressive import MADE, ConvInner, DenseInner
from expmflow.nn.constraints import PowerConstraint
from expmflow.nn.conv_made import ConvMADE
from expmflow.nn.convnet import ConvNet
from expmflow.nn.densenet import DenseBlock, DenseNet
from expmflow.nn.graph import GraphNetwork
from expmflow.nn.graph_autoregressive import GraphInner
from expmflow.nn.lipschitz import LipschitzConvNet, LipschitzMLP, LipSwish
from expmflow.nn.masked import MaskedConv, MaskedLinear
from expmflow.nn.mlp import MLP
from expmflow.nn.spectral import SpectralConstraint
from expmflow.nn.triangular import TriangularConvInner

__all__ = [
    "MADE",
    "MLP",
    "ConvInner",
    "ConvMADE",
    "ConvNet",
    "DenseBlock",
    "DenseInner",
    "DenseNet",
    "GraphInner",
    "GraphNetwork",
    "LipSwish",
    "LipschitzConvNet",
    "LipschitzMLP",
    "MaskedConv",
    "MaskedLinear",
    "PowerConstraint",
    "SpectralConstraint",
    "TriangularConvInner",
]

register_all(__name__, (name for name in __all__ if not name.endswith("Constraint")), globals())
