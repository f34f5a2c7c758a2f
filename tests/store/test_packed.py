"""Multi-vectors as bytes of the payload: every way of ranking by them, in the embedded engine and on a named server."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from threading import current_thread
from typing import Any

import numpy as np
import pytest
from qdrant_client import models

from hybridtei.batch import Ragged
from hybridtei.errors import InvalidInput, InvalidPoint
from hybridtei.outputs import Embeddings
from hybridtei.search.query import hybrid_query, score_requests
from hybridtei.store import packed as packed_module
from hybridtei.store.base import CollectionSchema, page_of
from hybridtei.store.collection import heads_of
from hybridtei.store.packed import DTYPE, PACKED, WIDTH, packed_format, payload_of, without_packed
from hybridtei.store.points import check_points, fit_to_schema, point_id, to_points
from hybridtei.tasks.pooling import MultivectorBudget, budgeted, unpacked
from tests.store.stores import KINDS, ROW_WIDTH, SERVER, Asked, asked, embeddings, emptied, plan

COUNT = 30
IDS = [point_id("a", i) if i % 3 else i for i in range(COUNT)]
QUERY = embeddings(1, seed=7)
PAYLOADS = [{"number": i} for i in range(COUNT)]


def schema(dtype: str) -> CollectionSchema:
    whole = plan()
    vectors = {name: params for name, params in whole.vectors.items() if name != "multivector"}
    return CollectionSchema(vectors, whole.sparse, {DTYPE: dtype, WIDTH: ROW_WIDTH})


def packed(dtype: str) -> Embeddings:
    full = embeddings(COUNT)
    assert full.multivector is not None
    return Embeddings(full.dense, full.sparse, budgeted(full.multivector, MultivectorBudget(dtype=dtype)))  # type: ignore[arg-type]


def floats(points: Embeddings) -> Ragged:
    """What the bytes stand for."""
    rows = points.multivector
    assert rows is not None
    if rows.values.dtype == np.uint8:
        return Ragged(unpacked(rows.values, ROW_WIDTH), rows.offsets)
    values = rows.values.astype(np.float32)
    return Ragged(values / np.linalg.norm(values, axis=1, keepdims=True), rows.offsets)


@pytest.fixture(scope="module", params=[kind for kind in KINDS if kind != "memory" and (kind != "server" or SERVER)])
def shared(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Asked]:
    with asked(request.param, tmp_path_factory.mktemp("packed")) as given:
        yield given


@pytest.fixture(scope="module", params=["binary", "int8"])
def filled(request: pytest.FixtureRequest, shared: Asked) -> Iterator[tuple[Asked, dict[Any, float]]]:
    """A store, and the score of each of its points by MaxSim."""
    with emptied(shared) as given:
        points = packed(request.param)
        given.run(given.store.create(given.name, schema(request.param)))
        given.run(given.store.upsert(given.name, to_points(points, IDS, PAYLOADS)))
        assert QUERY.multivector is not None
        query = QUERY.multivector.row(0)
        yield given, {one: float((query @ rows.T).max(1).sum()) for one, rows in zip(IDS, floats(points), strict=True)}


def test_candidates_stand_in_the_order_of_maxsim(filled: tuple[Asked, dict[Any, float]]) -> None:
    given, truth = filled
    request = hybrid_query(QUERY, mode="dense", rescore=True, limit=COUNT, with_payload=["number"])
    points = given.run(given.store.query(given.name, request))
    assert [point.id for point in points] == sorted(truth, key=lambda one: -truth[one])
    assert [point.score for point in points] == pytest.approx(sorted(truth.values(), reverse=True), abs=1e-5)
    assert [point.payload for point in points] == [{"number": IDS.index(point.id)} for point in points]


def test_of_a_few_candidates_a_page(filled: tuple[Asked, dict[Any, float]]) -> None:
    given, truth = filled
    found = given.run(given.store.query(given.name, hybrid_query(QUERY, mode="dense", limit=10)))
    best = sorted((point.id for point in found), key=lambda one: -truth[one])
    options: dict[str, Any] = {"mode": "dense", "rescore": True, "prefetch_limit": 10}
    page = given.run(given.store.query(given.name, hybrid_query(QUERY, **options, limit=3, offset=2)))
    assert [point.id for point in page] == best[2:5]
    least = truth[best[3]] - 1e-4
    above = given.run(given.store.query(given.name, hybrid_query(QUERY, **options, limit=10, score_threshold=least)))
    assert [point.id for point in above] == best[: len(above)]
    assert len(above) >= 4


@pytest.mark.parametrize("options", [{"mode": "rrf", "rescore": True}, {}])
def test_bytes_are_read_a_few_points_at_a_time(
    filled: tuple[Asked, dict[Any, float]], monkeypatch: pytest.MonkeyPatch, options: Any
) -> None:
    given, truth = filled
    read: list[int] = []
    query, retrieve = type(given.store).query, type(given.store).retrieve

    async def counted(store: Any, *arguments: Any, **selected: Any) -> Any:
        answer = await (retrieve if selected else query)(store, *arguments, **selected)
        read.append(sum(PACKED in (one.payload or {}) for one in answer))
        return answer

    monkeypatch.setattr(packed_module, "READ_AT_ONCE", 7)
    monkeypatch.setattr(packed_module, "MAX_FLOAT_BYTES", 100)
    monkeypatch.setattr(type(given.store), "query", counted)
    monkeypatch.setattr(type(given.store), "retrieve", counted)
    exact = score_requests(QUERY, IDS, legs=["multivector"])["multivector"]
    request = hybrid_query(QUERY, limit=COUNT, with_payload=False, **options) if options else exact
    points = given.run(given.store.query(given.name, request))
    assert [point.id for point in points] == sorted(truth, key=lambda one: -truth[one])
    assert (sum(read), max(read)) == (COUNT, 7)


def test_a_filter_holds_for_candidates(filled: tuple[Asked, dict[Any, float]]) -> None:
    given, _ = filled
    only = models.Filter(must=[models.FieldCondition(key="number", range=models.Range(lt=5))])
    request = hybrid_query(QUERY, mode="rrf", rescore=True, limit=COUNT, query_filter=only)
    assert {point.id for point in given.run(given.store.query(given.name, request))} == set(IDS[:5])


def test_alone_they_find_nothing(filled: tuple[Asked, dict[Any, float]]) -> None:
    given, _ = filled
    legs = ("dense", "multivector")
    for options in ({"mode": "multivector"}, {"mode": "rrf", "legs": legs}, {"mode": "weighted", "weights": "m3"}):
        with pytest.raises(InvalidInput, match="rescore"):
            given.run(given.store.query(given.name, hybrid_query(QUERY, **options)))


def test_a_payload_is_given_without_them(filled: tuple[Asked, dict[Any, float]]) -> None:
    given, _ = filled
    request = hybrid_query(QUERY, mode="dense", limit=3).model_copy(update={"with_payload": payload_of(schema("binary"))})
    for offset in (None, 1):  # of a later page, payloads are retrieved
        page = given.run(page_of(given.store, given.name, request.model_copy(update={"offset": offset})))
        assert [point.payload for point in page] == [{"number": IDS.index(point.id)} for point in page]


def test_many_searches_at_once_take_few_threads(
    filled: tuple[Asked, dict[Any, float]], monkeypatch: pytest.MonkeyPatch
) -> None:
    given, _ = filled
    names: set[str] = set()
    scored = packed_module._scored
    monkeypatch.setattr(packed_module, "_scored", lambda *arguments: (names.add(current_thread().name), scored(*arguments))[1])
    request = hybrid_query(QUERY, mode="dense", rescore=True, limit=3)

    async def all_at_once() -> None:
        await asyncio.gather(*(given.store.query(given.name, request) for _ in range(10)))

    given.run(all_at_once())
    assert names
    assert names <= {"maxsim_0", "maxsim_1"}


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("A" * 1_400_000, "allowed are 131071 rows"),
        ("not base64", "bytes in base64"),
        (["AA=="], "is list"),
        ("AAAA", None),
    ],
)
def test_bytes_of_a_point_have_a_bound(value: Any, message: str | None) -> None:
    point = models.PointStruct(id=1, vector={}, payload={PACKED: value})
    if message is None:
        assert check_points([point], schema("binary"))
    else:
        with pytest.raises(InvalidPoint, match=rf"payload\.{PACKED}.*{message}"):
            check_points([point], schema("binary"))
    assert check_points([point], plan())[0].payload == {PACKED: value}  # somebody's own key


def test_a_key_of_that_name_is_refused() -> None:
    with pytest.raises(InvalidPoint, match=f"payload.{PACKED}.*rename"):
        to_points(packed("binary"), IDS, [{PACKED: "mine"}] * COUNT)


def test_of_a_collection_its_outputs_and_widths() -> None:
    kept = schema("binary")
    assert heads_of(kept) == {"dense", "sparse", "multivector"}
    assert packed_format(plan()) is None
    assert packed_format(plan(**{WIDTH: 8})) is None  # metadata of somebody else
    assert without_packed({"text": "a", PACKED: "AA=="}) == {"text": "a"}
    wide = Embeddings(multivector=Ragged(np.zeros((3, 4), np.uint8), np.array([0, 3])))
    fitted = fit_to_schema(wide, kept).multivector
    assert fitted is not None
    assert fitted.values.shape == (3, ROW_WIDTH // 8)
