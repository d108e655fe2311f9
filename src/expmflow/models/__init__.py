"""Whole models, each readable as one list of layers."""

from expmflow._recipes import register_all
from expmflow.models.autoencoder import ChannelsLast, image_vae, vector_vae
from expmflow.models.dense import dense_flow
from expmflow.models.graph import graph_flow
from expmflow.models.image import image_flow
from expmflow.models.table import table_flow
from expmflow.models.vae import VAE

__all__ = ["VAE", "dense_flow", "graph_flow", "image_flow", "image_vae", "table_flow", "vector_vae"]

register_all(__name__, [*__all__, ChannelsLast.__name__], globals())
