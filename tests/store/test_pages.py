"""Equal scores: the same order whoever is asked and how often, and pages that neither repeat a point nor lack one."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path
from uuid import UUID

import numpy as np
import orjson
import pytest
from qdrant_client import models

from hybridtei.errors import PayloadsTooLarge, StoreError, StoreUnavailable
from hybridtei.outputs import Embeddings
from hybridtei.search.query import hybrid_query
from hybridtei.store import MAX_LIMIT
from hybridtei.store.base import SPARES, PayloadBudget, id_of, page_of, sort_points
from hybridtei.store.points import to_points
from tests.store.memory_store import MemoryStore
from tests.store.stores import KINDS, SERVER, Asked, asked, embeddings, plan

TEXTS, COPIES = 12, 9
ASKED = embeddings(1, seed=7)
MODES = ("dense", "sparse", "multivector", "rrf", "weighted")


def ids_of(count: int) -> list[int | str]:
    """Numbers and UUIDs, in no order."""
    mixed = [place if place % 3 else str(UUID(int=place)) for place in range(count)]
    return [mixed[place] for place in np.random.default_rng(0).permutation(count)]


def copied() -> list[models.PointStruct]:
    """Every text many times over: as many equal scores as copies."""
    several = Embeddings.concat([embeddings(TEXTS)] * COPIES)
    ids = ids_of(TEXTS * COPIES)
    return to_points(several, ids, [{"place": place} for place in range(len(ids))])


@pytest.fixture(scope="module", params=KINDS)
def stored(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):  # type: ignore[no-untyped-def]
    """Read only."""
    if request.param == "server" and SERVER is None:
        pytest.skip("QDRANT_TEST_URL names no server")
    with asked(request.param, tmp_path_factory.mktemp("store")) as one:
        one.run(one.store.create(one.name, plan()))
        one.run(one.store.upsert(one.name, copied()))
        yield one


def found(stored: Asked, **wanted: object) -> list[models.ScoredPoint]:
    return stored.run(page_of(stored.store, stored.name, hybrid_query(ASKED, **wanted)))  # type: ignore[arg-type]


@pytest.mark.parametrize("mode", MODES)
def test_two_runs_give_one_order_with_ids_deciding_ties(stored: Asked, mode: str) -> None:
    first, second = (found(stored, mode=mode, limit=25) for _ in range(2))
    assert [(point.id, point.score, point.payload) for point in first] == [
        (point.id, point.score, point.payload) for point in second
    ]
    assert len(first) == 25
    assert [point.score for point in first] == sorted((point.score for point in first), reverse=True)
    tied = [list(group) for _, group in groupby(first, key=lambda point: point.score)]
    assert mode == "rrf" or max(map(len, tied)) > 1  # a list's copies have neighbouring ranks, and so scores of their own
    for group in tied:
        ids = [id_of(point) for point in group]
        assert ids == sorted(ids, key=lambda one: (isinstance(one, str), one))


@pytest.mark.parametrize("mode", ["dense", "weighted"])
def test_pages_of_ties_put_together_are_the_whole(stored: Asked, mode: str) -> None:
    whole = found(stored, mode=mode, limit=40)
    pages = [point for offset in range(0, 40, 5) for point in found(stored, mode=mode, limit=5, offset=offset)]
    assert [(point.id, point.payload) for point in pages] == [(point.id, point.payload) for point in whole]


@pytest.mark.parametrize("offset", [0, 3])
def test_a_tie_that_is_wider_than_the_first_spare_is_settled_with_payload_and_vectors(tmp_path: Path, offset: int) -> None:
    count = SPARES[0] * 10
    with asked("embedded", tmp_path / "store") as stored:
        stored.run(stored.store.create(stored.name, plan()))
        points = to_points(Embeddings.concat([embeddings(1)] * count), list(range(count))[::-1], [{"text": "one"}] * count)
        stored.run(stored.store.upsert(stored.name, points))
        best = found(stored, mode="dense", limit=3, offset=offset, with_vectors=["sparse"])
        assert [point.id for point in best] == [offset, offset + 1, offset + 2]
        assert all(point.payload == {"text": "one"} for point in best)
        assert all(isinstance(point.vector["sparse"], models.SparseVector) for point in best)
        bare = found(stored, mode="dense", limit=3, offset=offset, with_payload=False)
        assert [(point.id, point.payload) for point in bare] == [(point.id, None) for point in best]


class Strict(MemoryStore):
    """One whose administrator lets nobody ask for more than ten."""

    def __init__(self, error: StoreError) -> None:
        super().__init__()
        self.error, self.asked = error, []

    async def query(self, name: str, request: models.QueryRequest) -> list[models.ScoredPoint]:
        self.asked.append(request.limit)
        if request.limit > 10:
            raise self.error
        return await super().query(name, request)


@pytest.mark.parametrize("error", [StoreError("limit exceeded"), StoreUnavailable("down")])
def test_a_store_that_refuses_the_spare_is_asked_for_the_page_alone(tmp_path: Path, error: StoreError) -> None:
    with asked("memory", tmp_path) as stored:
        store = Strict(error)
        stored.run(store.create("c", plan()))
        stored.run(store.upsert("c", copied()))
        page = page_of(store, "c", hybrid_query(ASKED, mode="dense", limit=10))
        if isinstance(error, StoreUnavailable):
            with pytest.raises(StoreUnavailable):
                stored.run(page)
            assert store.asked == [14]
        else:
            best = stored.run(page)
            assert (len(best), store.asked) == (10, [14, 10])
            assert best == sort_points(best)
        stored.run(store.close())


def test_a_page_beyond_the_limit_of_all_pages_is_asked_for_as_it_is(stored: Asked) -> None:
    assert found(stored, mode="dense", limit=5, offset=MAX_LIMIT) == []


def test_numbers_stand_before_uuids_and_better_before_both() -> None:
    given = [("b", 1.0), (7, 1.0), ("a", 1.0), (10, 1.0), ("z", 2.0)]
    points = [models.ScoredPoint(id=identity, version=0, score=score) for identity, score in given]
    assert [point.id for point in sort_points(points)] == ["z", 7, 10, "a", "b"]


@pytest.mark.parametrize("with_payload", [True, ["place"], False])
def test_a_large_page_is_filled_in_parts_and_is_the_same(
    stored: Asked, with_payload: bool | list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = {"mode": "dense", "limit": 40, "with_payload": with_payload, "with_vectors": ["sparse"]}
    whole = found(stored, **wanted)
    monkeypatch.setattr("hybridtei.store.base.FILLED_AT_ONCE", 7)
    parts = found(stored, **wanted)
    assert [(point.id, point.score) for point in parts] == [(point.id, point.score) for point in whole]
    for point in parts:
        assert (point.payload or None) == (whole[parts.index(point)].payload or None)
        assert isinstance(point.vector["sparse"], models.SparseVector)


def test_payloads_are_weighed_as_they_come(stored: Asked, monkeypatch: pytest.MonkeyPatch) -> None:
    page = hybrid_query(ASKED, mode="dense", limit=40)
    size = sum(len(orjson.dumps(point.payload)) for point in found(stored, mode="dense", limit=40))

    def spent(budget: PayloadBudget) -> int:
        return len(stored.run(page_of(stored.store, stored.name, page, budget=budget)))

    for at_once in (100, 7):
        monkeypatch.setattr("hybridtei.store.base.FILLED_AT_ONCE", at_once)
        both = PayloadBudget(2 * size)
        assert [spent(both), spent(both)] == [40, 40]
        for budget in (both, PayloadBudget(size - 1)):
            with pytest.raises(PayloadsTooLarge, match=r"take more than [0-9]+ bytes \(max-search-bytes\)"):
                spent(budget)
