"""One meaning, whichever store: the same points and questions in memory, in the embedded engine, and on a named server.

`QDRANT_TEST_URL` names a server. Order is compared only where scores differ by more than the tolerance.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from qdrant_client import models

from hybridtei.errors import InvalidInput, InvalidPoint, StoreError
from hybridtei.outputs import Embeddings, SparseVectors
from hybridtei.search.query import hybrid_query, score_requests
from hybridtei.store.collection import check_fits
from hybridtei.store.plan import _quantization
from hybridtei.store.points import point_id, to_points
from hybridtei.tasks.rerank import PRESETS
from tests.search import fusion
from tests.store.stores import KINDS, SERVER, TOLERANCE, Asked, asked, embeddings, emptied, plan

COUNT = 40
IDS = [point_id("a", i) if i % 3 else i for i in range(COUNT)]
POINTS = embeddings(COUNT)
QUERY = embeddings(1, seed=7)
FLAGS: list[Any] = [True, False, 1, [0, True]]  # true and false are not 1 and 0
MODES: list[dict[str, Any]] = [
    {"mode": "dense"},
    {"mode": "sparse"},
    {"mode": "multivector"},
    {"mode": "rrf"},
    {"mode": "rrf", "k": 61, "weights": {"dense": 3.0, "sparse": 1.0}},
    {"mode": "rrf", "legs": ("dense", "sparse", "multivector")},
    {"mode": "weighted", "weights": "m3"},
    {"mode": "weighted", "weights": (1.0, 0.3)},
    {"mode": "dense", "rescore": "multivector"},
    {"mode": "rrf", "rescore": "multivector"},
    {"mode": "weighted", "weights": "m3-two", "rescore": "multivector"},
]


@pytest.fixture(scope="module", params=[kind for kind in KINDS if kind != "server" or SERVER])
def shared(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Asked]:
    with asked(request.param, tmp_path_factory.mktemp("vectors")) as given:
        yield given


@pytest.fixture
def empty(shared: Asked) -> Iterator[Asked]:
    with emptied(shared) as given:
        yield given


@pytest.fixture
def filled(empty: Asked) -> Asked:
    return fill(empty)


@pytest.fixture(scope="module")
def stored(shared: Asked) -> Iterator[Asked]:
    """Read only."""
    with emptied(shared) as given:
        yield fill(given)


def fill(empty: Asked) -> Asked:
    empty.run(empty.store.create(empty.name, plan(model_id="tiny")))
    payloads = [
        {"number": i, "tags": ["odd" if i % 2 else "even"], "nested": {"text": f"ä {i}"}, "flag": FLAGS[i % 4]}
        for i in range(COUNT)
    ]
    empty.run(empty.store.upsert(empty.name, to_points(POINTS, IDS, payloads)))
    return empty


def truth(name: str) -> fusion.Ranking:
    """Every point's exact score by one representation, best first, without what a sparse search leaves out."""
    if name == "dense":
        scores = POINTS.dense @ QUERY.dense[0]
    elif name == "sparse":
        scores = POINTS.sparse.to_dense() @ QUERY.sparse.to_dense()[0]
    else:
        query = QUERY.multivector.row(0)
        scores = np.array([(query @ rows.T).max(axis=1).sum() for rows in POINTS.multivector])
    kept = [i for i in np.argsort(-scores, kind="stable") if name != "sparse" or shares_an_index(int(i))]
    return fusion.Ranking([IDS[i] for i in kept], np.array([scores[i] for i in kept], dtype=np.float64))


def shares_an_index(i: int) -> bool:
    return bool(set(POINTS.sparse.row(i)[0].tolist()) & set(QUERY.sparse.row(0)[0].tolist()))


def first(ranking: fusion.Ranking, count: int) -> fusion.Ranking:
    return fusion.Ranking(ranking.ids[:count], ranking.scores[:count])


def expected(asked_for: dict[str, Any], prefetch_limit: int) -> dict[Any, float]:
    """id -> score, by numpy and `fusion`."""
    mode, weights = asked_for["mode"], asked_for.get("weights")
    if mode in ("dense", "sparse", "multivector"):
        answer = truth(mode)
        scores = dict(zip(answer.ids, answer.scores, strict=True))
    else:
        legs = asked_for.get("legs", ("dense", "sparse"))
        found = [first(truth(leg), prefetch_limit) for leg in legs]
        if mode == "rrf":
            fused = fusion.rrf(found, k=asked_for.get("k", 2), weights=list(weights.values()) if weights else None)
        else:
            weighing = PRESETS[weights].by_name if isinstance(weights, str) else dict(zip(legs, weights, strict=True))
            union = {given for ranking in found for given in ranking.ids}
            fused = fusion.weighted_sum([only(truth(leg), union, leg) for leg in weighing], list(weighing.values()))
        scores = dict(zip(fused.ids, fused.scores, strict=True))
    if asked_for.get("rescore"):
        best = sorted(scores, key=lambda given: -scores[given])[:prefetch_limit]
        everything = dict(zip(truth("multivector").ids, truth("multivector").scores, strict=True))
        return {given: everything[given] for given in best}
    return scores


def only(ranking: fusion.Ranking, union: set[Any], leg: str) -> fusion.Ranking:
    kept = [i for i, given in enumerate(ranking.ids) if given in union]
    scale = len(QUERY.multivector.row(0)) if leg == "multivector" else 1
    return fusion.Ranking([ranking.ids[i] for i in kept], ranking.scores[kept] / scale)


def check(found: list[models.ScoredPoint], scores: dict[Any, float], limit: int, offset: int = 0) -> None:
    """The found scores are the best expected ones, and each belongs to its point; ties may fall either way."""
    best = sorted(scores.values(), reverse=True)[offset : offset + limit]
    np.testing.assert_allclose([point.score for point in found], best, atol=TOLERANCE)
    np.testing.assert_allclose([point.score for point in found], [scores[point.id] for point in found], atol=TOLERANCE)


@pytest.mark.parametrize("asked_for", MODES, ids=str)
def test_every_mode_scores_as_its_formula(stored: Asked, asked_for: dict[str, Any]) -> None:
    request = hybrid_query(QUERY, limit=10, prefetch_limit=20, **asked_for)
    check(stored.run(stored.store.query(stored.name, request)), expected(asked_for, 20), 10)


@pytest.mark.parametrize("mode", ["dense", "rrf", "weighted"])
def test_a_page_continues_where_the_last_ended(stored: Asked, mode: str) -> None:
    request = hybrid_query(QUERY, mode=mode, limit=10, offset=15, prefetch_limit=1)  # type: ignore[arg-type]
    check(
        stored.run(stored.store.query(stored.name, request)),
        expected({"mode": mode, "weights": None if mode != "weighted" else (1, 1)}, 25),
        10,
        15,
    )


def test_exact_scores_of_given_points_make_a_true_sum(stored: Asked) -> None:
    requests = score_requests(QUERY, IDS[:12])
    answers = {leg: stored.run(stored.store.query(stored.name, request)) for leg, request in requests.items()}
    for leg, answer in answers.items():
        everything = truth(leg)
        scores = dict(zip(everything.ids, everything.scores, strict=True))
        assert {point.id for point in answer} == set(IDS[:12]) & set(everything.ids)
        np.testing.assert_allclose([p.score for p in answer], [scores[p.id] for p in answer], atol=TOLERANCE)


FLAGGED = models.FieldCondition(key="flag", match=models.MatchValue(value=True))
FILTERS: list[tuple[models.Filter, set[int]]] = [
    (models.Filter(must=[models.FieldCondition(key="number", range=models.Range(gte=30))]), set(range(30, COUNT))),
    (models.Filter(must=[models.FieldCondition(key="tags", match=models.MatchValue(value="odd"))]), set(range(1, COUNT, 2))),
    (models.Filter(must_not=[models.FieldCondition(key="number", match=models.MatchAny(any=[1, 2]))]), {0, *range(3, COUNT)}),
    (models.Filter(should=[models.HasIdCondition(has_id=IDS[3:5])]), {3, 4}),
    (
        models.Filter(must=[models.FieldCondition(key="number", match=models.MatchExcept(**{"except": [0]}))]),
        set(range(1, COUNT)),
    ),
    (models.Filter(must=[models.FieldCondition(key="nested.text", match=models.MatchValue(value="ä 7"))]), {7}),
    (models.Filter(must=[models.IsEmptyCondition(is_empty=models.PayloadField(key="absent"))]), set(range(COUNT))),
    (models.Filter(must=[models.HasVectorCondition(has_vector="dense")]), set(range(COUNT))),
    (models.Filter(must=[FLAGGED]), {i for i in range(COUNT) if i % 4 in (0, 3)}),
    (models.Filter(must_not=[FLAGGED]), {i for i in range(COUNT) if i % 4 in (1, 2)}),
    (
        models.Filter(must=[models.FieldCondition(key="flag", match=models.MatchValue(value=False))]),
        set(range(1, COUNT, 4)),
    ),
    (models.Filter(must=[models.FieldCondition(key="flag", match=models.MatchValue(value=1))]), set(range(2, COUNT, 4))),
    (models.Filter(must=[models.FieldCondition(key="flag", values_count=models.ValuesCount())]), set(range(COUNT))),
    (
        models.Filter(
            min_should=models.MinShould(
                conditions=[
                    models.FieldCondition(key="number", range=models.Range(lt=10)),
                    models.FieldCondition(key="tags", match=models.MatchValue(value="even")),
                ],
                min_count=2,
            )
        ),
        {0, 2, 4, 6, 8},
    ),
    (
        models.Filter(
            must=[
                models.Filter(should=[models.FieldCondition(key="number", match=models.MatchValue(value=5))]),
                models.FieldCondition(key="number", range=models.Range(gt=4, lte=6)),
            ]
        ),
        {5},
    ),
]


@pytest.mark.parametrize(("given", "numbers"), FILTERS)
def test_filters_choose_alike_in_queries_counts_and_scrolls(stored: Asked, given: models.Filter, numbers: set[int]) -> None:
    store, name = stored.store, stored.name
    assert stored.run(store.count(name, given)) == len(numbers)
    records, _ = stored.run(store.scroll(name, limit=COUNT, scroll_filter=given))
    assert {record.payload["number"] for record in records} == numbers
    for mode in ("dense", "rrf"):
        found = stored.run(store.query(name, hybrid_query(QUERY, mode=mode, limit=COUNT, query_filter=given)))  # type: ignore[arg-type]
        assert {point.payload["number"] for point in found} == numbers


def test_a_scroll_walks_all_points_once_in_the_order_of_ids(stored: Asked) -> None:
    seen: list[Any] = []
    offset = None
    while True:
        records, offset = stored.run(stored.store.scroll(stored.name, limit=7, offset=offset, with_payload=False))
        assert len(records) <= 7
        seen += [record.id for record in records]
        if offset is None:
            break
    assert seen == sorted(IDS, key=lambda given: (isinstance(given, str), given))


def test_vectors_and_payload_come_back_as_they_went(stored: Asked) -> None:
    records = stored.run(stored.store.retrieve(stored.name, [IDS[4], 10**9], with_vectors=True))
    assert [record.id for record in records] == [IDS[4]]
    assert records[0].payload == {"number": 4, "tags": ["even"], "nested": {"text": "ä 4"}, "flag": FLAGS[0]}
    vectors: Any = records[0].vector
    np.testing.assert_allclose(vectors["dense"], POINTS.dense[4], atol=1e-6)
    np.testing.assert_allclose(vectors["multivector"], POINTS.multivector.row(4), atol=1e-6)
    assert isinstance(vectors["sparse"], models.SparseVector)
    indices, values = POINTS.sparse.row(4)
    assert dict(zip(vectors["sparse"].indices, vectors["sparse"].values, strict=True)) == pytest.approx(
        dict(zip(indices.tolist(), values.tolist(), strict=True))
    )
    some = stored.run(stored.store.retrieve(stored.name, [IDS[4]], with_payload=False, with_vectors=["dense"]))
    assert set(some[0].vector) == {"dense"}
    assert not some[0].payload


def test_an_upsert_replaces_the_point_whole(filled: Asked) -> None:
    store, name = filled.store, filled.name
    alone = Embeddings(dense=POINTS.dense[:1])
    filled.run(store.upsert(name, to_points(alone, IDS[:1], [{"new": True}])))
    record = filled.run(store.retrieve(name, IDS[:1], with_vectors=True))[0]
    assert set(record.vector) == {"dense"}
    assert record.payload == {"new": True}
    assert filled.run(store.count(name)) == COUNT


def test_what_is_deleted_is_gone_and_nothing_else(filled: Asked) -> None:
    filled.run(filled.store.delete(filled.name, [*IDS[:5], 10**9]))
    records, _ = filled.run(filled.store.scroll(filled.name, limit=100))
    assert {record.id for record in records} == set(IDS[5:])


def test_optimising_changes_no_exact_answer(filled: Asked) -> None:
    filled.run(filled.store.optimize(filled.name))
    request = hybrid_query(QUERY, mode="dense", exact=True)
    check(filled.run(filled.store.query(filled.name, request)), expected({"mode": "dense"}, 100), 10)


def test_a_bad_point_harms_nothing(filled: Asked) -> None:
    good = to_points(embeddings(3, seed=3), [1000, 1001, 1002])
    bad = models.PointStruct.model_construct(
        id=1003, vector={"sparse": models.SparseVector.model_construct(indices=[1, 2], values=[1.0])}, payload={}
    )
    with pytest.raises(InvalidPoint, match=r"point 1003.*`sparse`: 2 indices and 1 values"):
        filled.run(filled.store.upsert(filled.name, [*good, bad]))
    assert filled.run(filled.store.count(filled.name)) == COUNT
    filled.run(filled.store.upsert(filled.name, good))
    assert filled.run(filled.store.count(filled.name)) == COUNT + 3


def test_points_without_words_are_not_found_by_words(filled: Asked) -> None:
    nothing = SparseVectors.from_dense(np.zeros((1, 50), dtype=np.float32))
    filled.run(filled.store.upsert(filled.name, to_points(Embeddings(dense=POINTS.dense[:1], sparse=nothing), [777])))
    found = filled.run(filled.store.query(filled.name, hybrid_query(QUERY, mode="sparse", limit=COUNT)))
    assert 777 not in {point.id for point in found}
    assert filled.run(filled.store.query(filled.name, hybrid_query(Embeddings(sparse=nothing), mode="sparse"))) == []


def test_idf_weighs_rare_words_more(empty: Asked) -> None:
    store, name = empty.store, empty.name
    empty.run(store.create(name, plan(idf=True)))
    empty.run(store.upsert(name, to_points(POINTS, IDS)))
    present = POINTS.sparse.to_dense() > 0
    count, having = present.any(axis=1).sum(), present.sum(axis=0)
    idf = np.log(1 + (count - having + 0.5) / (having + 0.5))
    scores = (POINTS.sparse.to_dense() * idf) @ QUERY.sparse.to_dense()[0]
    found = empty.run(store.query(name, hybrid_query(QUERY, mode="sparse", limit=10)))
    check(found, dict(zip(IDS, scores, strict=True)), 10)


@pytest.mark.parametrize("kind", ["scalar", "binary", "binary-2bit", "product", "turbo"])
def test_quantised_collections_answer_with_full_scores_when_rescored(empty: Asked, kind: Any) -> None:
    wanted = plan()
    vectors = {
        name: params.model_copy(update={"quantization_config": _quantization(kind)}) for name, params in wanted.vectors.items()
    }
    quantised = type(wanted)(vectors, wanted.sparse)
    empty.run(empty.store.create(empty.name, quantised))
    empty.run(empty.store.upsert(empty.name, to_points(POINTS, IDS)))
    empty.run(empty.store.optimize(empty.name))
    request = hybrid_query(QUERY, mode="dense", limit=COUNT, oversampling=2.0)
    check(empty.run(empty.store.query(empty.name, request)), expected({"mode": "dense"}, COUNT), COUNT)
    described = empty.run(empty.store.describe(empty.name))
    assert described.vectors["dense"].quantization_config == _quantization(kind)


def test_a_collection_says_how_it_is_laid_out_and_whose_it_is(empty: Asked) -> None:
    store, name, wanted = empty.store, empty.name, plan(model_id="tiny", tokenizer_sha256="ab")
    assert empty.run(store.describe(name)) is None
    assert name not in empty.run(store.collections())
    empty.run(store.create(name, wanted))
    assert name in empty.run(store.collections())
    described = empty.run(store.describe(name))
    check_fits(described, wanted)
    assert described.metadata == wanted.metadata
    assert described.vectors["multivector"].hnsw_config.payload_m == 0
    with pytest.raises(StoreError, match="already"):
        empty.run(store.create(name, wanted))
    empty.run(store.drop(name))
    empty.run(store.drop(name))
    assert empty.run(store.describe(name)) is None


def test_a_collection_made_anew_takes_other_vectors(empty: Asked) -> None:
    store, name = empty.store, empty.name
    empty.run(store.create(name, plan()))
    empty.run(store.upsert(name, to_points(POINTS, IDS)))
    empty.run(store.drop(name))
    narrow = type(plan())({"dense": models.VectorParams(size=4, distance=models.Distance.COSINE)}, {})
    empty.run(store.create(name, narrow))
    empty.run(store.upsert(name, to_points(Embeddings(dense=np.eye(4, dtype=np.float32)), [0, 1, 2, 3])))
    assert empty.run(store.count(name)) == 4


def test_what_is_not_there_is_named(empty: Asked) -> None:
    store, name = empty.store, empty.name
    calls = [
        lambda: store.upsert(name, to_points(POINTS, IDS)),
        lambda: store.query(name, hybrid_query(QUERY)),
        lambda: store.count(name),
        lambda: store.scroll(name, limit=1),
    ]
    for call in calls:
        with pytest.raises(StoreError, match=name):
            empty.run(call())
    with pytest.raises(InvalidInput, match="collection 'a/b': its name may not hold '/'"):
        empty.run(store.create("a/b", plan()))
    bad = type(plan())({"../x": models.VectorParams(size=4, distance=models.Distance.DOT)}, {})
    with pytest.raises(InvalidInput, match=r"vector '\.\./x': its name may not hold '/'"):
        empty.run(store.create(name, bad))


def test_queries_that_do_not_fit_are_refused(stored: Asked) -> None:
    narrow = Embeddings(dense=np.ones((1, 3), dtype=np.float32))
    with pytest.raises(StoreError):
        stored.run(stored.store.query(stored.name, hybrid_query(narrow, mode="dense")))
    uneven = models.SparseVector.model_construct(indices=[1, 2], values=[1.0])
    with pytest.raises(StoreError):
        stored.run(stored.store.query(stored.name, models.QueryRequest.model_construct(query=uneven, using="sparse", limit=3)))
    request = hybrid_query(QUERY, mode="dense")
    check(stored.run(stored.store.query(stored.name, request)), expected({"mode": "dense"}, 100), 10)


def test_an_id_of_another_type_is_named(stored):
    for ask in (stored.store.retrieve, stored.store.delete):
        with pytest.raises(InvalidPoint, match=r"point \['a'\]: `id` is list, should be an integer or a UUID"):
            stored.run(ask(stored.name, [["a"]]))
    with pytest.raises(InvalidPoint, match="`id` is list"):
        to_points(POINTS, [["a"]] * COUNT)
