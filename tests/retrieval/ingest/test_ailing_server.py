"""Ingests whose embedding server, or something in front of it, goes wrong: what is stored stays as
it is."""

import json
from contextlib import contextmanager

import httpx
import pytest

from hybridtei.client import Client
from hybridtei.errors import BackendError
from hybridtei.retrieval.ingest import prepare as preparing
from hybridtei.retrieval.ingest.chunking import CHUNK, DOCUMENT_ID, TEXT
from hybridtei.retrieval.store.memory import MemoryStore
from tests.inference.engine import small
from tests.retrieval.ingest.small_ingest import Ingest, points, write
from tests.server.live import serving
from tests.stand_in import answering

LOGIN = b"<html><title>Sign in</title>your session has ended</html>"
REFUSED = json.dumps(
    {"error": "Input validation error: too long", "error_type": "Validation"}
).encode()


class Proxy:
    """In front of a server: passes on what it is asked, or answers `instead(body)` where that gives
    something."""

    def __init__(self, server_url):
        self.server_url, self.url = server_url, ""
        self.instead = lambda body: None

    def answer(self, method, path, body):
        instead = self.instead(body) if body else None
        if instead is not None:
            return instead
        headers = {"content-type": "application/json"} if body else {}
        passed = httpx.request(
            method,
            self.server_url + path,
            content=body or None,
            headers=headers,
            timeout=60,
            trust_env=False,
        )
        return (
            passed.status_code,
            {"content-type": passed.headers.get("content-type", "")},
            passed.content,
        )


@contextmanager
def proxied(server_url):
    proxy = Proxy(server_url)
    with answering(proxy.answer) as proxy.url:
        yield proxy


def texts_of(count, word):
    return {f"d{i}": f"text number {i} {word}" for i in range(count)}


def stored(records):
    """The texts of the collection, by document, its chunks joined."""
    found = {}
    for record in records:
        found.setdefault(record.payload[DOCUMENT_ID], []).append(
            (record.payload[CHUNK], record.payload[TEXT])
        )
    return {name: "|".join(text for _, text in sorted(chunks)) for name, chunks in found.items()}


async def changed_against(tmp_path, count, proxy, instead):
    """An ingest, and then one of other texts while the server is ill: (what the second raised, the
    ingest)."""
    store, ingest, raised = MemoryStore(), Ingest(tmp_path), None
    await ingest.run(
        write(tmp_path / "in.jsonl", texts_of(count, "by words")), store, Client(proxy.url)
    )
    before = stored(await points(store))
    assert len(before) == count
    proxy.instead = instead
    remote = Client(proxy.url, patience_s=1)
    try:
        await ingest.run(write(tmp_path / "in.jsonl", texts_of(count, "by meaning")), store, remote)
    except (ConnectionError, BackendError) as error:
        raised = error
    assert stored(await points(store)) == before, "what is stored was touched"
    proxy.instead = lambda body: None
    outcome = await ingest.run(tmp_path / "in.jsonl", store, Client(proxy.url))
    assert (outcome.points, ingest.stats.documents) == (count, count)
    return raised, ingest


async def test_an_answer_that_is_not_the_servers_ends_the_run_and_costs_nothing(tmp_path):
    with serving() as server, proxied(server.url) as proxy:
        login = (200, {"content-type": "text/html"}, LOGIN)
        raised, ingest = await changed_against(tmp_path, 20, proxy, lambda body: login)
    assert isinstance(raised, ConnectionError)
    assert "your session has ended" in str(raised)
    assert not ingest.quarantine.exists()


@pytest.mark.parametrize("count", [20, 60])
async def test_texts_that_the_server_refuses_keep_their_stored_versions_and_many_end_the_run(
    tmp_path, monkeypatch, count
):
    monkeypatch.setattr(preparing, "BATCH_CHUNKS", 16)
    with serving() as server, proxied(server.url) as proxy:
        raised, _ = await changed_against(tmp_path, count, proxy, lambda body: (422, {}, REFUSED))
    assert (raised is not None) == (count == 60)
    if raised is not None:
        assert isinstance(raised, BackendError)
        assert "of the last 50 texts failed" in str(raised)
        assert "too long" in str(raised)


async def test_a_long_document_keeps_its_stored_version_where_a_later_chunk_fails(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(preparing, "BATCH_CHUNKS", 4)
    lines = [f"The engine finds text {i} by words and meaning." for i in range(40)]
    store = MemoryStore()
    ingest = Ingest(tmp_path, {"fail_on": small.IDS["poison"]}, chunk_tokens=32)
    source = tmp_path / "in.jsonl"
    await ingest.run(write(source, {"long": "\n".join(lines), "other": "one"}), store)
    before = stored(await points(store))
    assert before["long"].count("|") > 8, "more than two batches"
    worse = ["Another text by words and meaning.", *lines[1:30], "poison"]
    outcome = await ingest.run(write(source, {"long": "\n".join(worse), "other": "two"}), store)
    assert stored(await points(store)) == before | {"other": "two"}
    better = "\n".join(worse[:-1])
    outcome = await ingest.run(write(source, {"long": better, "other": "two"}), store)
    after = stored(await points(store))
    assert after["long"].startswith("Another text")
    assert "text 35" not in after["long"]
    assert outcome.points == len(await points(store))
    await store.close()
