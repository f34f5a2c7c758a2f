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
from hybridtei.retrieval.store.base import CollectionSchema, VectorParams
from hybridtei.retrieval.store.collection import check_fits
from hybridtei.retrieval.store.plan import _quantization, plan_of
from hybridtei.retrieval.store.points import point_id, to_points
from hybridtei.retrieval.store.query import of_ids
from tests.near import near
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
    payloads = [payload_of(i) for i in range(COUNT)]
    empty.fill(to_points(POINTS, IDS, payloads), plan(model_id="tiny"))
    return empty


def payload_of(i):
    return {
        "number": i,
        "tags": ["odd" if i % 2 else "even"],
        "nested": {"text": f"ä {i}"},
        "flag": FLAGS[i % 4],
    }


def expected(name):
    """id -> score, by numpy, of every point that a search can find."""
    if name == "dense":
        scores = POINTS.dense @ QUERY.dense[0]
    elif name == "sparse":
        scores = POINTS.sparse.to_dense() @ QUERY.sparse.to_dense()[0]
    else:
        query = QUERY.multivector.row(0)
        scores = np.array([(query @ rows.T).max(axis=1).sum() for rows in POINTS.multivector])
    # A search by words finds what shares one.
    return {
        identity: score
        for identity, score in zip(IDS, scores, strict=True)
        if name != "sparse" or score > 0
    }


def check(found, scores, limit):
    """The found scores are the best expected ones, and each belongs to its point; ties may fall
    either way."""
    best = sorted(scores.values(), reverse=True)[:limit]
    near([point.score for point in found], best, TOLERANCE)
    near([point.score for point in found], [scores[point.id] for point in found], TOLERANCE)


@pytest.mark.parametrize("name", LEGS)
def test_every_vector_scores_as_numpy_does(stored, name):
    check(stored.query(leg(QUERY, name)), expected(name), 10)


@pytest.mark.parametrize("name", LEGS)
def test_exact_scores_of_given_points(stored, name):
    answer = stored.query(leg(QUERY, name, 12, filter=of_ids(IDS[:12]), exact=True))
    scores = expected(name)
    assert {point.id for point in answer} == set(IDS[:12]) & set(scores)
    near([p.score for p in answer], [scores[p.id] for p in answer], TOLERANCE)


def test_a_scroll_walks_all_points_once_in_the_order_of_ids(stored):
    seen = []
    offset = None
    while True:
        records, offset = stored.scroll(limit=7, offset=offset, with_payload=False)
        assert len(records) <= 7
        seen += [record.id for record in records]
        if offset is None:
            break
    assert seen == sorted(IDS, key=lambda given: (isinstance(given, str), given))


def test_vectors_and_payload_come_back_as_they_went(stored):
    (record,) = stored.retrieve([IDS[4], 10**9], with_vectors=True)
    assert (record.id, record.payload) == (IDS[4], payload_of(4))
    vectors = record.vector
    near(vectors["dense"], POINTS.dense[4], 1e-6)
    near(vectors["multivector"], POINTS.multivector.row(4), 1e-6)
    indices, values = (vectors["sparse"][part] for part in ("indices", "values"))
    assert dict(zip(indices, values, strict=True)) == pytest.approx(
        dict(zip(*POINTS.sparse.row(4), strict=True))
    )
    some = stored.retrieve([IDS[4]], with_payload=False, with_vectors=["dense"])
    assert set(some[0].vector) == {"dense"}
    assert not some[0].payload


def test_an_upsert_replaces_the_point_whole(filled):
    alone = Embeddings(dense=POINTS.dense[:1])
    filled.upsert(to_points(alone, IDS[:1], [{"new": True}]))
    record = filled.retrieve(IDS[:1], with_vectors=True)[0]
    assert set(record.vector) == {"dense"}
    assert record.payload == {"new": True}
    assert filled.count() == COUNT


def test_what_is_deleted_is_gone_and_nothing_else(filled):
    filled.delete([*IDS[:5], 10**9])
    records, _ = filled.scroll(limit=100)
    assert {record.id for record in records} == set(IDS[5:])


def test_a_bad_point_harms_nothing(filled):
    good = to_points(embeddings(3, seed=3), [1000, 1001, 1002])
    bad = models.PointStruct.model_construct(
        id=1003,
        vector={"sparse": models.SparseVector.model_construct(indices=[1, 2], values=[1.0])},
        payload={},
    )
    with pytest.raises(InvalidPoint, match=r"point 1003.*`sparse`: 2 indices and 1 values"):
        filled.upsert([*good, bad])
    assert filled.count() == COUNT
    filled.upsert(good)
    assert filled.count() == COUNT + 3


def test_points_without_words_are_not_found_by_words(filled):
    nothing = SparseVectors.from_dense(np.zeros((1, 50), dtype=np.float32))
    filled.upsert(to_points(Embeddings(dense=POINTS.dense[:1], sparse=nothing), [777]))
    found = filled.query(leg(QUERY, "sparse", COUNT))
    assert 777 not in {point.id for point in found}
    assert filled.query(leg(Embeddings(sparse=nothing), "sparse")) == []


def test_idf_weighs_rare_words_more(empty):
    empty.fill(to_points(POINTS, IDS), plan(idf=True))
    present = POINTS.sparse.to_dense() > 0
    count, having = present.any(axis=1).sum(), present.sum(axis=0)
    idf = np.log(1 + (count - having + 0.5) / (having + 0.5))
    scores = (POINTS.sparse.to_dense() * idf) @ QUERY.sparse.to_dense()[0]
    found = empty.query(leg(QUERY, "sparse"))
    check(found, dict(zip(IDS, scores, strict=True)), 10)


def filled_with(empty, **settings):
    """The points, in vectors of these settings."""
    wanted = plan()
    vectors = {name: replace(params, **settings) for name, params in wanted.vectors.items()}
    empty.fill(to_points(POINTS, IDS), CollectionSchema(vectors, wanted.sparse))
    empty.optimize()
    return plan_of(empty.describe())


@pytest.mark.parametrize("kind", ["scalar", "binary", "binary-2bit", "product", "turbo"])
def test_quantised_collections_answer_with_full_scores_when_rescored(empty, kind):
    described = filled_with(empty, quantization_config=_quantization(kind))
    assert described.quantization == kind
    request = leg(QUERY, limit=COUNT, oversampling=2.0)
    check(empty.query(request), expected("dense"), COUNT)


@pytest.mark.parametrize("datatype", ["float16", "turbo8", "turbo4"])
def test_numbers_of_fewer_bits_give_nearly_the_same_scores(empty, datatype):
    assert filled_with(empty, datatype=datatype).datatype == datatype
    hits = empty.query(leg(QUERY, limit=COUNT))
    scores = expected("dense")
    assert [hit.score for hit in hits] == pytest.approx([scores[hit.id] for hit in hits], abs=0.2)


def test_a_collection_says_how_it_is_laid_out_and_whose_it_is(empty):
    wanted = plan(model_id="tiny", tokenizer_sha256="ab")
    assert empty.describe() is None
    assert empty.name not in empty.run(empty.store.collections())
    empty.create(wanted)
    assert empty.name in empty.run(empty.store.collections())
    described = empty.describe()
    check_fits(described, wanted)
    assert described.metadata == wanted.metadata
    assert described.vectors["multivector"].hnsw_config["payload_m"] == 0
    with pytest.raises(StoreError, match="already"):
        empty.create(wanted)
    empty.drop()
    empty.drop()
    assert empty.describe() is None


def test_a_collection_made_anew_takes_other_vectors(empty):
    empty.fill(to_points(POINTS, IDS))
    empty.drop()
    narrow = CollectionSchema({"dense": VectorParams(size=4, distance="Cosine")}, {})
    rows = Embeddings(dense=np.eye(4, dtype=np.float32))
    empty.fill(to_points(rows, [0, 1, 2, 3]), narrow)
    assert empty.count() == 4


def test_what_is_not_there_is_named(empty):
    for call in (
        lambda: empty.upsert(to_points(POINTS, IDS)),
        lambda: empty.query(leg(QUERY)),
        empty.count,
        lambda: empty.scroll(limit=1),
    ):
        with pytest.raises(StoreError, match=empty.name):
            call()
    with pytest.raises(InvalidInput, match="collection 'a/b': its name may not hold '/'"):
        empty.run(empty.store.create("a/b", plan()))
    bad = CollectionSchema({"../x": VectorParams(size=4, distance="Dot")}, {})
    with pytest.raises(InvalidInput, match=r"vector '\.\./x': its name may not hold '/'"):
        empty.create(bad)


def test_queries_that_do_not_fit_are_refused(stored):
    narrow = Embeddings(dense=np.ones((1, 3), dtype=np.float32))
    with pytest.raises(StoreError):
        stored.query(leg(narrow))
    uneven = {"indices": np.array([1, 2], np.uint32), "values": np.ones(1, np.float32)}
    with pytest.raises(StoreError):
        stored.query(replace(leg(QUERY, "sparse"), vector=uneven))
    check(stored.query(leg(QUERY)), expected("dense"), 10)


def test_an_id_of_another_type_is_named(stored):
    for ask in (stored.retrieve, stored.delete):
        with pytest.raises(
            InvalidPoint, match=r"point \['a'\]: `id` is list, should be an integer or a UUID"
        ):
            ask([["a"]])
