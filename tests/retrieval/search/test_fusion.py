"""Which vectors of a query take part in a search, what they weigh, and that ranks are fused as
Qdrant fuses them."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridtei.errors import InvalidInput
from hybridtei.inference.tasks.rerank import PRESETS
from hybridtei.outputs import Embeddings, SparseVectors
from hybridtei.retrieval.search.fusion import (
    FEW,
    complete,
    legs_of,
    normalised,
    reciprocal_ranks,
    scale_of,
    weighted_sum,
)
from hybridtei.retrieval.search.options import SearchOptions
from tests.retrieval.search.fusion import Ranking, rrf
from tests.retrieval.store.stores import TOLERANCE, VOCABULARY, WIDTH, embeddings

QUERY = embeddings(3)
DENSE_ONLY = Embeddings(dense=QUERY.dense)
NO_TOKENS = Embeddings(dense=QUERY.dense, sparse=QUERY.sparse)
WORDLESS = Embeddings(
    dense=QUERY.dense, sparse=SparseVectors.from_dense(np.zeros((3, VOCABULARY), dtype=np.float32))
)
SCORE = st.floats(-100, 100, width=32)


def legs(query=QUERY, *, is_packed=False, mode="rrf", **fields):
    return legs_of(query, 0, SearchOptions(mode=mode, **fields), is_packed=is_packed)


@pytest.mark.parametrize(
    ("query", "settings", "message"),
    [
        (
            QUERY,
            {"mode": "best"},
            "`mode` is 'best': expected one of `dense`, `multivector`, `rrf`, `sparse`, `weighted`, `zscore`",
        ),
        (QUERY, {"limit": 0}, "`limit` is 0: expected `int` >= 1"),
        (QUERY, {"prefetch_limit": 0}, "`prefetch_limit` is 0"),
        (QUERY, {"offset": -1}, "`offset` is -1"),
        (QUERY, {"rrf_k": 0}, "`rrf_k` is 0: expected `int` >= 1"),
        (QUERY, {"mode": "dense", "rrf_k": 2}, "`rrf_k` means nothing in mode 'dense'"),
        (QUERY, {"mode": "dense", "weights": [1, 2]}, "`weights` means nothing in mode 'dense'"),
        (QUERY, {"mode": "dense", "legs": ["dense"]}, "`legs` means nothing"),
        (
            QUERY,
            {"weights": [1.0]},
            "`weights` are 1, should be as many as there are legs: dense, sparse",
        ),
        (QUERY, {"weights": [1.0, -1.0]}, "should be finite, 0 or more, and not all 0"),
        (QUERY, {"weights": [0.0, 0.0]}, "not all 0"),
        (QUERY, {"weights": [1.0, float("nan")]}, "finite"),
        (QUERY, {"weights": "best"}, "presets are m3, m3-long, m3-two"),
        (QUERY, {"weights": {"colbert": 1.0}}, "`weights` name 'colbert'"),
        (QUERY, {"legs": []}, "`legs` are"),
        (QUERY, {"legs": ["dense", "dense"]}, "each once"),
        (QUERY, {"legs": ["colbert"]}, "should be some of dense, sparse, multivector"),
        (QUERY, {"oversampling": 0.5}, "`oversampling` is 0.5"),
        (DENSE_ONLY, {"mode": "sparse"}, "the query has no sparse vector; it has dense"),
        (DENSE_ONLY, {"rescore": True}, "the query has no multivector vector"),
        (
            Embeddings(dense=np.full((1, WIDTH), np.nan, dtype=np.float32)),
            {"mode": "dense"},
            "dense vector holds numbers that",
        ),
        (
            QUERY,
            {"mode": "multivector", "is_packed": True},
            "search in mode zscore or weighted, or with `rescore`",
        ),
        (
            QUERY,
            {"legs": ["dense", "multivector"], "is_packed": True},
            "which can score candidates but not find them",
        ),
    ],
)
def test_what_cannot_be_asked_is_named(query, settings, message):
    with pytest.raises(InvalidInput, match=message):
        legs(query, **settings)


def test_a_query_without_words_is_fused_without_them():
    assert legs(WORDLESS).finders == ["dense"]
    assert legs(WORDLESS, mode="sparse").finders == ["sparse"]
    assert legs(Embeddings(sparse=WORDLESS.sparse)).finders == []


def test_what_weighs_nothing_takes_no_part():
    assert legs(mode="weighted", weights={"dense": 1.0, "sparse": 0.0}).weights == {"dense": 1.0}
    assert legs(weights={"sparse": 2.0}).weights == {"sparse": 2.0}


@pytest.mark.parametrize(
    ("fields", "weights"),
    [
        ({"mode": "dense"}, {"dense": 1.0}),
        ({"mode": "rrf"}, {"dense": 1.0, "sparse": 1.0}),
        ({"mode": "rrf", "legs": ["sparse", "multivector"]}, {"sparse": 1.0, "multivector": 1.0}),
        ({"mode": "weighted"}, {"dense": 1.0, "sparse": 1.0}),
        ({"mode": "weighted", "weights": [1, 2]}, {"dense": 1.0, "sparse": 2.0}),
        ({"mode": "weighted", "weights": {"multivector": 2.0}}, {"multivector": 2.0}),
        (
            {"mode": "weighted", "weights": "m3"},
            {"dense": 1.0, "sparse": 0.3, "multivector": 1.0},
        ),
    ],
)
def test_each_leg_has_the_weight_that_is_asked(fields, weights):
    assert legs(**fields).weights == pytest.approx(weights)


@pytest.mark.parametrize(
    ("query", "weights"),
    [
        (QUERY, {"dense": 1.0, "sparse": 0.7, "multivector": 1.0}),
        (NO_TOKENS, {"dense": 1.0, "sparse": 0.5}),
        (DENSE_ONLY, {"dense": 1.0}),
    ],
)
def test_zscore_has_weights_of_its_own(query, weights):
    assert legs(query, mode="zscore").weights == weights


@given(st.lists(st.tuples(SCORE, SCORE), min_size=1, max_size=5), st.floats(0, 9), st.floats(0, 9))
def test_a_weighted_sum_is_numpys_and_a_missing_score_adds_nothing(scores, first, second):
    columns = dict(zip(("dense", "sparse"), np.array(scores).T, strict=True))
    wanted = first * columns["dense"] + second * columns["sparse"]
    weights = {"dense": first, "sparse": second}
    assert weighted_sum(columns, weights) == pytest.approx(wanted)
    missing = columns | {"sparse": np.full(len(scores), np.nan)}
    assert weighted_sum(missing, weights) == pytest.approx(first * columns["dense"])


@pytest.mark.parametrize("is_packed", [False, True])
def test_a_weighed_multivector_never_scans_everything(is_packed):
    for asked in (
        legs(mode="weighted", weights="m3", is_packed=is_packed),
        legs(mode="zscore", is_packed=is_packed),
    ):
        assert (list(asked.weights), asked.finders) == (
            ["dense", "sparse", "multivector"],
            ["dense", "sparse"],
        )


LISTS = st.lists(
    st.lists(
        st.tuples(st.integers(0, 12), st.floats(-5, 5, width=32)),
        max_size=8,
        unique_by=lambda pair: pair[0],
    ),
    min_size=1,
    max_size=4,
)


@given(LISTS, st.integers(1, 70), st.data())
def test_ranks_are_fused_as_qdrant_fuses_them(lists, k, data):
    weights = data.draw(st.lists(st.floats(1e-3, 9), min_size=len(lists), max_size=len(lists)))
    rankings, places = [], {}
    for leg, pairs in enumerate(lists):
        ids, scores = (
            zip(*sorted(pairs, key=lambda pair: -pair[1]), strict=True) if pairs else ((), ())
        )
        rankings.append(Ranking(ids, np.array(scores)))
        places[str(leg)] = {identity: place for place, identity in enumerate(ids, 1)}
    wanted = rrf(rankings, k=k, weights=weights)
    columns = {
        leg: np.array([of_leg.get(identity, np.nan) for identity in wanted.ids])
        for leg, of_leg in places.items()
    }
    ours = reciprocal_ranks(columns, {str(leg): weight for leg, weight in enumerate(weights)}, k)
    assert ours.tolist() == pytest.approx(wanted.scores, abs=TOLERANCE)


def test_presets_are_the_published_ones():
    assert list(PRESETS["m3"].by_name.values()) == [1.0, 0.3, 1.0]
    assert list(PRESETS["m3-long"].by_name.values()) == [0.15, 0.5, 0.35]


@given(st.lists(SCORE, min_size=FEW, max_size=30))
def test_enough_scores_have_numpys_statistics(scores):
    column = np.array(scores)
    mean, deviation = scale_of(column)
    assert mean == pytest.approx(column.mean())
    if column.std() > 1e-3:
        assert deviation == pytest.approx(column.std())
    else:
        assert np.ptp(normalised(column, mean, deviation, 1.0)) < 1e3


@given(st.floats(1e-3, 100), st.integers(1, 20))
def test_equal_scores_are_normalised_to_equal_numbers(score, count):
    column = np.full(count, score)
    parts = normalised(column, *scale_of(column), 2.0)
    share = max(FEW - count, 0) / (FEW - 1)
    assert parts == pytest.approx(np.full(count, 2.0 * share), abs=1e-6)


@given(st.floats(0, 10), st.floats(0.01, 10))
def test_each_further_score_changes_the_scale_alike_and_none_makes_it_jump(low, width):
    """Columns of an even number of scores, all with one mean, deviation and best score."""
    columns = [np.tile([low, low + width], count // 2) for count in range(2, FEW + 3, 2)]
    scales = [scale_of(column) for column in columns]
    best = [
        normalised(column, *scale, 1.0).max() for column, scale in zip(columns, scales, strict=True)
    ]
    for values in (np.log([deviation for _, deviation in scales]), best):
        *steps, last = np.diff(values)
        assert steps == pytest.approx([steps[0]] * len(steps), abs=1e-9)
        assert last == pytest.approx(0, abs=1e-9)


def test_a_candidate_without_a_score_has_the_lowest():
    missing = float("nan")
    assert complete(np.array([0.5, missing, -0.3, 0.2])).tolist() == [0.5, -0.3, -0.3, 0.2]
    assert complete(np.array([missing, missing])).tolist() == [0.0, 0.0]
