"""Likelihoods, samples and scores of a trained run."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from expmflow._validation import expect, expect_count
from expmflow.data import DataError, Dataset
from expmflow.data.download import Progress
from expmflow.data.kinds import Kind, Layout, Unit, sources
from expmflow.data.paths import expand_home
from expmflow.distributions import Density, NonFiniteError
from expmflow.runs.composed import is_composed
from expmflow.runs.pretrained import load
from expmflow.runs.shipped import find_run, run_name
from expmflow.training.build import DTYPES, build_data, class_context
from expmflow.training.checkpoint import CheckpointError
from expmflow.training.config import Config
from expmflow.training.randomness import Randomness
from expmflow.training.run import RunFolder
from expmflow.training.sampling import draw
from expmflow.transforms import keyed_draws

Advance = Callable[[int], None]
LARGEST_BATCH = 2048  # rows whose likelihoods are computed at a time
LARGEST_NUMBERS = 2**19  # and entries in them: 170 images of CIFAR-10


@dataclass(frozen=True)
class Trained:
    """An open run: its config, its best weights, and the paths of its files."""

    folder: RunFolder
    config: Config
    event_shape: tuple[int, ...]
    model: Density
    device: torch.device
    kind: Kind
    names: tuple[str, ...] = ()
    class_names: tuple[str, ...] = ()
    place: Path | None = None

    @property
    def name(self) -> str:
        """The name of the run."""
        return run_name(self.folder.path)

    @property
    def layout(self) -> Layout:
        """The layout of its rows."""
        settings = self.config.data.model_dump()
        return Layout(self.event_shape, self.names, self.class_names, self.levels, settings)

    @property
    def unit(self) -> Unit:
        """The unit in which the literature reports such likelihoods."""
        return self.kind.unit(self.event_shape)

    @property
    def levels(self) -> int | None:
        """The grey levels of discrete data; None for continuous data."""
        return self.model.levels

    @property
    def batch_size(self) -> int:
        """Rows whose likelihoods are computed at a time."""
        return min(LARGEST_BATCH, max(1, LARGEST_NUMBERS // torch.Size(self.event_shape).numel()))

    def data(self, progress: Progress | None = None) -> Dataset:
        """The rows that the run was trained, validated and tested on; or other rows, all of which are for the test.

        `place` is where they are now, if they have moved. Rows that are not the run's are read in the same way,
        whatever the run's splits are.
        """
        if self.place is None:
            data = build_data(self.config.data, Randomness(self.config.train.seed), progress)
        else:
            moved = self._moved(self.place, progress)
            if moved is None:
                rows = self.kind.read([self.place], self.layout, fit=False, progress=progress).rows
                return Dataset(rows[:0], rows[:0], rows, levels=self.levels, kind=self.kind.name, names=self.names)
            data = moved
        same = not self.names or not data.names or data.names == self.names
        expect(same, f"the columns {', '.join(self.names)} in the run's data", ", ".join(data.names))
        self.folder.check_data(data.digest())
        return data

    @property
    def data_is_away(self) -> bool:
        """Whether the files of the run's data are missing here; for published data, whether they may have to be
        downloaded."""
        settings = self.config.data
        away = settings.path is not None and not expand_home(settings.path).exists()
        return away or "dir" in sources()[settings.name].settings

    def _moved(self, place: Path, progress: Progress | None) -> Dataset | None:
        """The run's own rows at another place; None if the rows there are others."""
        taken = sources()[self.config.data.name].settings
        setting = next((name for name in ("path", "dir") if name in taken), None)
        if setting is None:
            raise DataError(f"Expected a run on files for --data; got {self.name}, on {self.config.data.name}.")
        settings = self.config.data.model_copy(update={setting: expand_home(place).absolute()})
        began = self.folder.read_digest()
        try:
            data = build_data(settings, Randomness(self.config.train.seed), progress)
        except ValueError:
            if began is None or setting == "dir":
                raise
            return None
        return data if began in (None, data.digest()) else None

    def rows(self, rows: Tensor) -> Tensor:
        """Rows in the form that the model takes."""
        if not rows.is_floating_point():
            return rows.to(self.device)
        return rows.to(self.device, torch.float64 if self.model.takes_double else DTYPES[self.config.train.precision])

    @property
    def classes(self) -> int | None:
        """The number of classes of a conditional model; None otherwise."""
        return getattr(self.config.model, "classes", None)

    def context(self, labels: Tensor | None) -> Tensor | None:
        """The model's context for rows with these labels."""
        context = class_context(labels, self.classes, DTYPES[self.config.train.precision])
        return None if context is None else context.to(self.device)

    def log_likelihoods(
        self, rows: Tensor, advance: Advance = lambda done: None, labels: Tensor | None = None
    ) -> Tensor:
        """`(rows,)` in float64, computed in batches; −∞ if a row is so far out that its likelihood over- or underflows.

        For discrete data, a sample of the lower bound, with noise that depends only on the seed and the row: neither
        batches nor other rows change it. For a conditional model, rows without labels may be of any class.
        """
        parts = []
        for part in self._likelihoods(rows, labels):
            parts.append(part)
            advance(len(part))
        return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.float64)

    def sample(
        self,
        n: int,
        *,
        temperature: float = 1.0,
        seed: int = 0,
        labels: Tensor | None = None,
        advance: Advance = lambda done: None,
    ) -> Tensor:
        """`(n, *event)` on the CPU, the same for the same seed; for a conditional model, the classes take turns."""
        expect_count(n, "the number of samples")
        expect(math.isfinite(temperature) and temperature > 0, "a positive temperature", temperature)
        context = self.context(torch.arange(n) % self.classes if self.classes and labels is None else labels)
        return draw(self.model, n, Randomness(seed), context=context, temperature=temperature, advance=advance)

    @torch.no_grad()
    def _likelihoods(self, rows: Tensor, labels: Tensor | None) -> Iterator[Tensor]:
        randomness = Randomness(self.config.train.seed)
        size = self.batch_size
        for k, batch in enumerate(rows.split(size)):
            noise = [self.rows(part) for part in randomness.row_draws(self.model.draws, batch, "evaluation")]
            contexts = self._contexts(None if labels is None else labels[k * size : (k + 1) * size], len(batch))
            inputs = self.rows(batch)
            by_context = [tolerant_likelihood(self.model, inputs, noise, c).double().cpu() for c in contexts]
            yield torch.stack(by_context).logsumexp(0) - math.log(len(by_context))

    def _contexts(self, labels: Tensor | None, rows: int) -> list[Tensor | None]:
        """The context of the rows, or one for each class that they may have, all equally likely."""
        if self.classes is None or labels is not None:
            return [self.context(labels)]
        return [self.context(torch.full((rows,), k)) for k in range(self.classes)]


def open_run(folder: str | Path, device: str = "cpu", data: Path | None = None) -> Trained:
    """Open the run in a folder, or the output of `save_pretrained`, or a model that ships with the package, by name.

    Args:
        folder: the folder of the run.
        device: where to compute.
        data: where the run's data is now, if it has moved; or other data instead.
    """
    run = RunFolder(find_run(folder))
    if is_composed(run.path):
        raise CheckpointError(
            f"Expected a run, which a config describes, in {run.path}; got a flow that ef.save wrote, for ef.load in "
            f"Python."
        )
    model = load(folder)
    config, event_shape = run.read_config()
    where = torch.device(device)
    kind, names, classes = run.read_kind(), run.read_names(), run.read_class_names()
    return Trained(run, config, event_shape, model.to(where), where, kind, names, classes, data)


def tolerant_likelihood(model: Density, rows: Tensor, noise: Sequence[Tensor], context: Tensor | None) -> Tensor:
    """The likelihoods, with −∞ for rows beyond the range of the dtype, which do not affect the others.

    The random numbers of layers are a function of the row alone.
    """
    try:
        with keyed_draws(model, "evaluation", [_digest(row) for row in rows]):
            return model(rows, context, noise=noise)
    except NonFiniteError:
        if len(rows) == 1:
            return torch.full((1,), -math.inf)
        middle = len(rows) // 2
        halves = [
            tolerant_likelihood(
                model, rows[half], [part[half] for part in noise], None if context is None else context[half]
            )
            for half in (slice(middle), slice(middle, None))
        ]
        return torch.cat([half.cpu() for half in halves])


def _digest(row: Tensor) -> str:
    """A checksum of a row's content."""
    return hashlib.sha256(row.contiguous().cpu().numpy().tobytes()).hexdigest()
