"""Whole collections over HTTP: out and in bit for bit, refused before any work, broken in a line,
left by a client midway."""

import json
from contextlib import ExitStack
from typing import TypeVar

import httpx
import pytest

from hybridtei.errors import StoreUnavailable
from hybridtei.retrieval.store.collection import CollectionSchemas
from hybridtei.retrieval.store.embedded import EmbeddedStore
from hybridtei.retrieval.store.memory import MemoryStore
from hybridtei.retrieval.store.points import point_id, to_points
from hybridtei.retrieval.store.transfer import MAX_LINE_BYTES, PAGE_POINTS
from hybridtei.server.models import MAX_TRANSFERS
from tests.retrieval.search.small_search import run
from tests.retrieval.store.stores import embeddings, plan
from tests.retrieval.store.test_transfer import bits
from tests.server.http.raw import connected
from tests.server.http.test_unsent import unsent
from tests.server.live import JSON, serving, until

T = TypeVar("T")
COUNT = 3 * PAGE_POINTS
# Characters of each text: a page is more than sockets buffer
LARGE = 100_000
IDS = [point_id("a", i) if i % 3 else i for i in range(COUNT)]
KEY = {"authorization": "Bearer key-flag"}
EXPORT, IMPORT = "/collections/{}/export", "/collections/{}/import"


class Counted(EmbeddedStore):
    """A store that counts pages."""

    pages = 0

    async def scroll(self, *given, **settings):
        self.pages += 1
        return await super().scroll(*given, **settings)


def asked(folder, call):
    """What another client of the folder is answered."""

    async def opened():
        store = EmbeddedStore(str(folder))
        try:
            return await call(store)
        finally:
            await store.close()

    return run(opened())


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    async def fill(store):
        await store.create("docs", plan(model_id="tiny"))
        payloads = [
            {"text": f"ä\n {i} " + "x" * LARGE, "deep": [{"none": None}]} for i in range(COUNT)
        ]
        await store.upsert("docs", to_points(embeddings(COUNT), IDS, payloads))

    path = tmp_path_factory.mktemp("store")
    asked(path, fill)
    return path


@pytest.fixture(scope="module")
def store(folder):
    return Counted(str(folder))


@pytest.fixture(scope="module")
def keyed(store):
    """A server with a key that runs one export or import at once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hybridtei.server.models.MAX_TRANSFERS", 1)
        with serving(
            schemas=CollectionSchemas(store),
            server={"api_key": "key-flag"},
            engine={"max_concurrent_requests": PAGE_POINTS},
        ) as running:
            yield running


@pytest.fixture(scope="module")
def export(keyed):
    answer = keyed.get(EXPORT.format("docs"), headers=KEY)
    assert (answer.status_code, answer.headers["content-type"]) == (200, "application/jsonl")
    return answer.content


def imported(keyed, name, content):
    return keyed.client.post(IMPORT.format(name), content=content, headers=KEY)


def records(folder, name):
    found, _ = asked(folder, lambda store: store.scroll(name, limit=1000, with_vectors=True))
    return {one.id: (one.payload, bits(one.vector)) for one in found}


def test_ids_payloads_and_vectors_are_equal(keyed, folder, export):
    assert json.loads(export.splitlines()[-1]) == {"points": COUNT}
    for written in (COUNT, 0):
        answer = imported(keyed, "copy", export)
        assert answer.json() == {
            "collection": "copy",
            "created": written > 0,
            "points": COUNT,
            "written": written,
        }
    assert records(folder, "copy") == records(folder, "docs")
    assert keyed.client.head(EXPORT.format("copy"), headers=KEY).content == b""
    assert keyed.get(EXPORT.format("nowhere"), headers=KEY).status_code == 404


def test_a_broken_line_is_named_with_its_field(keyed, folder, export):
    lines = export.splitlines(keepends=True)
    lines[3] = json.dumps({**json.loads(lines[3]), "vectors": {"dense": [1]}}).encode() + b"\n"
    answer = imported(keyed, "broken", b"".join(lines))
    assert (answer.status_code, answer.json()["error_type"]) == (422, "Validation")
    assert "line 4: point " in answer.json()["error"]
    assert "vector `dense`: has 1 dimensions, the collection 16" in answer.json()["error"]
    assert (
        "line 5: should be"
        in imported(keyed, "broken", b"".join(export.splitlines(keepends=True)[:4])).json()["error"]
    )
    assert len(records(folder, "broken")) == 3


def test_a_line_has_a_bound_and_a_body_no_coding(keyed, folder):
    too_long = (b" " * 1_000_000 for _ in range(MAX_LINE_BYTES // 1_000_000 + 2))
    assert (
        f"line 1: has more than {MAX_LINE_BYTES} bytes"
        in imported(keyed, "new", too_long).json()["error"]
    )
    coded = keyed.client.post(
        IMPORT.format("new"), content=b"x", headers={**KEY, "content-encoding": "gzip"}
    )
    assert coded.status_code == 415
    assert asked(folder, lambda store: store.describe("new")) is None


def test_without_keys_the_server_says_what_the_role_is_for():
    with serving(schemas=CollectionSchemas(MemoryStore())) as running:
        for answer in (
            running.get(EXPORT.format("docs")),
            running.post(IMPORT.format("docs"), b"nonsense"),
        ):
            assert answer.status_code == 403
            assert "needs a key with the role `manage`, and this server has no keys" in answer.text
            assert "`/collections/docs/" in answer.text


def test_a_client_that_leaves_an_import_midway_imports_again(keyed, folder, export):
    def half():
        yield export[: len(export) // 2]
        assert keyed.get(EXPORT.format("docs"), headers=KEY).status_code == 429
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        imported(keyed, "left", half())
    until(lambda: imported(keyed, "left", b"").status_code != 429)
    there = len(records(folder, "left"))
    assert 0 < there < COUNT
    assert imported(keyed, "left", export).json() == {
        "collection": "left",
        "created": False,
        "points": COUNT,
        "written": COUNT - there,
    }
    assert records(folder, "left") == records(folder, "docs")


def test_a_client_that_leaves_an_export_midway_ends_it(keyed, store):
    store.pages = 0
    with keyed.client.stream("GET", EXPORT.format("docs"), headers=KEY) as answer:
        assert next(answer.iter_raw()).startswith(b'{"hybridtei":')
        assert imported(keyed, "docs", b"").status_code == 429
    until(lambda: imported(keyed, "docs", b"").status_code != 429)
    assert store.pages < COUNT // PAGE_POINTS


def test_exports_that_nobody_reads_hold_neither_permits_nor_the_bytes_of_other_answers(
    folder, monkeypatch
):
    """Their pages have more than `--max-unsent-bytes` together."""
    monkeypatch.setattr("hybridtei.server.models.MAX_TRANSFERS", MAX_TRANSFERS)
    store = Counted(str(folder))
    server = {"api_key": "key-flag", "max_unsent_bytes": 20_000_000}
    with (
        serving(schemas=CollectionSchemas(store), server=server) as running,
        ExitStack() as stack,
    ):
        ask = f"GET {EXPORT.format('docs')} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer key-flag\r\n\r\n"
        for _ in range(MAX_TRANSFERS):
            stack.enter_context(connected(running)).sendall(ask.encode())
        until(lambda: store.pages == MAX_TRANSFERS)
        until(lambda: unsent(running) > 0)
        assert running.get(EXPORT.format("docs"), headers=KEY).status_code == 429
        embed = running.post("/embed", {"inputs": "one"}, headers={**JSON, **KEY})
        assert embed.status_code == 200
        assert unsent(running) < MAX_TRANSFERS * 2_000_000
        points = {"points": [{"text": "one"}] * 480}
        answer = running.post("/collections/none/points", points, headers={**JSON, **KEY})
        assert answer.status_code == 404


def test_an_export_that_the_store_cuts_off_lacks_its_last_line(keyed, store, monkeypatch):
    async def failing(*given, **settings):
        raise StoreUnavailable("away")

    monkeypatch.setattr(store, "scroll", failing)
    with pytest.raises(httpx.RemoteProtocolError, match="incomplete"):
        keyed.get(EXPORT.format("docs"), headers=KEY)
