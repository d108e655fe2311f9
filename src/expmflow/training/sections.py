"""What sections of a config are made of, and what every kind of model says of itself."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Annotated, Any, Self, final

from pydantic import BaseModel, ConfigDict, Field

from expmflow.data import Dataset
from expmflow.distributions import Density, Flow, StandardizedFlow

# no machine holds or does more: what is beyond is a slip, and is refused before any work starts
Positive = Annotated[int, Field(ge=1, le=10**9)]
Width = Annotated[int, Field(ge=1, le=10**6)]  # the square of it is a matrix
Depth = Annotated[int, Field(ge=1, le=10**5)]
Fraction = Annotated[float, Field(ge=0, lt=1)]

GIVEN = "given"  # the name of data, and the kind of models, that a program holds and no config describes


class ConfigError(ValueError):
    """A config that cannot be used; the message lists all its problems."""


class Section(BaseModel):
    """Settings: none that is not known, none that changes."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    def filled(self, **values: Any) -> Self:
        """With these values where there are none."""
        return self.model_copy(update={key: value for key, value in values.items() if getattr(self, key) is None})


class ModelSection(Section, ABC):
    """What every kind of model says of itself."""

    def resolved(self, data: Dataset) -> Self:
        """With what follows from the data filled in, or a `ConfigError` if it says otherwise."""
        return self

    def defaults(self, rows: int) -> Mapping[str, Mapping[str, Any]]:
        """Settings of other sections, by their names, that follow from the number of training rows, if not given."""
        return {}

    @abstractmethod
    def build(self, event_shape: tuple[int, ...]) -> Density:
        """The model of a resolved config, its weights drawn from torch's own generator."""


class VectorSection(ModelSection):
    """What models of vectors have in common: tables are standardised, and values that repeat dequantized."""

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
