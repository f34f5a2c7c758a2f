"""Payload indexes that a user names: made with a collection or later, told, moved, and asked for in
strict mode."""

import asyncio
import re

import pytest

from hybridtei import Client, InvalidInput, StoreConfig, StoreError, ingest, schema_for
from hybridtei.retrieval.store import opened
from hybridtei.retrieval.store.collection import CollectionSchemas
from hybridtei.retrieval.store.embedded import EmbeddedStore
from hybridtei.retrieval.store.memory import MemoryStore
from hybridtei.retrieval.store.plan import plan_of
from hybridtei.retrieval.store.points import to_points
from hybridtei.retrieval.store.query import filter_from, indexes_of
from hybridtei.retrieval.store.transfer import exported, import_from
from tests.retrieval.search.small_search import MODEL, encoder_in, spec_in
from tests.retrieval.store.speaking import speaking
from tests.retrieval.store.stores import STAND_INS, asked, embeddings, plan
from tests.server.live import serving

TEXTS = ("lang:keyword", "metadata.year:integer", "tenant:keyword!")
MADE = {"lang": "keyword", "metadata.year": "integer", "tenant": "keyword!"}
ALL_KINDS = [
    "keyword",
    "uuid",
    "integer",
    "float",
    "bool",
    "datetime",
    "geo",
    "text",
    "keyword!",
    "uuid!",
]
KINDS = ("embedded", *STAND_INS)


def test_the_embedded_engine_serves_other_calls_between_two_indexes(monkeypatch, tmp_path):
    """A hundred in one call took half a minute, in which every search waited."""
    calls, call = [], EmbeddedStore._call

    def counted(self, name, *arguments, **options):
        calls.append((name, arguments))
        return call(self, name, *arguments, **options)

    monkeypatch.setattr(EmbeddedStore, "_call", counted)
    with asked("embedded", tmp_path) as place:
        place.create(plan())
        calls.clear()
        place.index(MADE)
        assert place.describe().indexes == MADE
    parts = [arguments[1] for name, arguments in calls if name == "index"]
    assert [*map(len, parts)] == [1] * len(MADE)


@pytest.fixture(params=KINDS)
def made(request, tmp_path):
    with asked(request.param, tmp_path) as store:
        yield store


def test_every_kind_is_made_told_and_kept(made):
    wanted = {f"key_{place}": kind for place, kind in enumerate(ALL_KINDS)}
    made.create(plan())
    made.index(wanted)
    made.index({"lang": "keyword"})
    assert made.describe().indexes == {**wanted, "lang": "keyword"}
    rows = [{"lang": "de" if place % 2 else "en", "key_7": f"One {place}"} for place in range(9)]
    made.upsert(to_points(embeddings(9), list(range(9)), rows))
    made.optimize()
    german = {"must": [{"key": "lang", "match": {"value": "de"}}]}
    words = {"must": [{"key": "key_7", "match": {"phrase": "one 3"}}]}
    assert made.count(filter_from(german)) == 4
    if made.store.kind == "embedded":
        assert made.count(filter_from(words)) == 1


def test_a_copy_has_the_same_ones(made):
    async def moved():
        await made.store.create(made.name, plan())
        await made.store.index(made.name, MADE)
        other = MemoryStore()
        lines = exported(CollectionSchemas(made.store), made.name)
        await import_from(CollectionSchemas(other), lines, "copy")
        return plan_of(await made.store.describe(made.name)).index

    # Of `migrate`
    assert sorted(made.run(moved())) == sorted(TEXTS)


@pytest.mark.parametrize(
    "text", ["lang", "lang:", ":keyword", "lang:words", "year:integer!", "a b:keyword", 7]
)
def test_what_is_no_index_is_refused(text, tmp_path):
    with pytest.raises(InvalidInput, match="should look like lang:keyword"):
        schema_for(spec_in(tmp_path), MODEL, index=[text])


def test_a_store_that_wants_an_index_names_the_flag_that_makes_it(protocol, tmp_path):
    with speaking() as state:
        state.strict = True
        store = StoreConfig(qdrant_url=state.url(protocol))
        encoder = encoder_in(tmp_path)
        rows = tmp_path / "rows.jsonl"
        rows.write_text('{"id": "1", "text": "one", "year": 2024}\n')
        ingest(rows, "c", encoder, store, quiet=True)
        where = {"must": [{"key": "metadata.year", "range": {"gte": 2020}}]}

        async def counted():
            async with opened(store) as served:
                points, _ = await served.scroll("c", limit=9, scroll_filter=filter_from(where))
                return len(points)

        with pytest.raises(StoreError, match="payload index") as refused:
            asyncio.run(counted())
        # As the message says
        (index,) = re.findall(r"ingest … --index (\S+?)`", str(refused.value))
        ingest(rows, "c", encoder, store, index=[index], quiet=True)
        assert asyncio.run(counted()) == 1


def test_over_http_and_by_client(tmp_path):
    schemas = CollectionSchemas(MemoryStore())
    made = []

    async def index(name, indexes, make=schemas.store.index):
        made.append(indexes)
        await make(name, indexes)

    schemas.store.index = index
    with serving(spec_in(tmp_path), schemas=schemas, model_id=MODEL) as running:
        # None of these has a point, so none is written
        for body, status in (
            ({"points": []}, 422),
            ({"points": [], "index": ["x"]}, 422),
            ({"points": [], "index": ["lang:keyword"]}, 404),
            ({"points": [], "index": ["lang:keyword"], "create": True}, 200),
        ):
            answer = running.post("/collections/notes/points", body)
            assert answer.status_code == status, answer.text
        with Client(running.url) as client:
            told = client.upsert("notes", ["one"], index=["year:integer"])
            assert (told.created, len(told.ids)) == (False, 1)
            assert client.upsert("other", [], index=TEXTS).created
    named = [indexes for indexes in made if indexes]
    assert named == [{"lang": "keyword"}, {"year": "integer"}, indexes_of(TEXTS)]
