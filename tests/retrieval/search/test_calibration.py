"""Probabilities of hits: which searches have a curve, and what their bounds drop."""

from dataclasses import replace

import numpy as np
import pytest

from hybridtei.errors import InvalidInput
from hybridtei.outputs import SparseVectors
from hybridtei.retrieval.search.calibration import probabilities, way_of
from hybridtei.retrieval.search.options import CheckedOptions, SearchOptions
from hybridtei.retrieval.search.searcher import Searcher
from hybridtei.retrieval.store.base import Stored
from hybridtei.retrieval.store.plan import CALIBRATION
from tests.retrieval.search.rankers import ByLength
from tests.retrieval.search.small_search import MODEL, TEXTS, filled, run

QUERY = "the search engine"
DEFAULT = "zscore, dense=1, sparse=0.7, multivector=1, of 100"
CURVE = [[-1.0, 0.1], [1.0, 0.5], [3.0, 0.9]]


def searched(encoder, curves, *, rank=None, blank=False, **options):
    """The result of a search in a collection with these curves. `blank`: it has a point without a
    text."""

    async def scenario():
        store = await filled(encoder)
        if curves is not None:
            await store.annotate("papers", {CALIBRATION: curves})
        if blank:
            vector = {"dense": encoder.encode([QUERY]).dense[0].tolist()}
            await store.upsert("papers", [Stored(99, {}, vector)])
        searcher = Searcher(store, encoder.named(MODEL))
        return await searcher.search("papers", QUERY, SearchOptions(**options), ranker=rank)

    return run(scenario())


RANK = ByLength("/models/by-length/", 100)


@pytest.mark.parametrize(
    ("options", "ranker", "way"),
    [
        ({"mode": "rrf"}, None, "rrf, dense=1, sparse=0.5, of 100, k=2"),
        ({"mode": "rrf", "rrf_k": 61}, None, "rrf, dense=1, sparse=0.5, of 100, k=61"),
        (
            {"mode": "weighted", "rescore": True},
            None,
            "weighted, dense=1, sparse=0.5, of 100, rescore",
        ),
        (
            {"mode": "zscore", "prefetch_limit": 50, "query_encoder": "table"},
            "org/name",
            "zscore, dense=1, sparse=0.5, of 50, table, rerank=name",
        ),
    ],
)
def test_a_way_is_named_by_all_that_changes_its_scores(options, ranker, way):
    assert way_of(CheckedOptions(**options), {"dense": 1.0, "sparse": 0.5}, ranker) == way


def test_a_probability_lies_on_the_line_between_two_points():
    assert probabilities(CURVE, [-5, -1, 0, 1, 2.5, 3, 9]) == [0.1, 0.1, 0.3, 0.5, 0.8, 0.9, 0.9]
    assert probabilities([(2.0, 0.4)], [-9, 9]) == [0.4, 0.4]


def test_hits_have_the_probability_of_their_score(encoder):
    found = searched(encoder, {DEFAULT: CURVE})
    assert found.way == DEFAULT
    for hit in found.hits:
        assert hit.probability == pytest.approx(
            np.interp(hit.score, *np.transpose(CURVE)), abs=1e-4
        )
    plain = searched(encoder, None)
    assert (plain.way, plain.hits[0].probability) == (None, None)
    assert [hit.score for hit in plain.hits] == [hit.score for hit in found.hits]


@pytest.mark.parametrize("curves", [3, {DEFAULT: []}, {DEFAULT: "high"}, {DEFAULT: [[1.0]]}])
def test_what_is_no_curve_is_none(encoder, curves):
    assert searched(encoder, curves).hits[0].probability is None


def test_improbable_hits_are_dropped_on_every_page(encoder):
    every = searched(encoder, {DEFAULT: CURVE}).hits
    middle = every[4].probability
    expected = [hit.id for hit in every if hit.probability >= middle]
    assert 5 <= len(expected) < len(TEXTS)
    pages = [
        searched(encoder, {DEFAULT: CURVE}, min_probability=middle, limit=3, offset=offset)
        for offset in (0, 3, 6, 9)
    ]
    assert [hit.id for page in pages for hit in page.hits] == expected
    assert [page.answerable for page in pages] == [True] * 4
    none = searched(encoder, {DEFAULT: CURVE}, min_probability=0.91)
    assert (none.hits, none.answerable) == ([], False)


def test_a_bound_needs_a_curve_of_this_way(encoder):
    with pytest.raises(InvalidInput) as refused:
        searched(encoder, {DEFAULT: CURVE}, min_probability=0.5, mode="dense")
    assert str(refused.value) == (
        "`min_probability` needs a curve of this way of searching (dense, dense=1, of 100); 'papers' has: "
        f"{DEFAULT}; `hybridtei eval FOLDER --calibrate` fits one"
    )
    with pytest.raises(InvalidInput, match="'papers' has: none"):
        searched(encoder, None, min_probability=0.5)


async def test_a_query_without_words_has_scores_of_another_meaning(encoder):
    none = SparseVectors(np.zeros(0, np.int64), np.zeros(0, np.float32), np.zeros(2, np.int64), 16)

    store = await filled(encoder)
    await store.annotate("papers", {CALIBRATION: {DEFAULT: CURVE}})
    searcher = Searcher(store, encoder.named(MODEL))
    embedded = replace(await searcher.embed("papers", [QUERY]), sparse=none)
    found = await searcher.find("papers", QUERY, embedded, 0, SearchOptions())
    assert (found.way, found.hits[0].probability) == (None, None)
    bound = SearchOptions(min_probability=0.01)
    bounded = await searcher.find("papers", QUERY, embedded, 0, bound)
    assert (bounded.hits, bounded.answerable) == ([], False)


def test_reranked_hits_have_the_curve_of_their_reranker(encoder):
    way = f"{DEFAULT}, rerank=by-length"
    curves = {way: [[0.0, 0.0], [1.0, 1.0]], DEFAULT: CURVE}
    found = searched(encoder, curves, rank=RANK, blank=True, limit=11)
    assert found.way == way
    *ranked, last = found.hits
    assert (last.id, last.probability) == (99, None)
    lengths = sorted(map(len, TEXTS), reverse=True)
    assert [hit.probability for hit in ranked] == pytest.approx(np.array(lengths) / 100, abs=1e-4)
    # A reranker without a name may be any
    unnamed = searched(encoder, curves, rank=ByLength(unit=100))
    assert unnamed.way.endswith("rerank=one without a name, or that stops at `budget_ms`")
    assert unnamed.hits[0].probability is None
    with pytest.raises(InvalidInput, match="rerank=one without a name, or that stops at"):
        searched(encoder, curves, rank=ByLength(unit=100), min_probability=0.5)


@pytest.mark.parametrize("bound", [{"rerank_threshold": 0.205}, {"min_probability": 0.205}])
def test_hits_below_a_bound_of_the_reranker_are_dropped(encoder, bound):
    curves = {f"{DEFAULT}, rerank=by-length": [[0.0, 0.0], [1.0, 1.0]]}
    expected = sorted((len(text) for text in TEXTS if len(text) >= 21), reverse=True)
    found = searched(encoder, curves, rank=RANK, blank=True, limit=11, **bound)
    assert [len(hit.payload["text"]) for hit in found.hits] == expected
    assert found.answerable is True
    (name,) = bound
    none = searched(encoder, curves, rank=RANK, blank=True, **{name: 0.9})
    assert (none.hits, none.answerable) == ([], False)
