"""Curves of probabilities: against the definition of isotonic regression, scipy's function, and
errors counted by hand."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import isotonic_regression

from hybridtei.errors import InvalidInput
from hybridtei.retrieval.evaluate.calibrate import (
    BINS,
    MAX_POINTS,
    calibrated,
    calibration_error,
    fit,
    split,
)
from hybridtei.retrieval.search.calibration import probabilities

# Few different scores, so that many are equal
SCORES = st.one_of(st.floats(-100, 100), st.integers(-3, 3).map(float))
JUDGED = st.lists(st.tuples(SCORES, st.booleans()), min_size=1, max_size=60)


@given(JUDGED, st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=20))
def test_a_curve_rises_within_0_and_1(judged, asked):
    scores, relevant = np.array(judged, np.float64).T
    curve = fit(scores, relevant.astype(bool))
    assert 1 <= len(curve) <= MAX_POINTS
    for column in zip(*curve, strict=True):
        assert list(column) == sorted(column)
    values = probabilities(curve, sorted(asked))
    assert values == sorted(values)
    assert all(0 <= value <= 1 for value in values)


def by_definition(shares, weights):
    """The isotonic fit: at each place the greatest, over beginnings before it, of the least mean to
    an end behind it."""

    def mean(begin, end):
        return np.average(shares[begin : end + 1], weights=weights[begin : end + 1])

    count = len(shares)
    return [
        max(min(mean(begin, end) for end in range(place, count)) for begin in range(place + 1))
        for place in range(count)
    ]


@pytest.mark.parametrize("seed", range(5))
def test_points_are_the_blocks_of_isotonic_regression(seed):
    random = np.random.default_rng(seed)
    scores = random.integers(0, 15, 80) / 4
    relevant = random.random(80) < scores / 4
    curve = fit(scores, relevant)
    values = np.unique(scores)
    weights = np.array([(scores == value).sum() for value in values])
    shares = np.array([relevant[scores == value].mean() for value in values])
    fitted = by_definition(shares, weights)
    assert isotonic_regression(shares, weights=weights).x == pytest.approx(fitted)
    blocks = np.unique(np.round(fitted, 9))
    assert [probability for _, probability in curve] == pytest.approx(blocks, abs=1e-6)
    for score, probability in curve:
        block = np.isin(scores, values[np.isclose(fitted, probability, atol=1e-6)])
        assert probability == pytest.approx(relevant[block].mean(), abs=1e-6)
        assert score == pytest.approx(scores[block].mean(), abs=1e-6)


def test_a_curve_of_many_blocks_keeps_both_ends():
    random = np.random.default_rng(0)
    scores = random.random(50_000)
    relevant = random.random(50_000) < scores**2
    curve = fit(scores, relevant)
    assert len(curve) == MAX_POINTS
    asked = np.linspace(0.05, 0.95, 19)
    assert probabilities(curve, asked) == pytest.approx(asked**2, abs=0.05)
    fitted = isotonic_regression(relevant[np.argsort(scores)]).x
    assert [curve[0][1], curve[-1][1]] == pytest.approx([fitted[0], fitted[-1]], abs=1e-6)


def test_the_error_is_the_mean_gap_of_ten_bins():
    random = np.random.default_rng(1)
    values = np.concatenate([random.random(500), [0.0, 1.0, 1.0]])
    relevant = random.random(503) < values**2
    expected = 0.0
    for place in range(BINS):
        low, high = place / BINS, (place + 1) / BINS
        inside = (values >= low) & ((values < high) | (place == BINS - 1))
        expected += abs(values[inside].mean() - relevant[inside].mean()) * inside.mean()
    assert calibration_error(values, relevant) == pytest.approx(expected)
    assert calibration_error(relevant.astype(float), relevant) == 0


def pairs_of(queries, seed=0):
    random = np.random.default_rng(seed)
    places = np.repeat(np.arange(queries), 20)
    scores = random.normal(size=20 * queries)
    relevant = random.random(20 * queries) < 1 / (1 + np.exp(-scores))
    return np.stack([scores, relevant, places, np.tile(np.arange(20), queries)], 1)


def test_the_error_is_of_queries_that_were_not_fitted():
    pairs = pairs_of(200)
    calibration = calibrated("dense", pairs)
    scores, relevant, places, ranks = pairs.T
    half = split(places)
    assert len(np.unique(places[half])) == 100
    assert not set(places[half]) & set(places[~half])
    page = ~half & (ranks < 10)
    assert page.sum() == 1000
    values = np.array(probabilities(fit(scores[half], relevant[half]), scores[page]))
    assert calibration.error == pytest.approx(calibration_error(values, relevant[page]), abs=1e-6)
    assert 0 < calibration.error < 0.08
    assert calibration.curve == fit(scores, relevant)
    assert (calibration.pairs, calibration.relevant) == (4000, relevant.sum())


@pytest.mark.parametrize("pairs", [pairs_of(10) * [1, 0, 1, 1], pairs_of(1), np.zeros((0, 4))])
def test_judgements_of_other_documents_are_told(pairs):
    with pytest.raises(InvalidInput, match=f"of {len(pairs)} hits are judged relevant"):
        calibrated("dense", pairs)
