"""A server store against a real endpoint of both protocols: what it sends, and what it does when
the server is in trouble."""

import asyncio
import json
from contextlib import asynccontextmanager

import numpy as np
import pytest
from msgspec import structs

from hybridtei.batch import Ragged
from hybridtei.config import StoreConfig
from hybridtei.errors import StoreError, StoreUnavailable
from hybridtei.outputs import Embeddings
from hybridtei.retrieval.ingest.run import ingest
from hybridtei.retrieval.search.options import SearchOptions
from hybridtei.retrieval.search.searcher import Searcher
from hybridtei.retrieval.store import opened
from hybridtei.retrieval.store.base import CollectionSchema
from hybridtei.retrieval.store.nodes import Address, address_of
from hybridtei.retrieval.store.points import MAX_BATCH_BYTES, to_points
from hybridtei.retrieval.store.query import filter_from
from hybridtei.retrieval.store.server import INDEXES, ServerStore
from tests.retrieval.search.small_search import MODEL, TEXTS, encoder_in
from tests.retrieval.store.speaking import Failure, Qdrant, serving_grpc, serving_rest, speaking
from tests.retrieval.store.stores import embeddings, plan

HANG = 60
KEY = "a secret key"
POINTS = to_points(
    embeddings(30), list(range(30)), [{"number": i, "text": f"ä {i}"} for i in range(30)]
)


@pytest.fixture
def qdrant():
    with speaking() as state:
        yield state


def store_of(state, protocol, **settings):
    settings = {"qdrant_timeout": 10.0, "qdrant_patience": 5.0, **settings}
    return ServerStore(StoreConfig(qdrant_url=state.url(protocol), **settings))


@asynccontextmanager
async def telling(state, protocol, **settings):
    store = store_of(state, protocol, **settings)
    try:
        yield store
    finally:
        await store.close()


async def test_a_request_keeps_to_eight_megabytes(qdrant, protocol):
    """Five multi-vectors of 2 MB each by gRPC, and five times that as JSON."""
    rows = np.random.default_rng(0).normal(size=(2_500, 1_000)).astype(np.float32)
    count = 5 if protocol == "grpc" else 2
    big = to_points(Embeddings(multivector=Ragged(rows, np.arange(6) * 500)), list(range(5)))[
        :count
    ]
    wide = {"multivector": structs.replace(plan().vectors["multivector"], size=1_000)}

    async with telling(qdrant, protocol) as store:
        await store.create("c", CollectionSchema(wide, {}))
        await store.upsert("c", big)
    assert qdrant.local.count("c").count == count
    assert qdrant.calls.count("upsert") == 2
    assert 2_000_000 < qdrant.largest < (MAX_BATCH_BYTES if protocol == "grpc" else 32 * 2**20)


@pytest.mark.parametrize(
    ("failure", "advice"),
    [
        (Failure(503, "starting"), "check that it runs|refused"),
        (
            Failure(500, "No space left on device"),
            "a full disk or unreachable nodes.*No space left",
        ),
        (Failure(507, "WAL buffer size exceeds available disk space"), "disk"),
        (Failure(429, "Rate limiter: too fast", "0"), "slow down"),
    ],
)
async def test_passing_trouble_is_waited_out_and_lasting_trouble_is_told(
    qdrant, protocol, failure, advice
):
    async with telling(qdrant, protocol) as store:
        await store.create("c", plan())
        qdrant.failures = [failure] * 2
        await store.upsert("c", POINTS)
        assert qdrant.local.count("c").count == 30
        store._patience_s = 0.01
        qdrant.failures = [failure] * 1000
        with pytest.raises(StoreUnavailable, match=f"(?s){advice}.*tried .*patience 0.01 s"):
            await store.upsert("c", POINTS, plan())
        qdrant.failures = []
        await store.upsert("c", POINTS)


async def test_a_pause_longer_than_the_patience_is_not_begun(qdrant, protocol):
    async with telling(qdrant, protocol) as store:
        await store.create("c", plan())
        qdrant.failures = [Failure(429, "Rate limiter", "3600")]
        with pytest.raises(StoreUnavailable, match=r"slow down.*tried once") as refused:
            await store.upsert("c", POINTS, plan())
        assert refused.value.retry_after_s == 3600
        assert qdrant.calls.count("upsert") == 1


async def test_writes_whose_answers_are_lost_are_done_once(qdrant, protocol):
    async with telling(qdrant, protocol) as store:
        qdrant.lost = 1
        await store.create("c", plan(model_id="tiny"))
        qdrant.lost = 2
        await store.upsert("c", POINTS)
        assert qdrant.local.count("c").count == 30
        with pytest.raises(StoreError, match="the name already exists"):
            await store.create("c", plan(model_id="tiny"))


async def test_a_server_that_hangs_is_left_and_nothing_is_lost(qdrant, protocol):
    async with telling(qdrant, protocol) as store:
        await store.create("c", plan())
        store._timeout_s, store._patience_s = 0.1, 0.0
        qdrant.held.clear()
        with pytest.raises(StoreUnavailable, match="took too long: raise `qdrant_timeout`"):
            await store.upsert("c", POINTS, plan())
        qdrant.held.set()
        store._timeout_s = HANG
        await store.upsert("c", POINTS)
        assert await store.count("c") == 30


async def test_a_server_that_is_down_is_found_again(protocol):
    state = Qdrant()
    serving = serving_grpc if protocol == "grpc" else serving_rest
    with serving(state) as port:
        state.grpc_port = state.rest_port = port
        store = store_of(state, protocol)
        await store.create("c", plan())
        await store.upsert("c", POINTS[:10])
    store._patience_s = 0.05
    with pytest.raises(StoreUnavailable, match="does not answer: check that it runs"):
        await store.upsert("c", POINTS[10:20])
    store._patience_s = HANG
    waiting = asyncio.create_task(store.upsert("c", POINTS[20:]))
    await asyncio.sleep(0)
    with serving(state, port):
        await waiting
        assert {record.id for record in (await store.scroll("c", limit=99))[0]} == {
            *range(10),
            *range(20, 30),
        }
        await store.close()
    state.local.close()


async def test_a_key_is_sent_and_a_wrong_one_is_told_at_once(protocol):
    with speaking(KEY) as state:
        async with telling(state, protocol, qdrant_api_key=KEY) as store:
            await store.create("c", plan())
        async with telling(state, protocol, qdrant_api_key="another") as store:
            with pytest.raises(StoreError, match="set `qdrant_api_key`") as refused:
                await store.collections()
            assert not isinstance(refused.value, StoreUnavailable)
            assert "another" not in str(refused.value)
        assert state.calls == ["create", *["index"] * len(INDEXES), "list"]


async def test_another_service_at_the_address_is_told(qdrant):
    elsewhere = StoreConfig(qdrant_url=f"{qdrant.url('rest')}/elsewhere", qdrant_patience=0.0)
    store = ServerStore(elsewhere)
    with pytest.raises(StoreError, match=r"no such collection|not Qdrant's"):
        await store.collections()
    await store.close()


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("localhost:6333", Address("localhost", 6333, 6334, False)),
        ("http://10.0.0.1:6334/", Address("10.0.0.1", 6333, 6334, False)),
        ("https://x.cloud.qdrant.io:6333", Address("x.cloud.qdrant.io", 6333, 6334, True)),
        ("https://proxy.example/qdrant", Address("proxy.example", 6333, None, True, "/qdrant")),
        ("grpc://[::1]:7777", Address("::1", None, 7777, False)),
        ("grpc://host:6334", Address("host", 6333, 6334, False)),
        ("grpcs://host", Address("host", 6333, 6334, True)),
    ],
)
def test_an_address_says_which_protocol(url, address):
    assert address_of(url) == address


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("ftp://host", "should look like"),
        ("http://", "should look like"),
        ("http://host:99999", "[Pp]ort"),
        ("http://user:secret@host", "give the key as `qdrant_api_key`"),
    ],
)
def test_a_bad_address_is_refused(url, message):
    with pytest.raises(StoreError, match=message) as refused:
        address_of(url)
    assert "secret" not in str(refused.value)


async def test_a_collection_deleted_while_it_is_described_is_none(qdrant, protocol, monkeypatch):
    """A migration replaces a collection by an alias of its name; a client that reads the schema
    meanwhile looks again."""
    async with telling(qdrant, protocol) as store:
        await store.create("papers", plan())
        exists = store._exists

        async def then_deleted(name):
            found = await exists(name)
            if found:
                await store.drop(name)
            return found

        monkeypatch.setattr(store, "_exists", then_deleted)
        assert await store.describe("papers") is None


def test_strict_mode_refuses_no_filter_of_ours(qdrant, protocol, tmp_path):
    """Further groups, `read`, and a second ingest of one file; also where an earlier release made
    the collection."""
    encoder = encoder_in(tmp_path)
    rows = tmp_path / "rows.jsonl"
    rows.write_text("\n".join(json.dumps({"id": n, "text": text}) for n, text in enumerate(TEXTS)))
    qdrant.strict = True
    store = StoreConfig(qdrant_url=qdrant.url(protocol))
    assert ingest(rows, "c", encoder, store, quiet=True).stats.points == len(TEXTS)
    qdrant.indexes.clear()
    rows.write_text(rows.read_text() + '\n{"id": "new", "text": "eight"}')
    assert ingest(rows, "c", encoder, store, quiet=True).stats.points == len(TEXTS) + 1
    made = {"source": "keyword", "document_id": "keyword", "chunk": "integer"}
    assert qdrant.indexes["c"] == made

    async def searches():
        async with opened(store) as served:
            searcher = Searcher(served, encoder.named(MODEL))

            async def hits(*must, **options):
                query_filter = filter_from({"must": [*must]}) if must else None
                options = SearchOptions(query_filter=query_filter, **options)
                return (await searcher.search("c", "one", options)).hits

            assert len(await hits(prefetch_limit=1, limit=5)) == 5
            document = {"key": "document_id", "match": {"value": "3"}}
            source = {"key": "source", "match": {"value": "rows.jsonl"}}
            chunk = {"key": "chunk", "range": {"gte": 0, "lt": 50}}
            assert len(await hits(document, source, chunk, group_by=None)) == 1
            beside = await hits(neighbours={"before": 1, "after": 1})
            assert beside
            assert None not in [hit.passage for hit in beside]
            with pytest.raises(StoreError, match="Index required but not found"):
                await hits({"key": "metadata.x", "match": {"value": 1}})

    asyncio.run(searches())


async def test_indexes_of_a_collection_are_looked_up_once(qdrant, protocol):
    async with telling(qdrant, protocol) as first:
        await first.create("c", plan())
    async with telling(qdrant, protocol) as store:
        qdrant.calls.clear()
        await store.index("c", {"page": "integer"})
        once = len(qdrant.calls)
        await store.index("c", {"line": "integer"})
        assert len(qdrant.calls) == once + 1
