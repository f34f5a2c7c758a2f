"""Ingests whose embedding server, or something in front of it, goes wrong: what is stored stays as it is."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest

from hybridtei.errors import BackendError
from hybridtei.ingest import prepare as preparing
from hybridtei.ingest.chunking import CHUNK, DOCUMENT_ID, TEXT
from hybridtei.ingest.embedders import RemoteEmbedder
from hybridtei.store.embedded import EmbeddedStore
from tests.engine import small
from tests.ingest.small_ingest import Ingest, points
from tests.sampled import sampled
from tests.server.live import serving

LOGIN = "<html><title>Sign in</title>your session has ended</html>"
REFUSED = json.dumps({"error": "Input validation error: too long", "error_type": "Validation"})
Answer = tuple[int, dict[str, str], str]


class Proxy:
    """In front of a server: passes on what it is asked, or answers `instead(body)` where that gives something."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.instead: Callable[[bytes], Answer | None] = lambda body: None


@contextmanager
def proxied(server_url: str) -> Iterator[Proxy]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        wbufsize = -1  # head and body in one packet

        def do_GET(self) -> None:
            self.forward(b"")

        def do_POST(self) -> None:
            self.forward(self.rfile.read(int(self.headers["content-length"])))

        def forward(self, body: bytes) -> None:
            answer = proxy.instead(body) if body else None
            if answer is None:
                headers = {"content-type": "application/json"} if body else {}
                passed = client.request(self.command, server_url + self.path, content=body or None, headers=headers)
                answer = passed.status_code, {"content-type": passed.headers.get("content-type", "")}, passed.text
            status, headers, text = answer
            self.send_response(status)
            for name, value in {**headers, "content-length": str(len(text.encode()))}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *arguments: Any) -> None:
            pass

    listening = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    proxy = Proxy(f"http://127.0.0.1:{listening.server_address[1]}")
    thread = threading.Thread(target=listening.serve_forever, args=[0.01], daemon=True)
    with httpx.Client(timeout=60, trust_env=False) as client:
        thread.start()
        try:
            yield proxy
        finally:
            listening.shutdown()
            listening.server_close()
            thread.join()


def write(path: Path, texts: dict[str, str]) -> Path:
    path.write_text("".join(json.dumps({"id": name, "text": text}) + "\n" for name, text in texts.items()))
    return path


def texts_of(count: int, word: str) -> dict[str, str]:
    return {f"d{i}": f"text number {i} {word}" for i in range(count)}


def stored(records: list[Any]) -> dict[str, str]:
    """The texts of the collection, by document, its chunks joined."""
    found: dict[str, list[tuple[int, str]]] = {}
    for record in records:
        found.setdefault(record.payload[DOCUMENT_ID], []).append((record.payload[CHUNK], record.payload[TEXT]))
    return {name: "|".join(text for _, text in sorted(chunks)) for name, chunks in found.items()}


def changed_against(tmp_path: Path, count: int, proxy: Proxy, instead: Callable[[bytes], Answer | None]) -> tuple[Any, Ingest]:
    """An ingest, and then one of other texts while the server is ill: (what the second raised, the ingest)."""

    async def run() -> tuple[Any, Ingest]:
        store, ingest = EmbeddedStore(str(tmp_path / "qdrant")), Ingest(tmp_path)
        raised = None
        try:
            await ingest.run(write(tmp_path / "in.jsonl", texts_of(count, "by words")), store, RemoteEmbedder(proxy.url))
            before = stored(await points(store))
            assert len(before) == count
            proxy.instead = instead
            remote = RemoteEmbedder(proxy.url, patience_s=1)
            try:
                await ingest.run(write(tmp_path / "in.jsonl", texts_of(count, "by meaning")), store, remote)
            except (ConnectionError, BackendError) as error:
                raised = error
            assert stored(await points(store)) == before, "what is stored was touched"
            proxy.instead = lambda body: None
            outcome = await ingest.run(tmp_path / "in.jsonl", store, RemoteEmbedder(proxy.url))
            assert (outcome.points, ingest.stats.documents) == (count, count)
        finally:
            await store.close()
        return raised, ingest

    return asyncio.run(run())


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        ((200, {"content-type": "text/html"}, LOGIN), "your session has ended"),
        ((302, {"location": "/login"}, ""), "to /login"),
        pytest.param((400, {}, "<html>400 Bad Request"), "400 Bad Request", marks=pytest.mark.slow),
        pytest.param((413, {}, "<html>413 Request Entity Too Large"), "Entity Too Large", marks=pytest.mark.slow),
        ((422, {}, '{"detail": "no such template"}'), "no such template"),
        pytest.param((424, {}, ""), "status 424", marks=pytest.mark.slow),
        ((200, {}, '{"choices": []}'), "choices"),
    ],
    ids=["login", "redirect", "400", "413", "422", "424", "json"],
)
def test_an_answer_that_is_not_the_servers_ends_the_run_and_costs_nothing(tmp_path, answer, why):
    with serving() as server, proxied(server.url) as proxy:
        raised, ingest = changed_against(tmp_path, 20, proxy, lambda body: answer)
    assert isinstance(raised, ConnectionError)
    assert why in str(raised)
    assert not ingest.quarantine.exists()


@pytest.mark.parametrize("count", sampled([20, 60], [20]))
def test_texts_that_the_server_refuses_keep_their_stored_versions_and_many_end_the_run(tmp_path, monkeypatch, count):
    monkeypatch.setattr(preparing, "BATCH_CHUNKS", 16)
    with serving() as server, proxied(server.url) as proxy:
        raised, _ = changed_against(tmp_path, count, proxy, lambda body: (422, {}, REFUSED))
    assert (raised is not None) == (count == 60)
    if raised is not None:
        assert isinstance(raised, BackendError)
        assert "of the last 50 texts failed" in str(raised)
        assert "too long" in str(raised)


def test_a_long_document_keeps_its_stored_version_where_a_later_chunk_fails(tmp_path, monkeypatch):
    monkeypatch.setattr(preparing, "BATCH_CHUNKS", 4)
    lines = [f"The engine finds text {i} by words and meaning." for i in range(40)]

    async def run() -> None:
        store = EmbeddedStore(str(tmp_path / "qdrant"))
        ingest = Ingest(tmp_path, {"fail_on": small.IDS["poison"]}, chunk_tokens=32)
        source = tmp_path / "in.jsonl"
        await ingest.run(write(source, {"long": "\n".join(lines), "other": "one"}), store)
        before = stored(await points(store))
        assert before["long"].count("|") > 8, "more than two batches"
        worse = ["Another text by words and meaning.", *lines[1:30], "poison"]
        outcome = await ingest.run(write(source, {"long": "\n".join(worse), "other": "two"}), store)
        assert stored(await points(store)) == before | {"other": "two"}
        assert outcome.points == outcome.expected
        better = "\n".join(worse[:-1])
        outcome = await ingest.run(write(source, {"long": better, "other": "two"}), store)
        after = stored(await points(store))
        assert after["long"].startswith("Another text")
        assert "text 35" not in after["long"]
        assert outcome.points == outcome.expected == len(await points(store))
        await store.close()

    asyncio.run(run())


def test_a_text_beyond_the_servers_limit_is_its_own_fault(tmp_path):
    async def run(url: str) -> None:
        store, ingest = EmbeddedStore(str(tmp_path / "qdrant")), Ingest(tmp_path)
        texts = {"large": "x" * 5000, "small": "one two"}
        outcome = await ingest.run(write(tmp_path / "in.jsonl", texts), store, RemoteEmbedder(url))
        assert stored(await points(store)).keys() == {"small"}
        assert (outcome.points, ingest.stats.quarantined) == (1, 1)
        await store.close()

    with serving(server={"payload_limit": 2000}) as server:
        asyncio.run(run(server.url))
