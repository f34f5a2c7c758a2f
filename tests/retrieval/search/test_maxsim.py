"""Multi-vectors as bytes of the payload: what a point and a collection say of them, and every way
of ranking by them."""

import asyncio
from threading import current_thread

import numpy as np
import pytest

from hybridtei.batch import Ragged
from hybridtei.errors import InvalidPoint
from hybridtei.inference.tasks.pooling import MultivectorBudget, budgeted, unpacked
from hybridtei.outputs import Embeddings
from hybridtei.retrieval.search import candidates as module
from hybridtei.retrieval.search.candidates import Candidates
from hybridtei.retrieval.search.fusion import legs_of
from hybridtei.retrieval.search.options import SearchOptions
from hybridtei.retrieval.store.base import CollectionSchema, Stored, sort_points
from hybridtei.retrieval.store.collection import heads_of
from hybridtei.retrieval.store.plan import (
    DTYPE,
    PACKED,
    WIDTH,
    PackedFormat,
    fit_to_schema,
    packed_format,
    payload_of,
    without_packed,
)
from hybridtei.retrieval.store.points import check_points, point_id, to_points
from tests.retrieval.store.stores import KINDS, ROW_WIDTH, asked, embeddings, emptied, plan

COUNT = 30
IDS = [point_id("a", i) if i % 3 else i for i in range(COUNT)]


def schema(dtype):
    whole = plan()
    vectors = {name: params for name, params in whole.vectors.items() if name != "multivector"}
    return CollectionSchema(vectors, whole.sparse, {DTYPE: dtype, WIDTH: ROW_WIDTH})


def packed(dtype):
    full = embeddings(COUNT)
    assert full.multivector is not None
    return Embeddings(
        full.dense, full.sparse, budgeted(full.multivector, MultivectorBudget(dtype=dtype))
    )


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("A" * 1_400_000, "allowed are 131071 rows"),
        ("not base64", "bytes in base64"),
        (["AA=="], "is list"),
        ("AAAA", None),
    ],
)
def test_bytes_of_a_point_have_a_bound(value, message):
    point = Stored(1, {PACKED: value}, {})
    if message is None:
        assert check_points([point], schema("binary"))
    else:
        with pytest.raises(InvalidPoint, match=rf"payload\.{PACKED}.*{message}"):
            check_points([point], schema("binary"))
    # Somebody's own key
    assert check_points([point], plan())[0].payload == {PACKED: value}


def test_a_key_of_that_name_is_refused():
    with pytest.raises(InvalidPoint, match=f"payload.{PACKED}.*rename"):
        to_points(packed("binary"), IDS, [{PACKED: "mine"}] * COUNT)


def test_of_a_collection_its_outputs_and_widths():
    kept = schema("binary")
    assert heads_of(kept) == {"dense", "sparse", "multivector"}
    assert packed_format(plan()) is None
    # Metadata of somebody else
    assert packed_format(plan(**{WIDTH: 8})) is None
    assert without_packed({"text": "a", PACKED: "AA=="}) == {"text": "a"}
    wide = Embeddings(multivector=Ragged(np.zeros((3, 4), np.uint8), np.array([0, 3])))
    fitted = fit_to_schema(wide, kept).multivector
    assert fitted is not None
    assert fitted.values.shape == (3, ROW_WIDTH // 8)


QUERY = embeddings(1, seed=7)
ROWS = QUERY.multivector.row(0)


def floats(points):
    """The numbers that the bytes represent."""
    rows = points.multivector
    assert rows is not None
    if rows.values.dtype == np.uint8:
        return Ragged(unpacked(rows.values, ROW_WIDTH), rows.offsets)
    values = rows.values.astype(np.float32)
    return Ragged(values / np.linalg.norm(values, axis=1, keepdims=True), rows.offsets)


@pytest.fixture(scope="module", params=KINDS)
def shared(request, tmp_path_factory):
    with asked(request.param, tmp_path_factory.mktemp("packed")) as given:
        yield given


@pytest.fixture(scope="module", params=["binary", "int8"])
def filled(request, shared):
    """A store, the score of each of its points by MaxSim, and how it keeps multi-vectors."""
    with emptied(shared) as given:
        points = packed(request.param)
        payloads = [{"number": i} for i in range(COUNT)]
        given.fill(to_points(points, IDS, payloads), schema(request.param))
        truth = {
            one: float((ROWS @ rows.T).max(1).sum())
            for one, rows in zip(IDS, floats(points), strict=True)
        }
        yield given, truth, PackedFormat(request.param, ROW_WIDTH)


def best(filled, count, **fields):
    return filled[0].run(searching(filled, count, **fields))


def searching(filled, count, **fields):
    given, _, packed_as = filled
    options = SearchOptions(group_by=None, **fields)
    legs = legs_of(QUERY, 0, options, is_packed=True)
    return Candidates(given.store, given.name, legs, options, packed=packed_as).best(count)


@pytest.mark.parametrize("mode", ["dense", "rrf", "zscore"])
def test_candidates_stand_in_the_order_of_maxsim(filled, mode):
    truth = filled[1]
    found = best(filled, COUNT, mode=mode, rescore=True)
    assert [one.id for one in found] == sorted(truth, key=lambda one: -truth[one])
    assert {one.id: one.score for one in found} == pytest.approx(truth, abs=1e-5)


def test_of_a_few_candidates_the_best_above_a_threshold(filled):
    truth = filled[1]
    first = sorted((one.id for one in best(filled, 10, mode="dense")), key=lambda one: -truth[one])
    rescored = {"mode": "dense", "rescore": True, "prefetch_limit": 10}
    assert [one.id for one in best(filled, 10, **rescored)] == first
    threshold = truth[first[3]] - 1e-4
    found = best(filled, 10, **rescored, score_threshold=threshold)
    above = [one.id for one in sort_points(found)]
    # Fewer than ten of the first candidates are above it, so further ones are looked at
    assert above == sorted(above, key=lambda one: -truth[one])
    assert {*first[:4]} <= {*above}
    assert min(truth[one] for one in above) >= threshold


def test_weighted_takes_the_mean_over_the_querys_rows(filled):
    for one in best(filled, COUNT, mode="weighted", weights={"dense": 0.5, "multivector": 2.0}):
        assert one.score == pytest.approx(
            0.5 * one.legs["dense"].score + 2 * filled[1][one.id] / len(ROWS), abs=1e-5
        )


def test_bytes_are_read_a_few_points_at_a_time(filled, monkeypatch):
    given, truth, _ = filled
    read = []
    retrieve = given.store.retrieve

    async def counted(*arguments, **selected):
        answer = await retrieve(*arguments, **selected)
        read.append(sum(PACKED in (one.payload or {}) for one in answer))
        return answer

    monkeypatch.setattr(module, "READ_AT_ONCE", 7)
    monkeypatch.setattr(module, "MAX_FLOAT_BYTES", 100)
    monkeypatch.setattr(given.store, "retrieve", counted)
    found = best(filled, COUNT, mode="dense", rescore=True)
    assert {one.id: one.score for one in found} == pytest.approx(truth, abs=1e-5)
    assert (sum(read), max(read)) == (COUNT, 7)


def test_a_payload_is_given_without_them(filled):
    records = filled[0].retrieve(IDS[:3], with_payload=payload_of(schema("binary")))
    assert {record.id: record.payload for record in records} == {
        one: {"number": i} for i, one in enumerate(IDS[:3])
    }


def test_many_searches_at_once_take_few_threads(filled, monkeypatch):
    given = filled[0]
    monkeypatch.setattr(module, "INLINE_CHARACTERS", 0)
    names = set()
    scores = module._maxsims

    def noted(*arguments):
        names.add(current_thread().name)
        return scores(*arguments)

    async def all_at_once():
        await asyncio.gather(
            *(searching(filled, COUNT, mode="dense", rescore=True) for _ in range(10))
        )

    monkeypatch.setattr(module, "_maxsims", noted)
    given.run(all_at_once())
    assert names
    assert names <= {"maxsim_0", "maxsim_1"}
