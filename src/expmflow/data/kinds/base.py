"""The interface of a kind of data, which training, reports and the command line use."""

from __future__ import annotations

import base64
import csv
import io
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from expmflow._validation import expect
from expmflow.data.dataset import Dataset
from expmflow.data.download import Progress

Generators = Callable[[str], torch.Generator]
"""Returns a separate generator for each label."""


@dataclass(frozen=True)
class Unit:
    """A unit of likelihood: its name, its key in results, and how many units one nat of a whole row is."""

    name: str
    key: str
    per_nat: float

    @property
    def short(self) -> str:
        """A short form of the name."""
        return self.key.replace("_", " ")


NATS = Unit("nats", "nll", 1.0)


def bits_per_dimension(event_shape: Sequence[int]) -> Unit:
    """The nats of a row, divided by its number of entries and log 2."""
    return Unit("bits per dimension", "bpd", 1 / (torch.Size(event_shape).numel() * math.log(2)))


@dataclass(frozen=True)
class Source:
    """A source of rows: a name in configs, a function that loads them, and its settings.

    Args:
        load: called with the settings, and with `generator`, a function from labels to generators, and `progress`.
        settings: names in the section `data` of a config, which are also arguments of `load`.
        origin: for people: `"drawn"`, or what is read.
    """

    load: Callable[..., Dataset]
    settings: tuple[str, ...]
    origin: str


@dataclass(frozen=True)
class Augmentation:
    """A random change of training rows: `apply(rows, uniform, value, train)`.

    `uniform` are `(batch, *shape)` numbers in [0, 1), `value` is the setting, and `train` is all training rows.
    """

    shape: tuple[int, ...]
    apply: Callable[[Tensor, Tensor, Any, Tensor], Tensor]


@dataclass(frozen=True)
class Layout:
    """The layout of a run's rows: all that is needed to read, write and draw others like them.

    Args:
        event_shape: the shape of a row.
        names: the names of its entries, if they have any.
        class_names: the names of the classes, if there are any.
        levels: for integer rows, the number of levels.
        settings: the section `data` that the run's rows were read with.
    """

    event_shape: tuple[int, ...]
    names: tuple[str, ...] = ()
    class_names: tuple[str, ...] = ()
    levels: int | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Rows:
    """Rows from files: for each row its file, or its name in it, and its number there, from 1."""

    rows: Tensor
    names: list[str]
    numbers: list[int]

    def __len__(self) -> int:
        return len(self.rows)

    @classmethod
    def of_files(cls, files: Sequence[Path], parts: Sequence[Tensor]) -> Rows:
        """The rows of all files, in order."""
        names = [str(file) for file, part in zip(files, parts, strict=True) for _ in range(len(part))]
        return cls(torch.cat(list(parts)), names, [k for part in parts for k in range(1, len(part) + 1)])


@dataclass(frozen=True)
class Landscape:
    """Where to draw a density of two variables: `(n, 2)` points of a square grid, with rows going up."""

    points: Tensor
    extent: tuple[float, float, float, float]

    @property
    def side(self) -> int:
        return math.isqrt(len(self.points))


@dataclass(frozen=True)
class Picture:
    """Something that can be saved as PNG."""

    write: Callable[[Path | IO[bytes]], None]
    caption: str = ""

    def embedded(self) -> str:
        """The picture as a `data:` address."""
        buffer = io.BytesIO()
        self.write(buffer)
        return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode("ascii")


@dataclass(frozen=True)
class Description:
    """A data set as a table for people, with further remarks."""

    title: str
    rows: Sequence[tuple[str, ...]]
    header: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


class Kind(ABC):
    """A kind of data: images, vectors, graphs.

    One object of a subclass, registered in `expmflow.data.kinds`, holds all that the package knows of the kind; no
    other place branches on it. A kind is a property of the data, and lists the models that fit it.
    """

    name: ClassVar[str]
    """In messages and in a run's files, in the plural."""

    models: ClassVar[tuple[str, ...]]
    """The kinds of model (`model.kind` in a config) for such data."""

    sources: Mapping[str, Source]
    """The values of `data.name` for such data."""

    files: ClassVar[str]
    """A description of the files that rows are read from."""

    formats: ClassVar[tuple[str, ...]]
    """The suffixes of files that samples can be written to."""

    default_file: ClassVar[Path | None] = None
    """The default file of samples; if None, they are printed as text."""

    takes_fit: ClassVar[bool] = False
    """Whether rows of another form can be brought to the model's form (`score --fit`)."""

    augmentations: Mapping[str, Augmentation] = {}
    """Random changes of training rows, by the name of their setting."""

    shown_samples: ClassVar[int] = 1000
    """The number of samples that a picture shows."""

    report_rows: ClassVar[int] = 1000
    """The number of rows, and of samples, that a report shows."""

    measured_rows: ClassVar[int] = 10_000
    """The number of rows of each split whose likelihoods a run stores and a report measures: at most a minute's
    work."""

    report_checked: ClassVar[int] = 512
    """The number of rows whose round trip a report measures."""

    extremes: ClassVar[int] = 0
    """How many of the most and of the least likely test rows a report shows."""

    @abstractmethod
    def check_event_shape(self, event_shape: tuple[int, ...]) -> None:
        """Raise `ValueError` unless rows of this kind may have this shape."""

    @abstractmethod
    def unit(self, event_shape: tuple[int, ...]) -> Unit:
        """The unit in which the literature reports likelihoods of such rows."""

    def units(self, event_shape: tuple[int, ...]) -> tuple[Unit, ...]:
        """All units of results: nats first, and last the one to show beside them."""
        return NATS, bits_per_dimension(event_shape)

    def entropy(self, source: str) -> float | None:
        """The entropy of a source's rows, in `unit`, if it is known: no model can have a smaller nll."""
        return None

    def baselines(self, train: Tensor, rows: Tensor) -> dict[str, float]:
        """The mean nll of `rows` under simple densities fitted to the training rows, by name."""
        return {}

    @abstractmethod
    def read(self, files: Sequence[Path], layout: Layout, *, fit: bool, progress: Progress | None) -> Rows:
        """Rows like those of a run, from files; `DataError` for others."""

    def own_source(self, path: Path) -> str | None:
        """The source that reads this file or folder of the user's, if it looks like this kind."""
        return None

    @abstractmethod
    def describe(self, title: str, source: str, path: Path | None, load: Callable[[], Dataset]) -> Description:
        """A data set, for people; `load` reads it."""

    def text(self, rows: Tensor, layout: Layout) -> str | None:
        """Rows as text, if the kind has this form: CSV, with a header and every digit."""
        return None

    def array(self, rows: Tensor) -> Tensor:
        """Rows as they are written to a `.npy` file."""
        return rows

    def scored(self, rows: Rows, log_prob: Tensor, layout: Layout) -> dict[str, list[Any]]:
        """The first columns of a list of scores: the row's name, and its likelihood."""
        which = {"file": rows.names} if len(set(rows.names)) > 1 else {}
        return {**which, "row": rows.numbers, "log_likelihood": log_prob.tolist()}

    @abstractmethod
    def draw(
        self, samples: Tensor, layout: Layout, *, data: Tensor | None = None, columns: int | None = None
    ) -> Picture:
        """Samples as one picture, with the data beside them where that helps; `columns` rows in a line of a grid."""

    def compare(
        self,
        samples: Tensor,
        data: Tensor,
        layout: Layout,
        *,
        columns: int | None = None,
        density: Tensor | None = None,
    ) -> list[Picture]:
        """A report's picture of data and samples; `density` has the values of p on the `landscape`."""
        return [self.draw(samples, layout, data=data, columns=columns)]

    def reconstructions(
        self, rows: Tensor, expected: Tensor, path: Tensor, layout: Layout, *, part: str = "test"
    ) -> list[Picture]:
        """A picture of latents: each row beside what is `expected` of it, and a path from the first to the second.

        `part` is the name of the data split that the rows are from.
        """
        return []

    def arrays(self, rows: Tensor) -> dict[str, np.ndarray[Any, Any]]:
        """Rows as the arrays of a `.npz` file, for a kind that has this format."""
        return {"rows": self.array(rows).numpy()}

    def names_fit(self, names: Sequence[str], event_shape: Sequence[int]) -> bool:
        """Whether these can be the names of a row's entries."""
        return tuple(event_shape) == (len(names),)

    def landscape(self, rows: Tensor) -> Landscape | None:
        """Where to evaluate the density of such rows, if they can be drawn in the plane."""
        return None


def csv_text(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table with a header."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(header)
    writer.writerows(rows)
    return text.getvalue()


def expect_axes(event_shape: tuple[int, ...], count: int, what: str) -> None:
    """Raise `ValueError` unless an event has `count` axes."""
    expect(len(event_shape) == count, what, f"events of shape {event_shape}")
