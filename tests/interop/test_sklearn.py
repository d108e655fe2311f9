"""The estimators keep the conventions of scikit-learn, are the density they say, and flag at the rate they say."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch
from sklearn.base import clone
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import parametrize_with_checks

import expmflow as ef
from expmflow.interop.sklearn import FlowDensity, FlowOutlierDetector

SMALL = {"steps": 3, "hidden": 4, "components": 2}


@parametrize_with_checks(
    [FlowDensity(**SMALL), FlowOutlierDetector(**SMALL), FlowOutlierDetector(novelty=False, **SMALL)]
)
def test_conventions(estimator, check):
    check(estimator)


def rows(n: int, seed: int = 0) -> np.ndarray:
    """Of a Gaussian, in units far apart."""
    drawn = np.random.default_rng(seed).standard_normal((n, 2))
    return np.stack([1000 + 10 * drawn[:, 0], 1e-3 * (drawn[:, 0] + 0.5 * drawn[:, 1])], axis=1)


def test_a_density_of_a_gaussian_is_near_the_truth():
    """E log p of the truth is minus its entropy; nobody is above it, but by chance."""
    density = FlowDensity(steps=300, random_state=0).fit(rows(600))
    entropy = 1 + np.log(2 * np.pi) + np.log(10 * 0.5e-3)
    score = density.score(rows(2000, seed=1))
    assert -entropy - 0.15 < score < -entropy + 0.08
    samples = density.sample(2000, random_state=0)
    assert np.abs(samples.mean(0) - [1000, 0]).max() < 1.5
    assert np.corrcoef(samples.T)[0, 1] == pytest.approx(1 / np.sqrt(1.25), abs=0.05)
    assert np.array_equal(samples, density.sample(2000, random_state=0))


def test_it_is_the_flow_that_can_be_saved(tmp_path):
    density = FlowDensity(**SMALL, random_state=0).fit(rows(40))
    ef.save(density.flow_, tmp_path)
    x = rows(5, seed=2)
    with torch.no_grad():
        found = ef.load(tmp_path).log_prob(torch.from_numpy(x))
    assert np.array_equal(found.numpy(), density.score_samples(x))


@pytest.mark.parametrize("estimator", [FlowDensity(**SMALL), FlowOutlierDetector(**SMALL)], ids=["density", "outliers"])
def test_fitted_estimators_are_pickled_and_cloned(estimator):
    made = clone(estimator).set_params(random_state=3).fit(rows(40))
    again = pickle.loads(pickle.dumps(made))
    x = rows(7, seed=1)
    assert np.array_equal(made.score_samples(x), again.score_samples(x))
    assert np.array_equal(made.score_samples(x), clone(made).fit(rows(40)).score_samples(x))


def test_whole_numbers_have_probabilities():
    drawn = np.random.default_rng(0)
    X = np.stack([drawn.integers(0, 3, 200), drawn.standard_normal(200)], axis=1)
    density = FlowDensity(steps=60, random_state=0).fit(X)
    assert density.flow_.integers == (0,)
    assert np.array_equal(density.sample(50)[:, 0] % 1, np.zeros(50))
    assert density.score(X) < -np.log(3) - 1  # below minus the entropy, with room for what is learned by heart
    assert FlowDensity(**SMALL, integers=()).fit(X).flow_.integers == ()


class TestOutliers:
    def test_new_rows_are_flagged_at_the_nominal_rate(self):
        """Within three standard errors, of what is flagged and of the held-out rows that set the threshold."""
        detector = FlowOutlierDetector(contamination=0.1, steps=100, validation_fraction=0.4, random_state=0)
        detector.fit(rows(1000))
        rate = np.mean(detector.predict(rows(4000, seed=5)) == -1)
        error = np.sqrt(0.1 * 0.9 * (1 / 400 + 1 / 4000))
        assert abs(rate - 0.1) < 3 * error

    def test_without_novelty_the_share_of_the_rows_is_flagged(self):
        X = rows(300)
        found = FlowOutlierDetector(contamination=0.1, novelty=False, **SMALL, random_state=0).fit_predict(X)
        assert np.sum(found == -1) == 30
        with pytest.raises(AttributeError, match="fit_predict"):
            FlowOutlierDetector().fit_predict(X)

    def test_far_rows_are_flagged_however_far(self):
        detector = FlowOutlierDetector(**SMALL, random_state=0).fit(rows(100))
        assert list(detector.predict([[1000, 0], [2000, 0], [1e30, 1e30], [1e300, 0]])) == [1, -1, -1, -1]
        x = rows(9, seed=4)
        assert np.allclose(detector.decision_function(x), detector.score_samples(x) - detector.offset_)


def test_inside_a_pipeline_and_a_search():
    pipeline = make_pipeline(StandardScaler(), FlowDensity(**SMALL, random_state=0))
    search = GridSearchCV(pipeline, {"flowdensity__hidden": [2, 4]}, cv=2, error_score="raise").fit(rows(60))
    assert search.best_params_["flowdensity__hidden"] in (2, 4)
    assert np.isfinite(search.score(rows(10, seed=1)))
    flagged = (
        make_pipeline(StandardScaler(), FlowOutlierDetector(**SMALL, random_state=0)).fit(rows(60)).predict(rows(5))
    )
    assert set(flagged) <= {-1, 1}


def test_data_frames_keep_their_names():
    pandas = pytest.importorskip("pandas", reason="pandas is no dependency; scikit-learn's validation reads the frames")
    frame = pandas.DataFrame(rows(30), columns=["length", "width"])
    density = FlowDensity(**SMALL, random_state=0).fit(frame)
    assert list(density.feature_names_in_) == ["length", "width"]
    assert np.array_equal(
        density.score_samples(frame), FlowDensity(**SMALL, random_state=0).fit(frame).score_samples(frame)
    )
    with pytest.raises(ValueError, match="feature names"):
        density.score_samples(frame[["width", "length"]])
    with pytest.raises(ValueError, match=r"Expected columns that vary .* got width, of one value\. Leave"):
        FlowDensity().fit(frame.assign(width=1.0))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"steps": 0}, "Expected steps to be a whole number above 0, or None; got 0"),
        ({"hidden": 1.5}, "Expected hidden to be a whole number"),
        ({"validation_fraction": 1.0}, r"Expected validation_fraction between 0 and 1; got 1\.0"),
        ({"integers": "some"}, "Expected integers to be"),
        ({"contamination": 0.7}, r"Expected contamination above 0, and at most 0\.5; got 0\.7"),
    ],
)
def test_settings_that_make_no_sense(settings, message):
    with pytest.raises(ValueError, match=message):
        FlowOutlierDetector(**settings).fit(rows(20))


def test_columns_of_one_value_are_named():
    X = rows(20)
    X[:, 1] = 3
    with pytest.raises(ValueError, match=r"Expected columns that vary .* got column 1, of one value\. Leave"):
        FlowDensity().fit(X)
