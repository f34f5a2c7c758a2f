"""MaxSim over bytes of the payload: every way of ranking by them, in the embedded engine and on a named server."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from threading import current_thread
from typing import Any

import numpy as np
import pytest

from hybridtei.batch import Ragged
from hybridtei.inference.tasks.pooling import unpacked
from hybridtei.outputs import Embeddings
from hybridtei.retrieval.search import candidates as module
from hybridtei.retrieval.search.candidates import Candidate, Candidates, packed_scores
from hybridtei.retrieval.search.fusion import legs_of
from hybridtei.retrieval.search.options import SearchOptions
from hybridtei.retrieval.store.plan import PACKED, PackedFormat, payload_of
from hybridtei.retrieval.store.points import to_points
from tests.retrieval.store.stores import KINDS, ROW_WIDTH, SERVER, Asked, asked, embeddings, emptied
from tests.retrieval.store.test_packed import COUNT, IDS, packed, schema

QUERY = embeddings(1, seed=7)
ROWS = QUERY.multivector.row(0)
Filled = tuple[Asked, dict[Any, float], PackedFormat]


def floats(points: Embeddings) -> Ragged:
    """The numbers that the bytes represent."""
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
def filled(request: pytest.FixtureRequest, shared: Asked) -> Iterator[Filled]:
    """A store, the score of each of its points by MaxSim, and how it keeps multi-vectors."""
    with emptied(shared) as given:
        points = packed(request.param)
        given.run(given.store.create(given.name, schema(request.param)))
        given.run(given.store.upsert(given.name, to_points(points, IDS, [{"number": i} for i in range(COUNT)])))
        truth = {one: float((ROWS @ rows.T).max(1).sum()) for one, rows in zip(IDS, floats(points), strict=True)}
        yield given, truth, PackedFormat(request.param, ROW_WIDTH)


def best(filled: Filled, count: int, **fields: Any) -> list[Candidate]:
    given, _, packed_as = filled
    options = SearchOptions(group_by=None, **fields)
    legs = legs_of(QUERY, 0, options, is_packed=True)
    return given.run(Candidates(given.store, given.name, legs, options, packed=packed_as).best(count))


@pytest.mark.parametrize("mode", ["dense", "rrf", "zscore"])
def test_candidates_stand_in_the_order_of_maxsim(filled: Filled, mode: str) -> None:
    truth = filled[1]
    found = best(filled, COUNT, mode=mode, rescore=True)
    assert [one.id for one in found] == sorted(truth, key=lambda one: -truth[one])
    assert [one.score for one in found] == pytest.approx(sorted(truth.values(), reverse=True), abs=1e-5)


def test_of_a_few_candidates_the_best_above_a_threshold(filled: Filled) -> None:
    truth = filled[1]
    first = sorted((one.id for one in best(filled, 10, mode="dense")), key=lambda one: -truth[one])
    rescored: dict[str, Any] = {"mode": "dense", "rescore": True, "prefetch_limit": 10}
    assert [one.id for one in best(filled, 10, **rescored)] == first
    above = best(filled, 10, **rescored, score_threshold=truth[first[3]] - 1e-4)
    assert [one.id for one in above] == first[: len(above)]
    assert len(above) >= 4


def test_weighted_takes_the_mean_over_the_querys_rows(filled: Filled) -> None:
    for one in best(filled, COUNT, mode="weighted", weights={"dense": 0.5, "multivector": 2.0}):
        assert one.score == pytest.approx(0.5 * one.legs["dense"].score + 2 * filled[1][one.id] / len(ROWS), abs=1e-5)


def test_bytes_are_read_a_few_points_at_a_time(filled: Filled, monkeypatch: pytest.MonkeyPatch) -> None:
    given, truth, packed_as = filled
    read: list[int] = []
    retrieve = type(given.store).retrieve

    async def counted(store: Any, *arguments: Any, **selected: Any) -> Any:
        answer = await retrieve(store, *arguments, **selected)
        read.append(sum(PACKED in (one.payload or {}) for one in answer))
        return answer

    monkeypatch.setattr(module, "READ_AT_ONCE", 7)
    monkeypatch.setattr(module, "MAX_FLOAT_BYTES", 100)
    monkeypatch.setattr(type(given.store), "retrieve", counted)
    assert given.run(packed_scores(given.store, given.name, IDS, ROWS, packed_as)) == pytest.approx(truth, abs=1e-5)
    assert (sum(read), max(read)) == (COUNT, 7)


def test_a_payload_is_given_without_them(filled: Filled) -> None:
    given = filled[0]
    records = given.run(given.store.retrieve(given.name, IDS[:3], with_payload=payload_of(schema("binary"))))
    assert {record.id: record.payload for record in records} == {one: {"number": i} for i, one in enumerate(IDS[:3])}


def test_many_searches_at_once_take_few_threads(filled: Filled, monkeypatch: pytest.MonkeyPatch) -> None:
    given, _, packed_as = filled
    names: set[str] = set()
    scores = module._maxsims
    monkeypatch.setattr(module, "_maxsims", lambda *arguments: (names.add(current_thread().name), scores(*arguments))[1])

    async def all_at_once() -> None:
        await asyncio.gather(*(packed_scores(given.store, given.name, IDS, ROWS, packed_as) for _ in range(10)))

    given.run(all_at_once())
    assert names
    assert names <= {"maxsim_0", "maxsim_1"}
