"""A client, blocking and awaited, answers as an `Encoder` does, and refuses as it does."""

import base64
import inspect
import re
import socket
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from conformance.small.fake_backend import FakeBackend
from hybridtei import errors
from hybridtei.client import AsyncClient, Client
from hybridtei.config import EngineConfig
from hybridtei.encoder import Encoder
from hybridtei.errors import InvalidInput
from hybridtei.retrieval.store.collection import CollectionSchemas
from hybridtei.retrieval.store.memory import MemoryStore
from tests.inference.engine import small
from tests.near import same
from tests.ran import ran
from tests.retrieval.search.small_search import MODEL, TEXTS, spec_in
from tests.server.conftest import LABELS, TAGS, labelled
from tests.server.live import serving

ALL = ("dense", "sparse", "multivector")
# Of three requests
MANY = [f"{TEXTS[i % len(TEXTS)]} {i}" for i in range(70)]
# Longer than the model
MANY[40] += " one two three" * 60


@pytest.fixture(scope="module")
def server():
    with serving(server={"max_client_batch_size": 25}) as running:
        yield running


def encoder_of(spec):
    return Encoder(small.model(spec), FakeBackend(spec), 256, EngineConfig())


def assert_same(one, other):
    for name in ("dense", "sparse", "multivector"):
        left, right = getattr(one, name), getattr(other, name)
        assert (left is None) == (right is None)
        for part in () if left is None else ("",) if name == "dense" else left.__dataclass_fields__:
            mine, its = (getattr(side, part) if part else side for side in (left, right))
            same(mine, its, strict=isinstance(mine, np.ndarray))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"outputs": "dense"},
        {"outputs": ALL},
        {"outputs": ALL, "input_type": "query"},
        {
            "outputs": ALL,
            "input_type": "document",
            "multivector": {"max_tokens": 2, "dtype": "int8"},
        },
        {"outputs": ("multivector",), "input_type": "document", "multivector": {"dtype": "binary"}},
        {
            "outputs": ("dense",),
            "normalize": False,
            "dimensions": 4,
            "prompt_name": "query",
            "truncation_direction": "left",
        },
        {"outputs": ALL, "long_inputs": "mean"},
        {"outputs": ALL, "spans": [[(0, 3), (0, 9)]] * len(MANY)},
    ],
)
def test_vectors_are_the_encoders_to_the_byte(ask, server, options):
    encoder = encoder_of(small.model_spec())
    for texts in (MANY,) if "spans" in options else (MANY, "one two", [[5, 6], [7]], []):
        assert_same(ask(server.url, "encode", texts, **options), encoder.encode(texts, **options))


def test_threads_share_a_blocking_client(server):
    encoder, parts = encoder_of(small.model_spec()), [MANY[:count] for count in range(1, 9)]
    with Client(server.url) as client, ThreadPoolExecutor(len(parts)) as threads:
        for found, part in zip(threads.map(client.encode, parts), parts, strict=True):
            assert_same(found, encoder.encode(part))


def test_scores_and_labels_are_the_encoders(ask):
    spec = labelled("LABEL_0")
    with serving(spec, server={"max_client_batch_size": 3}) as server:
        assert ask(server.url, "rerank", "one", TEXTS) == encoder_of(spec).rerank("one", TEXTS)
        assert ask(server.url, "rerank", "one", TEXTS, limit=2) == encoder_of(spec).rerank(
            "one", TEXTS, limit=2
        )
        assert ask(server.url, "rerank", "one", []) == []
        # A budget that suffices changes nothing
        whole = ask(server.url, "rerank", "one", TEXTS)
        assert ask(server.url, "rerank", "one", TEXTS, budget_ms=600_000) == whole
        assert encoder_of(spec).rerank("one", TEXTS, budget_ms=600_000) == whole
        assert ask(server.url, "rerank", "one", TEXTS, budget_ms=600_000, limit=2) == whole[:2]
    with serving() as server:
        plain = ask(server.url, "rerank", "one", TEXTS)
        assert ask(server.url, "rerank", "one", TEXTS, budget_ms=600_000) == plain
        by_m3 = encoder_of(small.model_spec()).rerank("one", TEXTS, weights="m3")
        assert ask(server.url, "rerank", "one", TEXTS, weights="m3") == by_m3
    spec = labelled(*LABELS)
    with serving(spec) as server:
        texts = [*TEXTS, ("one", "two")]
        assert ask(server.url, "classify", texts) == encoder_of(spec).classify(texts)
        assert ask(server.url, "classify", "one", raw_scores=True) == encoder_of(spec).classify(
            "one", raw_scores=True
        )
    spec = labelled(*TAGS, tags=True)
    with serving(spec) as server:
        for strategy in ("simple", "none"):
            tagged = ask(server.url, "tag", TEXTS, aggregation_strategy=strategy)
            assert tagged == encoder_of(spec).tag(TEXTS, aggregation_strategy=strategy)


def test_texts_are_stored_and_found(ask, tmp_path):
    with serving(
        spec_in(tmp_path), schemas=CollectionSchemas(MemoryStore()), model_id=MODEL
    ) as server:
        assert ask(server.url, "collections") == []
        points = [
            TEXTS[0],
            {"text": TEXTS[1], "id": "mine", "metadata": {"year": 1}},
            {"text": " ", "id": 7},
            {"id": 8},
        ]
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


def test_a_collection_of_any_name_that_stores_take(ask, tmp_path):
    name = "año #1 & 100%25 + ;="
    with serving(
        spec_in(tmp_path), schemas=CollectionSchemas(MemoryStore()), model_id=MODEL
    ) as server:
        assert ask(server.url, "upsert", name, TEXTS[:2]).created
        assert ask(server.url, "collections") == [name]
        assert len(ask(server.url, "search", name, TEXTS[0]).hits) == 2


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
def test_what_the_server_refuses_raises_the_encoders_errors(ask, server, arguments, kind):
    with pytest.raises(kind):
        ask(server.url, *arguments)


@pytest.mark.parametrize(
    ("arguments", "options"),
    [
        (("encode", None), {}),
        (("encode", {"text": "one"}), {}),
        (("encode", ["one"], 5), {}),
        (("rerank", "one", None), {}),
        (("rerank", "one", b"two"), {}),
        (("rerank", "one", TEXTS), {"limit": -1}),
        (("classify", None), {}),
        (("tag", 5), {}),
    ],
)
def test_what_is_no_list_of_texts_is_refused_in_the_encoders_words(ask, server, arguments, options):
    verb, *given = arguments
    with pytest.raises(InvalidInput) as own:
        getattr(encoder_of(small.model_spec()), verb)(*given, **options)
    with pytest.raises(InvalidInput, match=f"^{re.escape(str(own.value))}$"):
        ask(server.url, *arguments, **options)


def test_one_text_is_a_list_of_it(ask):
    with serving(labelled("LABEL_0")) as server:
        whole = ask(server.url, "rerank", "one", [TEXTS[0]])
        assert ask(server.url, "rerank", "one", TEXTS[0]) == whole


def test_a_key(ask):
    with serving(server={"api_key": "a key"}) as server:
        assert len(ask(server.url, "encode", "one", api_key="a key").dense) == 1
        with pytest.raises(errors.NoKey):
            ask(server.url, "encode", "one", api_key="another")


@pytest.mark.parametrize("url", ["", "localhost:3000", "ftp://x", "http://", "http://x:y"])
def test_what_is_no_url_is_said_at_once(url):
    with pytest.raises(InvalidInput, match="URL"):
        Client(url)


@pytest.mark.parametrize(
    "url", ["http://[::1]:3000", "https://user:word@host.example/m/small/", "http://h"]
)
def test_what_is_a_url_is_taken(url):
    with Client(url) as client:
        assert client.url == url.rstrip("/").replace("user:word", "[hidden]")


def test_a_password_of_its_url_is_sent_and_in_no_error(ask):
    with socket.create_server(("127.0.0.1", 0)) as listening, ThreadPoolExecutor(1) as pool:

        def answer():
            connection, _ = listening.accept()
            with connection:
                head = connection.recv(10_000)
                connection.sendall(b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n")
            return head

        head = pool.submit(answer)
        with pytest.raises(errors.NoAnswer) as refused:
            ask(f"http://user:secret@127.0.0.1:{listening.getsockname()[1]}/m/a", "info")
    assert head.result().startswith(b"GET /m/a/info HTTP/1.1\r\n")
    assert b"Basic " + base64.b64encode(b"user:secret") in head.result()
    assert "http://[hidden]@127.0.0.1" in str(refused.value)
    assert "secret" not in str(refused.value)


def test_both_have_the_same_verbs_and_signatures():
    verbs = [
        name
        for name, verb in vars(AsyncClient).items()
        if inspect.iscoroutinefunction(verb) and name[0] != "_"
    ]
    assert len(verbs) == 13
    for name in verbs:
        assert inspect.signature(getattr(Client, name)) == inspect.signature(
            getattr(AsyncClient, name)
        )
        assert not inspect.iscoroutinefunction(getattr(Client, name))
    for name in ("encode", "rerank", "classify", "tag"):
        encoders, clients = (
            inspect.signature(getattr(kind, name)).parameters for kind in (Encoder, Client)
        )
        assert encoders.keys() - clients.keys() <= {"query_encoder", "show_progress"}
        assert all(encoders[parameter] == clients[parameter] for parameter in clients)


def test_a_client_imports_neither_numpy_nor_a_runtime():
    code = "import sys, hybridtei; hybridtei.Client('http://x'); hybridtei.AsyncClient('http://x'); print(*sys.modules)"
    done = ran([sys.executable, "-c", code], check=True)
    loaded = {name.partition(".")[0] for name in done.stdout.split()}
    assert "httpx" in loaded
    heavy = {
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
    assert not loaded & heavy
