"""Base classes for the sections of a config, and the interface of every kind of model."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Annotated, Any, Self, final

from pydantic import BaseModel, ConfigDict, Field

from expmflow.data import Dataset
from expmflow.distributions import Density, Flow, StandardizedFlow

# no machine does more: larger values are slips, and are refused before any work starts
Positive = Annotated[int, Field(ge=1, le=10**9)]
Width = Annotated[int, Field(ge=1, le=10**6)]  # its square is the size of a matrix
Depth = Annotated[int, Field(ge=1, le=10**5)]
Fraction = Annotated[float, Field(ge=0, lt=1)]

GIVEN = "given"  # the name of data and model kinds that are passed from Python, without a config


class ConfigError(ValueError):
    """A config that cannot be used; the message lists all its problems."""


class Section(BaseModel):
    """Immutable settings; unknown ones are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    def filled(self, **values: Any) -> Self:
        """A copy in which these values replace None."""
        return self.model_copy(update={key: value for key, value in values.items() if getattr(self, key) is None})


class ModelSection(Section, ABC):
    """The interface of every kind of model."""

    def resolved(self, data: Dataset) -> Self:
        """Completed from the data; raises `ConfigError` if a setting contradicts the data."""
        return self

    def defaults(self, rows: int) -> Mapping[str, Mapping[str, Any]]:
        """Defaults of settings in other sections, by name, that follow from the number of training rows."""
        return {}

    @abstractmethod
    def build(self, event_shape: tuple[int, ...]) -> Density:
        """The model of a resolved config, with weights drawn from torch's own generator."""


class VectorSection(ModelSection):
    """Common part of models of vectors: tables are standardised, and repeated values dequantized."""

    integers: list[int] | None = Field(None, description="columns of whole numbers, filled in from the data (table)")
    cells: list[tuple[int, float]] | None = Field(
        None, description="other columns with repeated values, and their cell widths, from the data (table)"
    )

    def resolved(self, data: Dataset) -> Self:
        known = {
            "integers": None if data.integers is None else list(data.integers),
            "cells": list(data.cells) or None,
        }
        for key, value in known.items():
            given = getattr(self, key)
            if given not in (None, value):
                raise ConfigError(f"Expected model.{key}={value}, as the data has; got {given}.")
        return self.model_copy(update=known)

    @final
    def build(self, event_shape: tuple[int, ...]) -> Density:
        flow = self.build_flow(*event_shape)
        return flow if self.integers is None else StandardizedFlow(flow, self.integers, self.cells or ())

    @abstractmethod
    def build_flow(self, features: int) -> Flow:
        """The flow of standardised vectors."""
