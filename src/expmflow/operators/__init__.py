"""Linear operators: each knows its own adjoint, trace and norm bound."""

from expmflow.operators.base import LinearOperator
from expmflow.operators.conv import ConvOperator
from expmflow.operators.dense import DenseOperator
from expmflow.operators.function import FunctionOperator
from expmflow.operators.graph import GraphConvOperator

__all__ = ["ConvOperator", "DenseOperator", "FunctionOperator", "GraphConvOperator", "LinearOperator"]
