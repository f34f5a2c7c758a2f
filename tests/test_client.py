"""A client, blocking and awaited: it answers as an `Encoder` does, and a server that is away, busy, slow or another ends in one
clear error."""

from __future__ import annotations

import asyncio
import inspect
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import orjson
import pytest

from hybridtei import errors
from hybridtei.client import AsyncClient, Client
from hybridtei.config import EngineConfig
from hybridtei.encoder import Encoder
from hybridtei.errors import InvalidInput, NoAnswer
from hybridtei.models.checkpoint.spec import ModelSpec
from hybridtei.outputs import Embeddings
from hybridtei.retrieval.store.collection import CollectionSchemas
from tests.fake_backend import FakeBackend
from tests.inference.engine import small
from tests.retrieval.search.small_search import MODEL, TEXTS, spec_in
from tests.retrieval.store.memory_store import MemoryStore
from tests.server.conftest import LABELS, TAGS, labelled
from tests.server.live import HANG, serving
from tests.stand_in import Answer, answering

ALL = ("dense", "sparse", "multivector")
MANY = [f"{TEXTS[i % len(TEXTS)]} {i}" for i in range(70)]  # of three requests
Ask = Callable[..., Any]


def blocking(url: str, verb: str, *arguments: Any, **options: Any) -> Any:
    settings = {name: options.pop(name) for name in ("timeout_s", "patience_s", "api_key") if name in options}
    with Client(url, **settings) as client:
        return getattr(client, verb)(*arguments, **options)


def awaited(url: str, verb: str, *arguments: Any, **options: Any) -> Any:
    settings = {name: options.pop(name) for name in ("timeout_s", "patience_s", "api_key") if name in options}

    async def call() -> Any:
        async with AsyncClient(url, **settings) as client:
            return await getattr(client, verb)(*arguments, **options)

    return asyncio.run(call())


@pytest.fixture(params=[blocking, awaited])
def ask(request: pytest.FixtureRequest) -> Ask:
    return request.param  # type: ignore[no-any-return]


def encoder_of(spec: ModelSpec) -> Encoder:
    return Encoder(small.model(spec), FakeBackend(spec), 256, EngineConfig())


def assert_same(one: Embeddings, other: Embeddings) -> None:
    for name in ("dense", "sparse", "multivector"):
        left, right = getattr(one, name), getattr(other, name)
        assert (left is None) == (right is None)
        for part in () if left is None else ("",) if name == "dense" else left.__dataclass_fields__:
            mine, its = (getattr(side, part) if part else side for side in (left, right))
            np.testing.assert_array_equal(mine, its, strict=isinstance(mine, np.ndarray))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"outputs": "dense"},
        {"outputs": ALL},
        {"outputs": ALL, "input_type": "query"},
        {"outputs": ALL, "input_type": "document", "multivector": {"max_tokens": 2, "dtype": "int8"}},
        {"outputs": ("multivector",), "input_type": "document", "multivector": {"dtype": "binary"}},
        {"outputs": ("dense",), "normalize": False, "dimensions": 4, "prompt_name": "query", "truncation_direction": "left"},
        {"outputs": ALL, "spans": [[(0, 3), (0, 9)]] * len(MANY)},
    ],
)
def test_vectors_are_the_encoders_to_the_byte(ask: Ask, options: dict[str, Any]) -> None:
    encoder = encoder_of(small.model_spec())
    with serving(server={"max_client_batch_size": 25}) as server:
        assert_same(ask(server.url, "encode", MANY, **options), encoder.encode(MANY, **options))
        if "spans" not in options:
            assert_same(ask(server.url, "encode", "one two", **options), encoder.encode("one two", **options))
            assert_same(ask(server.url, "encode", [[5, 6], [7]], **options), encoder.encode([[5, 6], [7]], **options))
            assert_same(ask(server.url, "encode", [], **options), encoder.encode([], **options))


def test_scores_and_labels_are_the_encoders(ask: Ask) -> None:
    spec = labelled("LABEL_0")
    with serving(spec, server={"max_client_batch_size": 3}) as server:
        assert ask(server.url, "rerank", "one", TEXTS) == encoder_of(spec).rerank("one", TEXTS)
        assert ask(server.url, "rerank", "one", TEXTS, top_n=2) == encoder_of(spec).rerank("one", TEXTS, top_n=2)
        assert ask(server.url, "rerank", "one", []) == []
    spec = small.model_spec()
    with serving(spec) as server:
        by_m3 = encoder_of(spec).rerank("one", TEXTS, weights="m3")
        assert ask(server.url, "rerank", "one", TEXTS, weights="m3") == by_m3
    spec = labelled(*LABELS)
    with serving(spec) as server:
        texts: list[Any] = [*TEXTS, ("one", "two")]
        assert ask(server.url, "classify", texts) == encoder_of(spec).classify(texts)
        assert ask(server.url, "classify", "one", raw_scores=True) == encoder_of(spec).classify("one", raw_scores=True)
    spec = labelled(*TAGS, tags=True)
    with serving(spec) as server:
        for strategy in ("simple", "none"):
            tagged = ask(server.url, "tag", TEXTS, aggregation_strategy=strategy)
            assert tagged == encoder_of(spec).tag(TEXTS, aggregation_strategy=strategy)


def test_texts_are_stored_and_found(ask: Ask, tmp_path: Any) -> None:
    with serving(spec_in(tmp_path), schemas=CollectionSchemas(MemoryStore()), model_id=MODEL) as server:
        assert ask(server.url, "collections") == []
        points = [TEXTS[0], {"text": TEXTS[1], "id": "mine", "metadata": {"year": 1}}, {"text": " ", "id": 7}, {"id": 8}]
        stored = ask(server.url, "upsert", "notes", points)
        assert (stored.created, len(stored.ids)) == (True, 2)
        assert [(one["index"], one["id"]) for one in stored.failed] == [(2, 7), (3, 8)]
        assert ask(server.url, "collections") == ["notes"]
        found = ask(server.url, "search", "notes", TEXTS[1], limit=2)
        assert {hit.payload["text"] for hit in found.hits} == {TEXTS[0], TEXTS[1]}
        assert found.stages[0].name == "embed"
        year = {"must": [{"key": "metadata.year", "match": {"value": 1}}]}
        (hit,) = ask(server.url, "search", "notes", TEXTS[0], filter=year, mode="dense").hits
        assert hit.payload["document_id"] == "mine"
        with pytest.raises(errors.UnknownCollection, match="no collection"):
            ask(server.url, "search", "others", "one")
        with pytest.raises(errors.UnknownCollection, match="create"):
            ask(server.url, "upsert", "others", ["one"], create=False)


@pytest.mark.parametrize(
    ("arguments", "kind"),
    [
        (("encode", [""]), errors.EmptyInput),
        (("encode", ["one"], ("dense", "images")), InvalidInput),
        (("encode", ["one"], ()), InvalidInput),
        (("encode", ["\ud800"]), InvalidInput),
        (("classify", ["one"]), errors.BackendError),
        (("tag", ["one"]), errors.UnsupportedHead),
        (("search", "notes", "one"), errors.NoStore),
        (("rerank", "one", [""] * 2 + ["x" * 3_000_000]), InvalidInput),
    ],
)
def test_what_the_server_refuses_raises_the_encoders_errors(
    ask: Ask, arguments: tuple[Any, ...], kind: type[Exception]
) -> None:
    with serving() as server, pytest.raises(kind):
        ask(server.url, *arguments)


def test_a_key(ask: Ask) -> None:
    with serving(server={"api_key": "a key"}) as server:
        assert len(ask(server.url, "encode", "one", api_key="a key").dense) == 1
        with pytest.raises(errors.NoKey):
            ask(server.url, "encode", "one", api_key="another")


@pytest.mark.parametrize("url", ["", "localhost:3000", "ftp://x", "http://", "http://x:y"])
def test_what_is_no_url_is_said_at_once(url: str) -> None:
    with pytest.raises(InvalidInput, match="URL"):
        Client(url)


@pytest.mark.parametrize("url", ["http://[::1]:3000", "https://user:word@host.example/m/small/", "http://h"])
def test_what_is_a_url_is_taken(url: str) -> None:
    assert Client(url).url == url.rstrip("/")


def test_both_have_the_same_verbs_and_signatures() -> None:
    verbs = [name for name, verb in vars(AsyncClient).items() if inspect.iscoroutinefunction(verb) and name[0] != "_"]
    assert len(verbs) == 10
    for name in verbs:
        assert inspect.signature(getattr(Client, name)) == inspect.signature(getattr(AsyncClient, name))
        assert not inspect.iscoroutinefunction(getattr(Client, name))
    for name in ("encode", "rerank", "classify", "tag"):
        encoders, clients = (inspect.signature(getattr(kind, name)).parameters for kind in (Encoder, Client))
        assert encoders.keys() - clients.keys() <= {"query_encoder", "show_progress"}
        assert all(encoders[parameter] == clients[parameter] for parameter in clients)


def test_a_client_imports_neither_numpy_nor_a_runtime() -> None:
    code = "import sys, hybridtei; hybridtei.Client('http://x'); hybridtei.AsyncClient('http://x'); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = {name.partition(".")[0] for name in done.stdout.split()}
    assert "httpx" in loaded
    assert not loaded & {
        "numpy",
        "scipy",
        "onnxruntime",
        "openvino",
        "torch",
        "tokenizers",
        "litestar",
        "qdrant_client",
        "grpc",
    }


INFO = {"hybridtei": {"role": "embedding", "dimensions": {"dense": 2}}, "max_client_batch_size": 32}
GOOD = orjson.dumps([{"dense": [1.0, 0.0]}])


@contextmanager
def scripted(*answers: Answer) -> Iterator[tuple[str, list[str]]]:
    """A server of these answers to POST, in turn, the last one for ever; and the paths that it was asked."""
    asked: list[str] = []

    def answer(method: str, path: str, _: bytes) -> Answer:
        if method == "GET":
            return 200, {}, orjson.dumps(INFO)
        asked.append(path)
        return answers[min(len(asked), len(answers)) - 1]

    with answering(answer) as url:
        yield url, asked


@pytest.mark.parametrize("status", [429, 500, 503])
def test_a_busy_server_is_asked_again(ask: Ask, status: int) -> None:
    with scripted((status, {"retry-after": "0"}, b"later"), (status, {}, b"later"), (200, {}, GOOD)) as (url, asked):
        assert ask(url, "encode", "one").dense.tolist() == [[1.0, 0.0]]
    assert asked == ["/embed_hybrid"] * 3


def test_patience_ends_with_the_last_failure(ask: Ask) -> None:
    busy = r"/embed_hybrid: no answer within 1 s, 1 try; the last: status 429: busy now"
    with scripted((429, {"retry-after": "100"}, b"busy now")) as (url, asked), pytest.raises(NoAnswer, match=busy):
        ask(url, "encode", "one", patience_s=1)
    assert len(asked) == 1  # what it asks to wait is longer than the patience
    down = r"no answer within 0.5 s, \d tries; the last: status 503: down"
    with scripted((503, {}, b"down")) as (url, asked), pytest.raises(ConnectionError, match=down):
        ask(url, "encode", "one", patience_s=0.5)
    assert 2 <= len(asked) <= 9


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        ((200, {}, b"<html>please\n log in"), "status 200: <html>please log in"),
        ((302, {"location": "/login"}, b"moved"), "status 302: to /login: moved"),
        ((413, {}, b"<html>Request Entity Too Large"), "Too Large"),
        ((422, {}, b'{"detail": "another program"}'), "another program"),
        ((200, {}, b"null"), "status 200: null"),
        ((200, {}, b'{"data": []}'), "should answer a list of 1"),
        ((200, {}, b'[{"sparse": {}}]'), "should answer 1 objects of dense"),
    ],
)
def test_another_program_is_not_taken_for_the_server(ask: Ask, answer: Answer, why: str) -> None:
    with scripted(answer) as (url, asked), pytest.raises(NoAnswer, match=why):
        ask(url, "encode", "one")
    assert len(asked) == 1
    with answering(lambda *_: (200, {}, b'{"model_id": "of TEI"}')) as url, pytest.raises(InvalidInput, match="no hybridtei"):
        ask(url, "info")


class Raw:
    """A server whose every connection `behave` answers, by its number; in a thread of its own."""

    def __init__(self, behave: Callable[[int, asyncio.StreamReader, asyncio.StreamWriter], Any], port: int = 0) -> None:
        self._behave, self._port, self.connections = behave, port, 0
        self._loop, self._ready = asyncio.new_event_loop(), threading.Event()
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=[self._serve()], daemon=True)

    async def _serve(self) -> None:
        self._end = asyncio.Event()
        server = await asyncio.start_server(self._connected, "127.0.0.1", self._port)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        self._ready.set()
        await self._end.wait()
        server.close()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            await self._behave(self.connections, reader, writer)
        except ConnectionError:
            pass
        finally:
            writer.close()

    def __enter__(self) -> Raw:
        self._thread.start()
        assert self._ready.wait(HANG)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join(HANG)
        assert not self._thread.is_alive()


WHOLE = orjson.dumps({"collections": ["notes"]})
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(WHOLE)


@pytest.mark.parametrize("sent", [b"", HEAD[:20], HEAD, HEAD + WHOLE[:-3]], ids=["nothing", "head", "no body", "half a body"])
def test_a_connection_that_is_cut_is_made_anew(ask: Ask, sent: bytes) -> None:
    async def behave(number: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(sent if number < 3 else HEAD + WHOLE)
        await writer.drain()

    with Raw(behave) as server:
        assert ask(server.url, "collections") == ["notes"]
        assert server.connections == 3


@pytest.mark.parametrize("is_dripping", [False, True])
def test_a_slow_server_ends_in_an_error(ask: Ask, is_dripping: bool) -> None:
    """One that says nothing, and one that never comes to an end of saying something."""

    async def behave(_: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(HEAD.replace(b"content-length: %d" % len(WHOLE), b"content-length: 1000000") if is_dripping else b"")
        while not reader.at_eof():
            writer.write(b" " if is_dripping else b"")
            await writer.drain()
            await asyncio.wait([asyncio.ensure_future(reader.read(1))], timeout=0.02)

    with Raw(behave) as server, pytest.raises(NoAnswer, match=r"no answer within 0.1 s, \d tr"):
        ask(server.url, "collections", timeout_s=0.2, patience_s=0.1)


def test_a_server_that_is_restarted_is_found_again(ask: Ask) -> None:
    """The next one listens while the client already tries: at a port where nothing answers at first."""

    async def behave(_: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(HEAD + WHOLE)
        await writer.drain()

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        url = f"http://127.0.0.1:{port}"
    with pytest.raises(NoAnswer, match=f"{port}/collections: no answer within 0.2 s, .*ConnectError"):
        ask(url, "collections", patience_s=0.2)
    found: list[list[str]] = []
    asking = threading.Thread(target=lambda: found.append(ask(url, "collections", patience_s=HANG)))
    asking.start()
    with Raw(behave, port):
        asking.join(HANG)
    assert found == [["notes"]]
