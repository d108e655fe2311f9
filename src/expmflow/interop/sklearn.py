"""Densities of tables as estimators of scikit-learn: for arrays and data frames, pipelines and searches.

scikit-learn comes with the extra `train`.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Sequence
from numbers import Integral, Real
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.base import BaseEstimator, DensityMixin, OutlierMixin
from sklearn.utils import check_random_state
from sklearn.utils.metaestimators import available_if
from sklearn.utils.validation import check_is_fitted
from torch import Tensor

from expmflow._validation import expect
from expmflow.data import Dataset
from expmflow.data.columns import check_columns, integer_columns, repeated_values
from expmflow.distributions import Density
from expmflow.runs.composed import pack, unpack
from expmflow.runs.evaluation import tolerant_likelihood
from expmflow.training.config import load_config
from expmflow.training.loop import train
from expmflow.training.randomness import Randomness
from expmflow.training.sampling import draw
from expmflow.training.sections import GIVEN

try:
    from sklearn.utils.validation import validate_data
except ImportError:  # before scikit-learn 1.6

    def validate_data(estimator: Any, X: Any, **settings: Any) -> Any:
        return estimator._validate_data(X, **settings)


ROWS = 4096  # the number of rows whose likelihoods are computed at a time
NOISES = 8  # noise samples for each row with whole numbers
ROUNDING = 1e-5  # relative: likelihoods vary by less with the batch; the threshold is that of a row
Floats = NDArray[np.float64]


class _FlowEstimator(BaseEstimator):  # type: ignore[misc]
    """The common part of both estimators: they fit the model of the preset `table`, and compute likelihoods."""

    def __init__(
        self,
        *,
        steps: int | None = None,
        hidden: int | None = None,
        components: int | None = None,
        lr: float | None = None,
        validation_fraction: float = 0.2,
        integers: str | Sequence[int] = "auto",
        random_state: Any = None,
        device: str = "cpu",
    ) -> None:
        self.steps = steps
        self.hidden = hidden
        self.components = components
        self.lr = lr
        self.validation_fraction = validation_fraction
        self.integers = integers
        self.random_state = random_state
        self.device = device

    def fit(self, X: Any, y: Any = None) -> Self:
        """Learn the density of the rows of `X`; `y` is not used."""
        x = torch.from_numpy(self._checked(X, reset=True, ensure_min_samples=2))
        self._check_settings()
        places = [f"column {k}" for k in range(x.shape[1])]
        names = [str(name) for name in getattr(self, "feature_names_in_", places)]
        check_columns(x, names, "X", _leave_out)
        seed = int(check_random_state(self.random_state).randint(2**31 - 1))
        held = min(len(x) - 1, max(1, round(self.validation_fraction * len(x))))
        order = torch.randperm(len(x), generator=Randomness(seed).generator("split"))
        x = x[order]
        integers, cells = integer_columns(x), repeated_values(x)
        if not isinstance(self.integers, str):
            integers, cells = tuple(self.integers), ()
        data = Dataset(x[held:], x[:held], x[:0], integers=integers, cells=cells)
        with tempfile.TemporaryDirectory() as folder:
            model = train(self._config(seed), folder, device=self.device, data=data)
        self.flow_: Density = model.to("cpu", torch.float64).eval()  # then results do not depend on the batch
        self.n_validation_ = held
        self._calibrate(x[held:], x[:held])
        return self

    def score_samples(self, X: Any) -> Floats:
        """log p of each row, in nats; for whole numbers, the log of a probability."""
        check_is_fitted(self)
        return self._log_prob(torch.from_numpy(self._checked(X, reset=False)))

    def _log_prob(self, x: Tensor) -> Floats:
        parts = [self._bound(rows) for rows in x.split(ROWS)]
        return np.concatenate([part.numpy() for part in parts])

    @torch.no_grad()
    def _bound(self, rows: Tensor) -> Tensor:
        """The likelihood, or a bound for whole numbers; the noise is a function of the row."""
        draws = self.flow_.draws
        if not draws:
            return tolerant_likelihood(self.flow_, rows, (), None)
        bounds = [
            tolerant_likelihood(self.flow_, rows, Randomness(0).row_draws(draws, rows, f"score {k}"), None)
            for k in range(NOISES)
        ]
        return torch.stack(bounds).logsumexp(0) - math.log(NOISES)

    def _checked(self, X: Any, **settings: Any) -> Floats:
        found = validate_data(self, X, dtype=np.float64, **settings)
        return np.array(found, dtype=np.float64, order="C")  # a copy: the original may be read-only

    def _check_settings(self) -> None:
        for name in ("steps", "hidden", "components"):
            value = getattr(self, name)
            expect(value is None or _positive(value), f"{name} to be a whole number above 0, or None", repr(value))
        share: Any = self.validation_fraction
        expect(isinstance(share, Real) and 0 < float(share) < 1, "validation_fraction between 0 and 1", repr(share))
        known = not isinstance(self.integers, str) or self.integers == "auto"
        expect(known, 'integers to be "auto" or the places of columns', repr(self.integers))

    def _config(self, seed: int) -> Any:
        given = {
            "data.name": GIVEN,
            "train.seed": seed,
            "train.steps": self.steps,
            "train.checkpoint_every": 10**9,
            "model.hidden": self.hidden,
            "model.components": self.components,
            "optim.lr": self.lr,
        }
        return load_config("table", [f"{key}={value}" for key, value in given.items() if value is not None])

    def _calibrate(self, training: Tensor, validation: Tensor) -> None:
        """Called after fitting."""

    def __getstate__(self) -> dict[str, Any]:
        """The flow as names, arguments and arrays, because torch cannot pickle constrained weights."""
        state: dict[str, Any] = super().__getstate__()
        if "flow_" in state:
            values, tensors = pack(state["flow_"])
            state = {**state, "flow_": (values, {name: tensor.numpy() for name, tensor in tensors.items()})}
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        if "flow_" in state:
            values, arrays = state["flow_"]
            tensors = {name: torch.from_numpy(np.array(array)) for name, array in arrays.items()}
            state = {**state, "flow_": unpack(values, tensors)}
        super().__setstate__(state)


def _positive(value: Any) -> bool:
    return isinstance(value, Integral) and int(value) > 0


class FlowDensity(DensityMixin, _FlowEstimator):  # type: ignore[misc]
    """The density of a table, by the model of the preset `table`: splines, exp(M) and mixtures, on standardised
    columns.

    A part of the rows is held out; when their likelihood stops improving, training stops, and the best weights are
    kept. Whole numbers have probabilities, and `score_samples` gives a bound on their logarithm.

    Args:
        steps: the largest number of optimizer steps; 5,000 if None.
        hidden, components: of networks, and of splines and mixtures; chosen by the number of rows if None.
        lr: the learning rate; the preset's if None.
        validation_fraction: the fraction of rows that is held out.
        integers: indices of columns of whole numbers; "auto" detects them, and other columns with repeated values.
        random_state: the source of random numbers: a number, a `RandomState`, or None.
        device: where to train.

    Attributes:
        flow_: the density in float64, a `distributions.Density` that `ef.save` writes.
        n_validation_: the number of held-out rows.

    Example:
        >>> from expmflow.interop.sklearn import FlowDensity
        >>> X = torch.randn(100, 2).numpy()
        >>> density = FlowDensity(steps=20, random_state=0).fit(X)
        >>> density.score_samples(X).shape, density.sample(3).shape
        ((100,), (3, 2))
    """

    def score(self, X: Any, y: Any = None) -> float:
        """The mean of log p over the rows, which a search maximises."""
        return float(np.mean(self.score_samples(X)))

    def sample(self, n_samples: int = 1, random_state: Any = None) -> Floats:
        """New rows, `(n_samples, n_features)`."""
        check_is_fitted(self)
        expect(_positive(n_samples), "n_samples to be a whole number above 0", repr(n_samples))
        seed = int(check_random_state(random_state).randint(2**31 - 1))
        found: Floats = draw(self.flow_, int(n_samples), Randomness(seed)).numpy()
        return found


def _leave_out(names: Sequence[str]) -> str:
    return "Leave them out, as sklearn.feature_selection.VarianceThreshold does with constant ones."


def _flags_its_own_rows(detector: FlowOutlierDetector) -> bool:
    if detector.novelty:
        raise AttributeError("Expected novelty=False for fit_predict, as the threshold is for new rows; got True.")
    return True


class FlowOutlierDetector(OutlierMixin, _FlowEstimator):  # type: ignore[misc]
    """Detects rows that are less likely than almost all others under a learned density.

    Args:
        contamination: the rate at which rows are flagged.
        novelty: with True, the held-out rows set the threshold, so that new rows like them are flagged at that rate.
            With False, all rows of `fit` set it, and that fraction of them is flagged, as in scikit-learn's other
            detectors; new rows are then flagged more often. Only then is there `fit_predict`, as for
            `LocalOutlierFactor`.
        steps, hidden, components, lr, validation_fraction, integers, random_state, device: as in `FlowDensity`.

    Attributes:
        flow_, n_validation_: as in `FlowDensity`.
        offset_: the log-likelihood below which a row is flagged.

    Example:
        >>> from expmflow.interop.sklearn import FlowOutlierDetector
        >>> X = torch.randn(200, 2).numpy()
        >>> FlowOutlierDetector(steps=20, random_state=0).fit(X).predict([[0.0, 0.1], [40.0, -40.0]])
        array([ 1, -1])
    """

    def __init__(
        self,
        *,
        contamination: float = 0.05,
        novelty: bool = True,
        steps: int | None = None,
        hidden: int | None = None,
        components: int | None = None,
        lr: float | None = None,
        validation_fraction: float = 0.2,
        integers: str | Sequence[int] = "auto",
        random_state: Any = None,
        device: str = "cpu",
    ) -> None:
        super().__init__(
            steps=steps,
            hidden=hidden,
            components=components,
            lr=lr,
            validation_fraction=validation_fraction,
            integers=integers,
            random_state=random_state,
            device=device,
        )
        self.contamination = contamination
        self.novelty = novelty

    @available_if(_flags_its_own_rows)  # type: ignore[untyped-decorator]
    def fit_predict(self, X: Any, y: Any = None) -> NDArray[np.int64]:
        """`fit`, then `predict` for the same rows."""
        return self.fit(X).predict(X)

    def decision_function(self, X: Any) -> Floats:
        """log p of each row minus `offset_`: negative if it is flagged."""
        return self.score_samples(X) - self.offset_

    def predict(self, X: Any) -> NDArray[np.int64]:
        """−1 for flagged rows, 1 for the others."""
        return np.where(self.decision_function(X) < 0, -1, 1)

    def _check_settings(self) -> None:
        super()._check_settings()
        share: Any = self.contamination
        fits = isinstance(share, Real) and 0 < float(share) <= 0.5
        expect(fits, "contamination above 0, and at most 0.5", repr(share))

    def _calibrate(self, training: Tensor, validation: Tensor) -> None:
        if self.novelty:
            scores = np.sort(self._log_prob(validation))
            place = max(1, math.floor(self.contamination * (len(scores) + 1)))  # among n rows and one more like them
            threshold = float(scores[place - 1])
        else:
            scores = self._log_prob(torch.cat([training, validation]))
            threshold = float(np.percentile(scores, 100 * self.contamination))
        self.offset_ = threshold - ROUNDING * max(1.0, abs(threshold))
