"""Equal scores: one order, whichever store is asked; and pages that neither repeat a point nor lack
one, in every mode."""

from uuid import UUID

import numpy as np
import orjson
import pytest

from hybridtei.errors import PayloadsTooLarge, StoreError, StoreUnavailable
from hybridtei.outputs import Embeddings
from hybridtei.retrieval.search.candidates import Candidates
from hybridtei.retrieval.search.fusion import legs_of
from hybridtei.retrieval.search.options import SearchOptions
from hybridtei.retrieval.store.base import SPARES, PayloadBudget, best_points, sort_points
from hybridtei.retrieval.store.memory import MemoryStore
from hybridtei.retrieval.store.points import to_points
from hybridtei.retrieval.store.query import MAX_LIMIT
from tests.retrieval.store.stores import KINDS, asked, embeddings, leg, plan

TEXTS, COPIES = 12, 9
ASKED = embeddings(1, seed=7)
LEGS = ("dense", "sparse", "multivector")


def ids_of(count):
    """Numbers and UUIDs, in no order."""
    mixed = [place if place % 3 else str(UUID(int=place)) for place in range(count)]
    return [mixed[place] for place in np.random.default_rng(0).permutation(count)]


def copied():
    """Every text many times over: as many equal scores as copies."""
    several = Embeddings.concat([embeddings(TEXTS)] * COPIES)
    ids = ids_of(TEXTS * COPIES)
    return to_points(several, ids, [{"place": place} for place in range(len(ids))])


@pytest.fixture(scope="module", params=KINDS)
def stored(request, tmp_path_factory):
    """Read only."""
    with asked(request.param, tmp_path_factory.mktemp("store")) as one:
        one.fill(copied())
        yield one


def found(stored, using="dense", limit=10, **wanted):
    return stored.run(best_points(stored.store, stored.name, leg(ASKED, using, limit, **wanted)))


@pytest.mark.parametrize("using", LEGS)
def test_two_runs_give_one_order_with_ids_deciding_ties(stored, using):
    first, second = (found(stored, using, 25, with_payload=["place"]) for _ in range(2))
    assert first == second
    assert len(first) == 25
    assert len({point.score for point in first}) < 25
    assert first == sorted(first, key=lambda one: (-one.score, isinstance(one.id, str), one.id))


def test_a_tie_that_is_wider_than_the_first_spare_is_settled(tmp_path):
    count = SPARES[0] * 10
    with asked("embedded", tmp_path / "store") as stored:
        several = Embeddings.concat([embeddings(1)] * count)
        stored.fill(to_points(several, list(range(count))[::-1], [{"text": "one"}] * count))
        best = found(stored, limit=3, with_payload=["text"])
        assert [(point.id, point.payload) for point in best] == [
            (place, {"text": "one"}) for place in range(3)
        ]


WAYS = [
    *({"mode": mode} for mode in (*LEGS, "rrf", "zscore")),
    {"mode": "weighted", "weights": "m3"},
    {"mode": "rrf", "rrf_k": 61, "weights": {"dense": 3.0, "sparse": 1.0}},
    {"mode": "rrf", "legs": list(LEGS)},
    *({"mode": mode, "rescore": True} for mode in ("dense", "rrf", "zscore")),
    *({"mode": mode, "group_by": "text"} for mode in ("zscore", "rrf")),
]


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    with asked("embedded", tmp_path_factory.mktemp("large")) as one:
        payloads = [{"text": f"t{place % 115}"} for place in range(230)]
        one.fill(to_points(embeddings(230), ids_of(230), payloads))
        yield one


def best(stored, count, **fields):
    options = SearchOptions(**{"group_by": None, **fields})
    legs = legs_of(ASKED, 0, options, is_packed=False)
    return stored.run(Candidates(stored.store, stored.name, legs, options).best(count))


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_pages_hold_every_point_once_in_the_order_of_the_whole(large, way):
    whole = [one.id for one in best(large, 1_000, **way, prefetch_limit=20)]
    for size in (10, 37, 200):
        pages = [
            best(large, offset + size, **way, prefetch_limit=20)[offset:]
            for offset in range(0, len(whole), size)
        ]
        assert [one.id for page in pages for one in page] == whole
    assert len(set(whole)) == len(whole)
    # Which finds those alone that share a term
    if "sparse" not in way.values():
        assert len(whole) == (115 if "group_by" in way else 230)


class Strict(MemoryStore):
    """One whose administrator lets nobody ask for more than ten."""

    def __init__(self, error):
        super().__init__()
        self.error, self.asked = error, []

    async def query(self, name, query):
        self.asked.append(query.limit)
        if query.limit > 10:
            raise self.error
        return await super().query(name, query)


async def strict(error):
    store = Strict(error)
    await store.create("c", plan())
    await store.upsert("c", copied())
    return store


async def test_a_store_that_refuses_the_spare_is_asked_without_it():
    store = await strict(StoreError("limit exceeded"))
    best = await best_points(store, "c", leg(ASKED))
    assert (len(best), store.asked) == (10, [14, 10])
    assert best == sort_points(best)


async def test_a_store_that_is_away_is_not_asked_again():
    store = await strict(StoreUnavailable("down"))
    with pytest.raises(StoreUnavailable):
        await best_points(store, "c", leg(ASKED))
    assert store.asked == [14]


def test_what_reaches_the_limit_is_asked_for_as_it_is(stored):
    assert len(found(stored, limit=MAX_LIMIT)) == TEXTS * COPIES


def test_payloads_are_weighed_as_they_come(stored):
    size = sum(
        len(orjson.dumps(point.payload))
        for point in found(stored, limit=40, with_payload=["place"])
    )

    def spent(budget):
        query = leg(ASKED, limit=40, with_payload=["place"])
        return len(stored.run(best_points(stored.store, stored.name, query, budget=budget)))

    both = PayloadBudget(2 * size)
    assert [spent(both), spent(both)] == [40, 40]
    for budget in (both, PayloadBudget(size - 1)):
        with pytest.raises(
            PayloadsTooLarge, match=r"take more than [0-9]+ bytes \(max-search-bytes\)"
        ):
            spent(budget)
