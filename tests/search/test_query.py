"""What a request says; that stores answer it rightly is shown in test_stores.py."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from qdrant_client import models

from hybridtei.errors import InvalidInput
from hybridtei.outputs import Embeddings, SparseVectors
from hybridtei.search.query import hybrid_query, score_requests
from tests.store.stores import VOCABULARY, WIDTH, embeddings

QUERY = embeddings(3)
DENSE_ONLY = Embeddings(dense=QUERY.dense)
WORDLESS = Embeddings(dense=QUERY.dense, sparse=SparseVectors.from_dense(np.zeros((3, VOCABULARY), dtype=np.float32)))


@pytest.mark.parametrize(
    ("query", "settings", "message"),
    [
        (QUERY, {"mode": "best"}, "`mode` is 'best', should be one of dense, sparse, multivector, zscore, rrf, weighted"),
        (QUERY, {"limit": 0}, "`limit` is 0, should be between 1 and 100000"),
        (QUERY, {"prefetch_limit": 0}, "`prefetch_limit` is 0"),
        (QUERY, {"offset": -1}, "`offset` is -1"),
        (QUERY, {"k": 0}, "`k` is 0, should be between 1"),
        (QUERY, {"mode": "dense", "k": 2}, "`k` means nothing in mode 'dense'"),
        (QUERY, {"mode": "dense", "weights": (1, 2)}, "`weights` means nothing in mode 'dense'"),
        (QUERY, {"mode": "dense", "legs": ("dense",)}, "`legs` means nothing"),
        (QUERY, {"weights": (1.0,)}, "`weights` are 1, should be as many as there are legs: dense, sparse"),
        (QUERY, {"weights": (1.0, -1.0)}, "should be finite, 0 or more, and not all 0"),
        (QUERY, {"weights": (0.0, 0.0)}, "not all 0"),
        (QUERY, {"weights": (1.0, float("nan"))}, "finite"),
        (QUERY, {"weights": "best"}, "presets are m3, m3-long, m3-two"),
        (QUERY, {"weights": {"colbert": 1.0}}, "`weights` name 'colbert'"),
        (QUERY, {"legs": ()}, "`legs` are"),
        (QUERY, {"legs": ("dense", "dense")}, "each once"),
        (QUERY, {"legs": ("colbert",)}, "should be some of dense, sparse, multivector"),
        (QUERY, {"oversampling": 0.5}, "`oversampling` is 0.5"),
        (DENSE_ONLY, {"mode": "sparse"}, "the query has no sparse vector; it has dense"),
        (DENSE_ONLY, {"rescore": "multivector"}, "the query has no multivector vector"),
        (DENSE_ONLY, {"legs": ("dense", "sparse")}, "the query has no sparse vector"),
        (Embeddings(dense=np.full((1, WIDTH), np.nan, dtype=np.float32)), {"mode": "dense"}, "dense vector holds numbers that"),
    ],
)
def test_what_cannot_be_asked_is_named(query: Embeddings, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        hybrid_query(query, **settings)


def test_a_plain_fusion_needs_no_new_server() -> None:
    request = hybrid_query(QUERY)
    assert request.query == models.FusionQuery(fusion=models.Fusion.RRF)
    assert [prefetch.using for prefetch in request.prefetch] == ["dense", "sparse"]
    assert hybrid_query(QUERY, k=61).query == models.RrfQuery(rrf=models.Rrf(k=61))


def test_candidates_reach_as_far_as_the_page() -> None:
    for settings in ({"mode": "rrf"}, {"mode": "dense", "rescore": "multivector"}, {"mode": "weighted"}):
        request = hybrid_query(QUERY, limit=10, offset=500, **settings)
        assert (request.limit, request.offset) == (10, 500)
        assert all(prefetch.limit >= 510 for prefetch in request.prefetch)
        assert all(hybrid_query(QUERY, **settings).prefetch[0].limit >= 100 for _ in "a")


def test_each_row_asks_with_its_own_vectors() -> None:
    for row in range(3):
        request = hybrid_query(QUERY, row)
        assert request.prefetch[0].query == QUERY.dense[row].tolist()
        assert request.prefetch[1].query.indices == QUERY.sparse.row(row)[0].tolist()


def test_a_query_without_words_is_fused_without_them() -> None:
    assert [prefetch.using for prefetch in hybrid_query(WORDLESS).prefetch] == ["dense"]
    assert hybrid_query(WORDLESS, mode="sparse").query.indices == []


def test_what_weighs_nothing_takes_no_part() -> None:
    request = hybrid_query(QUERY, mode="weighted", weights={"dense": 1.0, "sparse": 0.0})
    assert [prefetch.using for prefetch in request.prefetch] == ["dense"]
    request = hybrid_query(QUERY, weights={"sparse": 2.0})
    assert [prefetch.using for prefetch in request.prefetch] == ["sparse"]
    assert request.query.rrf.weights == [2.0]


def test_a_weighted_multivector_never_scans_everything() -> None:
    request = hybrid_query(QUERY, mode="weighted", weights="m3")
    assert [prefetch.using for prefetch in request.prefetch] == ["dense", "sparse", "multivector"]
    for prefetch in request.prefetch:
        assert [inner.using for inner in prefetch.prefetch] == ["dense", "sparse"]
        assert prefetch.limit == 200


def test_exactness_and_oversampling_reach_every_search() -> None:
    request = hybrid_query(QUERY, exact=True, oversampling=3.0)
    for prefetch in request.prefetch:
        assert prefetch.params.exact
        assert prefetch.params.quantization == models.QuantizationSearchParams(rescore=True, oversampling=3.0)
    assert hybrid_query(QUERY, mode="dense").params is None


def test_score_requests_ask_for_all_and_only_these() -> None:
    requests = score_requests(QUERY, ["b", 3, 1, 3], row=1)
    assert list(requests) == ["dense", "sparse", "multivector"]
    for request in requests.values():
        assert request.limit == 3
        assert request.params.exact
        assert request.filter.must[0].has_id == [1, 3, "b"]
    assert list(score_requests(QUERY, [1], legs=("dense",))) == ["dense"]
