"""One meaning, whichever store: the same points and questions in the embedded engine, by both of a
server's protocols, and on a named server.

`QDRANT_TEST_URL` names a server. Order is compared only where scores differ by more than the
tolerance.
"""

import numpy as np
import pytest
from msgspec.structs import replace
from qdrant_client import models

from hybridtei.errors import InvalidInput, InvalidPoint, StoreError
from hybridtei.outputs import Embeddings, SparseVectors
from hybridtei.retrieval.store.base import VectorParams
from hybridtei.retrieval.store.collection import check_fits
from hybridtei.retrieval.store.plan import _quantization, plan_of
from hybridtei.retrieval.store.points import point_id, to_points
from hybridtei.retrieval.store.query import of_ids
from tests.near import near
from tests.retrieval.search import fusion
from tests.retrieval.store.stores import (
    KINDS,
    TOLERANCE,
    asked,
    embeddings,
    emptied,
    leg,
    plan,
)

COUNT = 40
IDS = [point_id("a", i) if i % 3 else i for i in range(COUNT)]
POINTS = embeddings(COUNT)
QUERY = embeddings(1, seed=7)
# True and false are not 1 and 0
FLAGS = [True, False, 1, [0, True]]
LEGS = ("dense", "sparse", "multivector")


@pytest.fixture(scope="module", params=KINDS)
def shared(request, tmp_path_factory):
    with asked(request.param, tmp_path_factory.mktemp("vectors")) as given:
        yield given


@pytest.fixture
def empty(shared):
    with emptied(shared) as given:
        yield given


@pytest.fixture
def filled(empty):
    return fill(empty)


@pytest.fixture(scope="module")
def stored(shared):
    """Read only."""
    with emptied(shared) as given:
        yield fill(given)


def fill(empty):
    empty.run(empty.store.create(empty.name, plan(model_id="tiny")))
    payloads = [
        {
            "number": i,
            "tags": ["odd" if i % 2 else "even"],
            "nested": {"text": f"ä {i}"},
            "flag": FLAGS[i % 4],
        }
        for i in range(COUNT)
    ]
    empty.run(empty.store.upsert(empty.name, to_points(POINTS, IDS, payloads)))
    return empty


def truth(name):
    """Every point's exact score by one representation, best first, without what a sparse search
    leaves out."""
    if name == "dense":
        scores = POINTS.dense @ QUERY.dense[0]
    elif name == "sparse":
        scores = POINTS.sparse.to_dense() @ QUERY.sparse.to_dense()[0]
    else:
        query = QUERY.multivector.row(0)
        scores = np.array([(query @ rows.T).max(axis=1).sum() for rows in POINTS.multivector])
    kept = [
        i for i in np.argsort(-scores, kind="stable") if name != "sparse" or shares_an_index(int(i))
    ]
    return fusion.Ranking(
        [IDS[i] for i in kept], np.array([scores[i] for i in kept], dtype=np.float64)
    )


def shares_an_index(i):
    return bool(set(POINTS.sparse.row(i)[0].tolist()) & set(QUERY.sparse.row(0)[0].tolist()))


def expected(name):
    """id -> score, by numpy."""
    return dict(zip(truth(name).ids, truth(name).scores, strict=True))


def check(found, scores, limit):
    """The found scores are the best expected ones, and each belongs to its point; ties may fall
    either way."""
    best = sorted(scores.values(), reverse=True)[:limit]
    near([point.score for point in found], best, TOLERANCE)
    near([point.score for point in found], [scores[point.id] for point in found], TOLERANCE)


@pytest.mark.parametrize("name", LEGS)
def test_every_vector_scores_as_numpy_does(stored, name):
    check(stored.run(stored.store.query(stored.name, leg(QUERY, name))), expected(name), 10)


@pytest.mark.parametrize("name", LEGS)
def test_exact_scores_of_given_points(stored, name):
    answer = stored.run(
        stored.store.query(stored.name, leg(QUERY, name, 12, filter=of_ids(IDS[:12]), exact=True))
    )
    scores = expected(name)
    assert {point.id for point in answer} == set(IDS[:12]) & set(scores)
    near([p.score for p in answer], [scores[p.id] for p in answer], TOLERANCE)


def test_a_scroll_walks_all_points_once_in_the_order_of_ids(stored):
    seen = []
    offset = None
    while True:
        records, offset = stored.run(
            stored.store.scroll(stored.name, limit=7, offset=offset, with_payload=False)
        )
        assert len(records) <= 7
        seen += [record.id for record in records]
        if offset is None:
            break
    assert seen == sorted(IDS, key=lambda given: (isinstance(given, str), given))


def test_vectors_and_payload_come_back_as_they_went(stored):
    records = stored.run(stored.store.retrieve(stored.name, [IDS[4], 10**9], with_vectors=True))
    assert [record.id for record in records] == [IDS[4]]
    assert records[0].payload == {
        "number": 4,
        "tags": ["even"],
        "nested": {"text": "ä 4"},
        "flag": FLAGS[0],
    }
    vectors = records[0].vector
    near(vectors["dense"], POINTS.dense[4], 1e-6)
    near(vectors["multivector"], POINTS.multivector.row(4), 1e-6)
    indices, values = POINTS.sparse.row(4)
    assert dict(
        zip(vectors["sparse"]["indices"], vectors["sparse"]["values"], strict=True)
    ) == pytest.approx(dict(zip(indices.tolist(), values.tolist(), strict=True)))
    some = stored.run(
        stored.store.retrieve(stored.name, [IDS[4]], with_payload=False, with_vectors=["dense"])
    )
    assert set(some[0].vector) == {"dense"}
    assert not some[0].payload


def test_an_upsert_replaces_the_point_whole(filled):
    store, name = filled.store, filled.name
    alone = Embeddings(dense=POINTS.dense[:1])
    filled.run(store.upsert(name, to_points(alone, IDS[:1], [{"new": True}])))
    record = filled.run(store.retrieve(name, IDS[:1], with_vectors=True))[0]
    assert set(record.vector) == {"dense"}
    assert record.payload == {"new": True}
    assert filled.run(store.count(name)) == COUNT


def test_what_is_deleted_is_gone_and_nothing_else(filled):
    filled.run(filled.store.delete(filled.name, [*IDS[:5], 10**9]))
    records, _ = filled.run(filled.store.scroll(filled.name, limit=100))
    assert {record.id for record in records} == set(IDS[5:])


def test_optimising_changes_no_exact_answer(filled):
    filled.run(filled.store.optimize(filled.name))
    request = leg(QUERY, exact=True)
    check(filled.run(filled.store.query(filled.name, request)), expected("dense"), 10)


def test_a_bad_point_harms_nothing(filled):
    good = to_points(embeddings(3, seed=3), [1000, 1001, 1002])
    bad = models.PointStruct.model_construct(
        id=1003,
        vector={"sparse": models.SparseVector.model_construct(indices=[1, 2], values=[1.0])},
        payload={},
    )
    with pytest.raises(InvalidPoint, match=r"point 1003.*`sparse`: 2 indices and 1 values"):
        filled.run(filled.store.upsert(filled.name, [*good, bad]))
    assert filled.run(filled.store.count(filled.name)) == COUNT
    filled.run(filled.store.upsert(filled.name, good))
    assert filled.run(filled.store.count(filled.name)) == COUNT + 3


def test_points_without_words_are_not_found_by_words(filled):
    nothing = SparseVectors.from_dense(np.zeros((1, 50), dtype=np.float32))
    filled.run(
        filled.store.upsert(
            filled.name, to_points(Embeddings(dense=POINTS.dense[:1], sparse=nothing), [777])
        )
    )
    found = filled.run(filled.store.query(filled.name, leg(QUERY, "sparse", COUNT)))
    assert 777 not in {point.id for point in found}
    assert (
        filled.run(filled.store.query(filled.name, leg(Embeddings(sparse=nothing), "sparse"))) == []
    )


def test_idf_weighs_rare_words_more(empty):
    store, name = empty.store, empty.name
    empty.run(store.create(name, plan(idf=True)))
    empty.run(store.upsert(name, to_points(POINTS, IDS)))
    present = POINTS.sparse.to_dense() > 0
    count, having = present.any(axis=1).sum(), present.sum(axis=0)
    idf = np.log(1 + (count - having + 0.5) / (having + 0.5))
    scores = (POINTS.sparse.to_dense() * idf) @ QUERY.sparse.to_dense()[0]
    found = empty.run(store.query(name, leg(QUERY, "sparse")))
    check(found, dict(zip(IDS, scores, strict=True)), 10)


@pytest.mark.parametrize("kind", ["scalar", "binary", "binary-2bit", "product", "turbo"])
def test_quantised_collections_answer_with_full_scores_when_rescored(empty, kind):
    wanted = plan()
    vectors = {
        name: replace(params, quantization_config=_quantization(kind))
        for name, params in wanted.vectors.items()
    }
    quantised = type(wanted)(vectors, wanted.sparse)
    empty.run(empty.store.create(empty.name, quantised))
    empty.run(empty.store.upsert(empty.name, to_points(POINTS, IDS)))
    empty.run(empty.store.optimize(empty.name))
    request = leg(QUERY, limit=COUNT, oversampling=2.0)
    check(empty.run(empty.store.query(empty.name, request)), expected("dense"), COUNT)
    described = empty.run(empty.store.describe(empty.name))
    assert plan_of(described).quantization == kind


@pytest.mark.parametrize("datatype", ["float16", "turbo8", "turbo4"])
def test_numbers_of_fewer_bits_give_nearly_the_same_scores(empty, datatype):
    wanted = plan()
    vectors = {name: replace(params, datatype=datatype) for name, params in wanted.vectors.items()}
    empty.run(empty.store.create(empty.name, type(wanted)(vectors, wanted.sparse)))
    empty.run(empty.store.upsert(empty.name, to_points(POINTS, IDS)))
    described = empty.run(empty.store.describe(empty.name))
    assert plan_of(described).datatype == datatype
    hits = empty.run(empty.store.query(empty.name, leg(QUERY, limit=COUNT)))
    scores = expected("dense")
    assert [hit.score for hit in hits] == pytest.approx([scores[hit.id] for hit in hits], abs=0.2)


def test_a_collection_says_how_it_is_laid_out_and_whose_it_is(empty):
    store, name, wanted = empty.store, empty.name, plan(model_id="tiny", tokenizer_sha256="ab")
    assert empty.run(store.describe(name)) is None
    assert name not in empty.run(store.collections())
    empty.run(store.create(name, wanted))
    assert name in empty.run(store.collections())
    described = empty.run(store.describe(name))
    check_fits(described, wanted)
    assert described.metadata == wanted.metadata
    assert described.vectors["multivector"].hnsw_config["payload_m"] == 0
    with pytest.raises(StoreError, match="already"):
        empty.run(store.create(name, wanted))
    empty.run(store.drop(name))
    empty.run(store.drop(name))
    assert empty.run(store.describe(name)) is None


def test_a_collection_made_anew_takes_other_vectors(empty):
    store, name = empty.store, empty.name
    empty.run(store.create(name, plan()))
    empty.run(store.upsert(name, to_points(POINTS, IDS)))
    empty.run(store.drop(name))
    narrow = type(plan())({"dense": VectorParams(size=4, distance="Cosine")}, {})
    empty.run(store.create(name, narrow))
    empty.run(
        store.upsert(name, to_points(Embeddings(dense=np.eye(4, dtype=np.float32)), [0, 1, 2, 3]))
    )
    assert empty.run(store.count(name)) == 4


def test_what_is_not_there_is_named(empty):
    store, name = empty.store, empty.name
    calls = [
        lambda: store.upsert(name, to_points(POINTS, IDS)),
        lambda: store.query(name, leg(QUERY)),
        lambda: store.count(name),
        lambda: store.scroll(name, limit=1),
    ]
    for call in calls:
        with pytest.raises(StoreError, match=name):
            empty.run(call())
    with pytest.raises(InvalidInput, match="collection 'a/b': its name may not hold '/'"):
        empty.run(store.create("a/b", plan()))
    bad = type(plan())({"../x": VectorParams(size=4, distance="Dot")}, {})
    with pytest.raises(InvalidInput, match=r"vector '\.\./x': its name may not hold '/'"):
        empty.run(store.create(name, bad))


def test_queries_that_do_not_fit_are_refused(stored):
    narrow = Embeddings(dense=np.ones((1, 3), dtype=np.float32))
    with pytest.raises(StoreError):
        stored.run(stored.store.query(stored.name, leg(narrow)))
    uneven = {"indices": np.array([1, 2], np.uint32), "values": np.ones(1, np.float32)}
    with pytest.raises(StoreError):
        stored.run(stored.store.query(stored.name, replace(leg(QUERY, "sparse"), vector=uneven)))
    request = leg(QUERY)
    check(stored.run(stored.store.query(stored.name, request)), expected("dense"), 10)


def test_an_id_of_another_type_is_named(stored):
    for ask in (stored.store.retrieve, stored.store.delete):
        with pytest.raises(
            InvalidPoint, match=r"point \['a'\]: `id` is list, should be an integer or a UUID"
        ):
            stored.run(ask(stored.name, [["a"]]))
    with pytest.raises(InvalidPoint, match="`id` is list"):
        to_points(POINTS, [["a"]] * COUNT)
