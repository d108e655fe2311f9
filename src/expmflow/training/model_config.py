"""The kinds of model in configs: their settings, defaults that follow from the data, and how they are built."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Discriminator, Field, Tag
from pydantic_core import PydanticCustomError

from expmflow.data import Dataset
from expmflow.distributions import Density, Flow, StructuredFlow
from expmflow.models import dense_flow, graph_flow, image_flow, table_flow
from expmflow.models.graph import GraphNetworks
from expmflow.models.image import BaseKind, Dequantization, Start
from expmflow.models.mixing import MIXINGS, Mixing
from expmflow.models.subflows import SUBFLOWS, CouplingNetwork, SubflowName
from expmflow.training.defaults import default_components, default_hidden, default_jitter, default_weight_decay
from expmflow.training.sections import (
    ConfigError,
    Depth,
    ModelSection,
    VectorSection,
    Width,
)
from expmflow.training.vae_config import VAEModelConfig, VectorVAEModelConfig

MOST_LEVELS = 30  # 2³⁰ points a side
LARGEST_COEFF = 80.0  # e⁸⁸ is beyond float32


def _name_in(registry: Mapping[str, object]) -> AfterValidator:
    """A name that the registry has when a config is read: entries may be added at any time."""

    def known(name: str) -> str:
        if name not in registry:
            *others, last = map(repr, registry)
            raise PydanticCustomError("unknown_name", f"input should be {', '.join(others)} or {last}")
        return name

    return AfterValidator(known)


class DenseModelConfig(VectorSection):
    """A flow on vectors: blocks of ActNorm, LinearExp, DenseSylvester and an affine coupling."""

    kind: Literal["dense"] = "dense"
    blocks: Depth = Field(4, description="number of blocks")
    hidden: Width = Field(64, description="features inside the networks")
    coeff: float = Field(0.9, gt=0, le=LARGEST_COEFF, description="the largest norm of an exponentiated operator")
    coupling: bool = Field(True, description="an affine coupling in each block (needs two features)")

    def build_flow(self, features: int) -> Flow:
        return dense_flow(features, **self.model_dump(exclude={"kind", "integers", "cells"}))


class TableModelConfig(VectorSection):
    """A flow on vectors: autoregressive splines, whitening, LinearExp, autoregressive mixtures."""

    kind: Literal["table"] = "table"
    blocks: Depth = Field(1, description="number of blocks")
    hidden: Width | None = Field(
        None, description="features inside the networks; chosen by the number of rows if not given"
    )
    components: Width | None = Field(
        None, description="of splines and mixtures; chosen by rows and columns if not given"
    )
    coeff: float = Field(0.9, gt=0, le=LARGEST_COEFF, description="the largest norm of an exponentiated operator")

    def resolved(self, data: Dataset) -> Self:
        sizes = {"hidden": default_hidden(len(data.train)), "components": default_components(*data.train.shape)}
        return super().resolved(data).filled(**sizes)

    def defaults(self, rows: int) -> Mapping[str, Mapping[str, Any]]:
        return {"data": {"jitter": default_jitter(rows)}, "optim": {"weight_decay": default_weight_decay(rows)}}

    def build_flow(self, features: int) -> Flow:
        return table_flow(features, **self.model_dump(exclude={"kind", "integers", "cells"}, exclude_none=True))


class ImageModelConfig(ModelSection):
    """A flow on images: levels of subflows, with half of the channels split off between levels."""

    kind: Literal["image"] = "image"
    subflow: Annotated[SubflowName, _name_in(SUBFLOWS)] = Field("sylvester", description="what a subflow is made of")
    mixing: Annotated[Mixing, _name_in(MIXINGS)] = Field("1x1", description="the linear layer beside each coupling")
    levels: int = Field(2, ge=1, le=MOST_LEVELS, description="number of levels; each halves height and width")
    subflows: Depth = Field(4, description="number in each level")
    growth: Width = Field(32, description="channels that each layer of a coupling's DenseNet adds")
    depth: Depth = Field(2, description="layers of a coupling's DenseNet")
    width: Width | None = Field(None, description="channels of a coupling's DenseNet; growth if not given")
    gated: bool = Field(True, description="whether DenseNets end with a gate")
    hidden: Width = Field(96, description="channels inside a Sylvester layer or a residual block")
    lipschitz: float | None = Field(
        None, gt=0, description="the largest norm of convolutions in Sylvester layers; unbounded if none"
    )
    coupling_network: CouplingNetwork = Field("dense", description="a DenseNet, or three convolutions (conv)")
    actnorm: bool = Field(True, description="an ActNorm before each subflow")
    start: Start = Field(
        "averages", description="initial mixing of each level: averages and differences, or a rotation"
    )
    mixing_first: bool = Field(True, description="later levels begin with a mixing layer too")
    mixing_last: bool = Field(False, description="one more mixing layer after the last coupling of each level")
    base: BaseKind = Field(
        "gaussian", description="base with fixed or learned means and deviations, per entry or channel"
    )
    dequantization: Dequantization = Field("uniform", description="the noise that fills the gaps between grey levels")
    dequantization_subflows: Depth = Field(4, description="number for variational dequantization")
    dequantization_growth: Width = Field(32, description="growth of the DenseNets of variational-dense dequantization")
    dequantization_depth: Depth = Field(4, description="depth of those DenseNets")
    conditional: bool = Field(False, description="learn a density for each class of the data")
    grey_levels: int | None = Field(None, ge=2, le=256, description="filled in from the data")
    classes: Width | None = Field(None, description="filled in from the data, if conditional")

    def resolved(self, data: Dataset) -> Self:
        levels = self.grey_levels if data.levels is None else data.levels
        known = {"grey_levels": levels, "classes": data.classes if self.conditional else None}
        if self.conditional and not data.classes:
            raise ConfigError("Expected data with classes for model.conditional=true; got none.")
        if self.classes is not None and not self.conditional:
            raise ConfigError("Expected model.conditional=true for model.classes; got false.")
        for key, value in known.items():
            given = getattr(self, key)
            if given not in (None, value):
                raise ConfigError(f"Expected model.{key}={value}, as the data has; got {given}.")
        return self.model_copy(update=known)

    def build(self, event_shape: tuple[int, ...]) -> Density:
        settings = self.model_dump(exclude={"kind"})
        return image_flow(event_shape, **{**settings, "grey_levels": self.grey_levels or 256})


class GraphModelConfig(ModelSection):
    """A flow on the node features of graphs: subflows of ActNorm, 1×1 and couplings."""

    kind: Literal["graph"] = "graph"
    network: GraphNetworks = Field(
        "gnf-exp", description="one of the paper's three models, or sorted, a density of sets"
    )
    subflows: Depth = Field(3, description="number of subflows")
    hidden: Width = Field(64, description="features inside the networks")
    edges: bool | None = Field(None, description="whether graphs have edges of their own, filled in from the data")

    def resolved(self, data: Dataset) -> Self:
        if data.has_edges and self.network not in ("gnf", "gnf-exp"):
            raise ConfigError(f"Expected model.network=gnf or gnf-exp for graphs with edges; got {self.network}.")
        return self.model_copy(update={"edges": data.has_edges or None})

    def build(self, event_shape: tuple[int, ...]) -> Density:
        settings = self.model_dump(exclude={"kind", "edges"})
        nodes, entries = event_shape
        if not self.edges:
            return graph_flow(nodes, entries, **settings)
        return StructuredFlow(graph_flow(nodes, entries - nodes - 1, **settings))


class GivenModelConfig(ModelSection):
    """A model passed to `expmflow.train`: no config describes it, so it cannot be built from one."""

    kind: Literal["given"] = "given"
    classes: Width | None = None

    def build(self, event_shape: tuple[int, ...]) -> Density:
        raise ConfigError(
            "Expected a model that a config describes; got a run of one that was given to expmflow.train: build it "
            "again, and go on by expmflow.train(model, data, folder=…), with the same data and settings."
        )


def model_kind(model: Any) -> Any:
    """The name of the model's kind in a config."""
    return model.get("kind", "dense") if isinstance(model, Mapping) else getattr(model, "kind", None)


MODELS: dict[str, type[ModelSection]] = {
    "dense": DenseModelConfig,
    "table": TableModelConfig,
    "image": ImageModelConfig,
    "graph": GraphModelConfig,
    "vae": VAEModelConfig,
    "vector-vae": VectorVAEModelConfig,
}
ModelConfig = Annotated[
    Annotated[DenseModelConfig, Tag("dense")]
    | Annotated[TableModelConfig, Tag("table")]
    | Annotated[ImageModelConfig, Tag("image")]
    | Annotated[GraphModelConfig, Tag("graph")]
    | Annotated[VAEModelConfig, Tag("vae")]
    | Annotated[VectorVAEModelConfig, Tag("vector-vae")]
    | Annotated[GivenModelConfig, Tag("given")],
    Discriminator(model_kind),
]
