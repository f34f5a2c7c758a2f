"""A server indexes after a large ingest, not meanwhile, and its threshold is restored however the ingest ends."""

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from hybridtei.config import StoreConfig
from hybridtei.errors import StoreError
from hybridtei.retrieval.ingest import write as writing
from hybridtei.retrieval.ingest.write import THRESHOLD, deferred_indexing, wait_indexed
from hybridtei.retrieval.store.server import ServerStore
from tests.retrieval.store.speaking import Failure, Qdrant, speaking
from tests.retrieval.store.stores import plan

PROTOCOLS = ("grpc", "rest")


@pytest.fixture
def qdrant() -> Iterator[Qdrant]:
    with speaking() as running:
        yield running


def store_of(qdrant: Qdrant, protocol: str) -> ServerStore:
    url = (
        f"grpc://127.0.0.1:{qdrant.grpc_port}"
        if protocol == "grpc"
        else f"http://127.0.0.1:{qdrant.rest_port}"
    )
    return ServerStore(StoreConfig(qdrant_url=url, qdrant_patience=0.2))


async def settings(store: ServerStore) -> tuple[int | None, Any]:
    """(threshold, the one to restore)."""
    config = (await store.info("c")).config
    return config.optimizer_config.indexing_threshold, (config.metadata or {}).get(THRESHOLD)


@pytest.mark.parametrize("protocol", PROTOCOLS)
async def test_a_large_run_defers_and_restores_also_where_it_fails(
    qdrant: Qdrant, protocol: str
) -> None:
    store = store_of(qdrant, protocol)
    await store.create("c", plan())
    await store.set_indexing_threshold("c", 7000)
    async with deferred_indexing(store, "c", is_large=False):
        assert await settings(store) == (7000, None)
    with pytest.raises(ZeroDivisionError):  # noqa: PT012 - the block is what fails
        async with deferred_indexing(store, "c", is_large=True):
            assert await settings(store) == (0, 7000)
            raise ZeroDivisionError
    assert await settings(store) == (7000, None)
    await store.close()


@pytest.mark.parametrize("step", ["before", "after", "lost"])
async def test_the_next_run_restores_after_a_kill(
    qdrant: Qdrant, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """A kill comes before or after the threshold is 0, or the server is away when it should be restored."""
    store = store_of(qdrant, "grpc")
    await store.create("c", plan())
    await store.set_indexing_threshold("c", 7000)
    with monkeypatch.context() as patch:
        if step == "before":
            patch.setattr(ServerStore, "set_indexing_threshold", lambda *_: asyncio.sleep(0))
        if step != "lost":
            patch.setattr(writing, "_restore", lambda *_: asyncio.sleep(0))
        async with deferred_indexing(store, "c", is_large=True):
            if step == "lost":
                qdrant.failures = [Failure(503, "gone")] * 100
    qdrant.failures = []
    assert await settings(store) == (7000 if step == "before" else 0, 7000)
    async with deferred_indexing(store, "c", is_large=True):
        assert await settings(store) == (0, 7000)
    assert await settings(store) == (7000, None)
    await store.close()


async def test_a_threshold_of_zero_that_somebody_chose_stays(qdrant: Qdrant) -> None:
    store = store_of(qdrant, "grpc")
    await store.create("c", plan())
    await store.set_indexing_threshold("c", 0)
    async with deferred_indexing(store, "c", is_large=True):
        assert await settings(store) == (0, None)
    assert await settings(store) == (0, None)
    await store.close()


@pytest.mark.parametrize(
    ("statuses", "says"),
    [
        (["yellow", "grey", "green"], "is green"),
        (["red"], "is red"),
        (["yellow"], "the server continues indexing"),
    ],
    ids=["green", "red", "stalled"],
)
async def test_it_waits_until_the_server_has_indexed(
    qdrant: Qdrant, statuses: list[str], says: str
) -> None:
    store, told, now = store_of(qdrant, "rest"), list[str](), iter(range(0, 10_000, 100))
    await store.create("c", plan())
    qdrant.status = list(statuses)
    await wait_indexed(
        store, "c", asyncio.Event(), told.append, clock=lambda: float(next(now)), poll_s=0.001
    )
    assert says in told[0]
    assert qdrant.status == statuses[-1:]
    await store.close()


async def test_waiting_ends_when_asked(qdrant: Qdrant) -> None:
    store, told, stop = store_of(qdrant, "grpc"), list[str](), asyncio.Event()
    await store.create("c", plan())
    qdrant.status = ["yellow"]
    waiting = asyncio.create_task(wait_indexed(store, "c", stop, told.append))
    await asyncio.sleep(0)
    stop.set()
    await waiting
    assert "the server continues indexing" in told[0]
    await store.close()


async def test_a_collection_that_is_gone_is_an_error(qdrant: Qdrant) -> None:
    store = store_of(qdrant, "grpc")
    with pytest.raises(StoreError):
        await wait_indexed(store, "c", asyncio.Event(), print)
    await store.close()
