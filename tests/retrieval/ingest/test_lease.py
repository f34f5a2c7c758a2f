"""One ingest at a time into a collection: leases are held, renewed, refused, taken over and given back."""

import asyncio
import os
import socket
from pathlib import Path
from typing import Any

import pytest

from hybridtei.errors import InvalidInput, StoreError
from hybridtei.retrieval.ingest import ledger
from hybridtei.retrieval.ingest.ledger import LEASE, leased, locked
from hybridtei.retrieval.store.base import CollectionSchema, VectorParams
from tests.retrieval.ingest.small_ingest import Ingest, write
from tests.retrieval.store.memory_store import MemoryStore


def test_one_ingest_at_a_time_into_a_folders_collection(tmp_path: Path) -> None:
    with locked(tmp_path / "deep" / "c.lock"):
        with (
            pytest.raises(InvalidInput, match="another ingest"),
            locked(tmp_path / "deep" / "c.lock"),
        ):
            pass
        with locked(tmp_path / "deep" / "d.lock"):
            pass
    with locked(tmp_path / "deep" / "c.lock"):
        pass


async def collection(store: MemoryStore) -> MemoryStore:
    await store.create(
        "c", CollectionSchema({"dense": VectorParams(size=2, distance="Cosine")}, {})
    )
    return store


async def holder(store: MemoryStore) -> Any:
    schema = await store.describe("c")
    return (schema.metadata.get(LEASE) or {}).get("holder")


async def test_a_lease_is_renewed_refused_and_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger, "RENEW_S", 0.01)
    monkeypatch.setattr(ledger, "POLL_S", 0.05)
    store, told = await collection(MemoryStore()), list[str]()
    async with leased(store, "c", told.append):
        assert str(os.getpid()) in await holder(store)
        with pytest.raises(InvalidInput, match="another ingest into 'c' is running"):
            async with leased(store, "c", told.append):
                pass
    assert await holder(store) is None
    assert len(told) == 1


@pytest.mark.parametrize("left_by", [f"{socket.gethostname()}:999999999:x", "another-machine:1:x"])
async def test_the_lease_of_a_killed_ingest_is_taken_over(
    monkeypatch: pytest.MonkeyPatch, left_by: str
) -> None:
    monkeypatch.setattr(ledger, "LEASE_S", 0.2)
    monkeypatch.setattr(ledger, "POLL_S", 0.05)
    store, told = await collection(MemoryStore()), list[str]()
    await store.annotate("c", {LEASE: {"holder": left_by, "renewed": 3}})
    async with leased(store, "c", told.append):
        assert await holder(store) != left_by
    assert len(told) == left_by.startswith("another")


async def test_an_ingest_ends_whose_lease_another_has_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ledger, "RENEW_S", 0.01)
    store = await collection(MemoryStore())

    async def robbed() -> None:
        async with leased(store, "c", lambda line: None):
            await store.annotate("c", {LEASE: {"holder": "other:1:x", "renewed": 0}})
            async with asyncio.timeout(30):
                await asyncio.Event().wait()

    with pytest.raises(StoreError, match="the ingest of other:1:x has taken over"):
        await robbed()
    assert await holder(store) == "other:1:x"


async def test_a_server_that_keeps_no_metadata_has_no_lease(tmp_path: Path) -> None:
    class Old(MemoryStore):
        async def annotate(self, name: str, metadata: Any) -> None:
            pass

    store, ingest = Old(), Ingest(tmp_path)
    for expected in (1, 0):
        await ingest.run(write(tmp_path / "in.jsonl", {"a": "text"}), store)
        assert ingest.stats.documents == expected
