"""An ingest waits until the server has indexed its points."""

import asyncio

import pytest

from hybridtei.config import StoreConfig
from hybridtei.errors import StoreError
from hybridtei.retrieval.ingest.write import wait_indexed
from hybridtei.retrieval.store.server import ServerStore
from tests.retrieval.store.speaking import speaking
from tests.retrieval.store.stores import plan


@pytest.fixture
def qdrant():
    with speaking() as running:
        yield running


def store_of(qdrant, protocol):
    return ServerStore(StoreConfig(qdrant_url=qdrant.url(protocol), qdrant_patience=0.2))


@pytest.mark.parametrize(
    ("statuses", "says"),
    [
        (["yellow", "grey", "green"], "is green"),
        (["red"], "is red"),
        (["yellow"], "the server continues indexing"),
    ],
    ids=["green", "red", "stalled"],
)
async def test_it_waits_until_the_server_has_indexed(qdrant, statuses, says):
    store, told, now = store_of(qdrant, "rest"), [], iter(range(0, 10_000, 100))
    await store.create("c", plan())
    qdrant.status = list(statuses)
    await wait_indexed(
        store, "c", asyncio.Event(), told.append, clock=lambda: float(next(now)), poll_s=0.001
    )
    assert says in told[0]
    assert qdrant.status == statuses[-1:]
    await store.close()


async def test_waiting_ends_when_asked(qdrant):
    store, told, stop = store_of(qdrant, "grpc"), [], asyncio.Event()
    await store.create("c", plan())
    qdrant.status = ["yellow"]
    waiting = asyncio.create_task(wait_indexed(store, "c", stop, told.append))
    await asyncio.sleep(0)
    stop.set()
    await waiting
    assert "the server continues indexing" in told[0]
    await store.close()


async def test_a_collection_that_is_gone_is_an_error(qdrant):
    store = store_of(qdrant, "grpc")
    with pytest.raises(StoreError):
        await wait_indexed(store, "c", asyncio.Event(), print)
    await store.close()
