"""VAEs in configs."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field

from expmflow.data import Dataset
from expmflow.distributions import Density
from expmflow.models import image_vae, vector_vae
from expmflow.models.autoencoder import LikelihoodName
from expmflow.models.posteriors import PosteriorName
from expmflow.training.sections import ConfigError, Depth, ModelSection, Width


class VAEModelConfig(ModelSection):
    """A VAE on images: DenseNet blocks, and a posterior with or without a flow."""

    kind: Literal["vae"] = "vae"
    posterior: PosteriorName = Field(
        "sylvester", description="distribution of the latents; with conv- the latents are images"
    )
    latents: Width = Field(64, description="number of latents, or of their channels")
    flows: Depth = Field(4, description="layers of the posterior's flow")
    hidden: Width = Field(320, description="features inside its autoregressive networks")
    context: Width = Field(64, description="features that the encoder passes to those networks")
    vectors: Width = Field(8, description="columns of Q, for the posterior orthogonal")
    reflections: Width = Field(8, description="number of reflections, for the posteriors householder and sylvester")
    channels: Width = Field(32, description="channels in encoder and decoder; twice as many at half the size")
    growth: Width = Field(32, description="channels that each layer of a DenseNet block adds")
    depth: Depth = Field(4, description="layers of a DenseNet block")
    features: Width = Field(256, description="features of an image before the encoder's linear head")
    likelihood: LikelihoodName = Field("auto", description="bernoulli for two grey levels, else logistic-mixture")
    components: Width = Field(10, description="components of each logistic mixture")
    grey_levels: int | None = Field(None, ge=2, le=256, description="filled in from the data")

    def resolved(self, data: Dataset) -> Self:
        if self.grey_levels not in (None, data.levels):
            raise ConfigError(f"Expected model.grey_levels={data.levels}, as the data has; got {self.grey_levels}.")
        return self.model_copy(update={"grey_levels": data.levels})

    def build(self, event_shape: tuple[int, ...]) -> Density:
        settings = self.model_dump(exclude={"kind"})
        return image_vae(event_shape, **{**settings, "grey_levels": self.grey_levels or 256})


class VectorVAEModelConfig(ModelSection):
    """A VAE on vectors: MLPs, and a posterior with or without a flow."""

    kind: Literal["vector-vae"] = "vector-vae"
    posterior: PosteriorName = Field("sylvester", description="distribution of the latents; any name without conv-")
    latents: Width = Field(2, description="number of latents")
    flows: Depth = Field(4, description="layers of the posterior's flow")
    hidden: Width = Field(64, description="features inside all networks")
    context: Width = Field(16, description="features that the encoder passes to the posterior's networks")
    vectors: Width = Field(8, description="columns of Q, for the posterior orthogonal")
    reflections: Width = Field(8, description="number of reflections, for the posteriors householder and sylvester")
    layers: int = Field(
        2, ge=0, le=10**5, description="hidden layers of encoder and decoder; without any, both are linear"
    )

    def build(self, event_shape: tuple[int, ...]) -> Density:
        return vector_vae(*event_shape, **self.model_dump(exclude={"kind"}))
