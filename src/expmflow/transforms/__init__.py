"""Invertible layers: `forward` and `inverse` both return `(output, logdet)`."""

from expmflow._recipes import register_all
from expmflow.transforms.amortized import Amortized
from expmflow.transforms.autoregressive import InverseAutoregressive, MaskedAutoregressive
from expmflow.transforms.base import Chain, Inverse, Transform
from expmflow.transforms.conv1x1 import Conv1x1, Householder
from expmflow.transforms.coupling import AffineCoupling
from expmflow.transforms.emerging import Emerging
from expmflow.transforms.exponential import ConvExp, LinearExp
from expmflow.transforms.flipped import Flipped
from expmflow.transforms.graph_exponential import GraphConvExp
from expmflow.transforms.mixture import MixtureCoupling
from expmflow.transforms.multiscale import Split
from expmflow.transforms.normalize import ActNorm
from expmflow.transforms.original_sylvester import HouseholderSylvester, OrthogonalSylvester, TriangularSylvester
from expmflow.transforms.periodic import PeriodicConv
from expmflow.transforms.planar import Planar
from expmflow.transforms.randomness import keyed_draws
from expmflow.transforms.reshape import Flip, Permute, Squeeze
from expmflow.transforms.residual import ResidualBlock
from expmflow.transforms.sylvester import ConvSylvester, DenseSylvester, GeneralizedSylvester, GraphSylvester
from expmflow.transforms.triangular import TriangularConvSylvester
from expmflow.transforms.whiten import Whiten
from expmflow.transforms.woodbury import Woodbury

__all__ = [
    "ActNorm",
    "AffineCoupling",
    "Amortized",
    "Chain",
    "Conv1x1",
    "ConvExp",
    "ConvSylvester",
    "DenseSylvester",
    "Emerging",
    "Flip",
    "Flipped",
    "GeneralizedSylvester",
    "GraphConvExp",
    "GraphSylvester",
    "Householder",
    "HouseholderSylvester",
    "Inverse",
    "InverseAutoregressive",
    "LinearExp",
    "MaskedAutoregressive",
    "MixtureCoupling",
    "OrthogonalSylvester",
    "PeriodicConv",
    "Permute",
    "Planar",
    "ResidualBlock",
    "Split",
    "Squeeze",
    "Transform",
    "TriangularConvSylvester",
    "TriangularSylvester",
    "Whiten",
    "Woodbury",
    "keyed_draws",
]

register_all(__name__, __all__, globals())
