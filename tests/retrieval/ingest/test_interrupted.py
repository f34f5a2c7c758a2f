"""Ingests that are killed at any moment, and two at once: a later run makes the collection equal to
a fresh one."""

import asyncio
import sys

import pytest

from hybridtei.retrieval.ingest import prepare as preparing
from hybridtei.retrieval.store.memory import MemoryStore
from tests.ran import ran
from tests.retrieval.ingest.small_ingest import Ingest, points, write

MODULE = "tests.retrieval.ingest.killed"


@pytest.mark.parametrize("kills", ["10", pytest.param("30", marks=pytest.mark.slow)])
def test_after_a_kill_a_run_makes_the_collection_equal_to_a_fresh_one(tmp_path, kills):
    command = [sys.executable, "-m", MODULE, str(tmp_path), kills, "1"]
    done = ran(command)
    assert done.returncode == 0, done.stderr


@pytest.fixture
def texts(monkeypatch):
    monkeypatch.setattr(preparing, "BATCH_CHUNKS", 8)
    return {
        f"d{number}": "\n".join(f"text {number} by words {line}" for line in range(number % 7 + 1))
        for number in range(40)
    }


async def contents(store):
    return {point.id: point.payload for point in await points(store)}


async def fresh(folder, source, chunk_tokens):
    store = MemoryStore()
    await Ingest(folder, chunk_tokens=chunk_tokens).run(source, store)
    return await contents(store)


async def test_two_at_once_store_each_document_once(tmp_path, texts):
    source, store = write(tmp_path / "in.jsonl", texts), MemoryStore()
    changed = {name: f"{text} and meaning" for name, text in texts.items()}
    for new in (texts, changed):
        write(source, new)
        both = [Ingest(tmp_path / name, chunk_tokens=24) for name in "ab"]
        await asyncio.gather(*(ingest.run(source, store) for ingest in both))
        assert await contents(store) == await fresh(tmp_path, source, 24)


async def test_two_at_once_of_other_settings_lose_no_text(tmp_path, texts):
    """They may leave both versions. The next ingest leaves its own."""
    source, store = write(tmp_path / "in.jsonl", texts), MemoryStore()
    await Ingest(tmp_path, chunk_tokens=20).run(source, store)
    runs = await asyncio.gather(
        *(
            Ingest(tmp_path / str(tokens), chunk_tokens=tokens).run(source, store)
            for tokens in (24, 32)
        )
    )
    assert [stats.documents for stats in runs] == [40, 40]
    stored = list((await contents(store)).values())
    for name, text in texts.items():
        words = " ".join(
            payload["text"] for payload in stored if payload["document_id"] == name
        ).split()
        assert set(words) == set(text.split())
    await Ingest(tmp_path, chunk_tokens=32).run(source, store)
    assert await contents(store) == await fresh(tmp_path, source, 32)


async def test_a_version_stays_if_another_ingest_deletes_points_of_the_new_one(tmp_path, texts):
    source, store = write(tmp_path / "in.jsonl", texts), Deleting()
    ingest = Ingest(tmp_path, chunk_tokens=24)
    await ingest.run(source, store)
    before = await contents(store)
    write(source, texts | {"d6": texts["d6"].replace("words", "meaning")})
    store.robs = True
    await ingest.run(source, store)
    assert (await contents(store)).items() >= before.items()
    store.robs = False
    await ingest.run(source, store)
    assert await contents(store) == await fresh(tmp_path, source, 24)


class Deleting(MemoryStore):
    """Another ingest deletes the first point of each upsert."""

    robs = False

    async def upsert(self, name, points, schema=None):
        await super().upsert(name, points, schema)
        if self.robs:
            await super().delete(name, [points[0].id])
