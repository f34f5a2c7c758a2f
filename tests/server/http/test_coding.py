"""How bodies travel: compressed requests within their limit, compressed answers, MessagePack; on every route alike."""

from __future__ import annotations

import gzip
import json
import sys
import zlib

import msgspec
import numpy as np
import pytest

from hybridtei.server.http.body import MAX_STREAMS, BrokenBody, CodingError, PayloadTooLarge, unfold
from hybridtei.server.http.writers import (
    GZIP_FROM_BYTES,
    PLAIN,
    ZSTD_FROM_BYTES,
    Form,
    encode,
    negotiate,
)
from tests.server.live import JSON, serving

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

TEXTS = [f"one two {i}" for i in range(32)]
CODINGS = {"gzip": gzip.compress, "zstd": zstd.compress}
LEAST = {"gzip": GZIP_FROM_BYTES, "zstd": ZSTD_FROM_BYTES}
OPEN = {"gzip": gzip.decompress, "zstd": zstd.decompress}


@pytest.fixture
def raw(server):
    """A client that takes bodies as they come."""

    def ask(method, path, body=None, **headers):
        request = server.client.build_request(method, path, content=body, headers={**JSON, **headers})
        for name in ("accept", "accept-encoding"):
            if name not in headers:
                del request.headers[name]
        response = server.client.send(request, stream=True)
        content = b"".join(response.iter_raw())
        response.close()
        return response, content

    return ask


@pytest.mark.parametrize(
    ("accept", "encoding", "form"),
    [
        (None, None, PLAIN),
        (b"*/*", b"gzip, deflate", Form(False, "gzip")),
        (b"application/json", b"gzip, deflate, br, zstd", Form(False, "zstd")),
        (b"application/json", b"gzip, zstd;q=0.5", Form(False, "gzip")),
        (b"application/json", b"gzip;q=0, identity", PLAIN),
        (b"application/msgpack", b"", Form(True)),
        (b"application/x-msgpack;q=0.9, application/json;q=0.5", None, Form(True)),
        (b"application/json, application/msgpack", b"zstd", Form(False, "zstd")),  # Baseten's client
        (b"application/msgpack, application/json", None, Form(True)),
        (b"application/msgpack, */*", None, Form(True)),
        (b"application/msgpack;q=0", None, PLAIN),
        (b"text/html;q=x, \xff", b";;;,", PLAIN),
    ],
)
def test_what_headers_ask_for(accept, encoding, form):
    assert negotiate(accept, encoding) == form


def test_small_answers_are_left_as_they_are():
    for coding, least in (("zstd", ZSTD_FROM_BYTES), ("gzip", GZIP_FROM_BYTES)):
        for length, squeezed in ((least - 2, True), (least - 3, False)):
            body, headers = encode("x" * length, Form(coding=coding))
            assert ((b"content-encoding", coding.encode()) in headers) is squeezed
            assert (b"content-length", b"%d" % len(body)) in headers


@pytest.mark.parametrize("coding", CODINGS)
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/embed", {"inputs": TEXTS}),
        ("/embed_all", {"inputs": TEXTS}),
        ("/embed_sparse", {"inputs": TEXTS}),
        ("/embed_hybrid", {"inputs": TEXTS}),
        ("/v1/embeddings", {"input": TEXTS}),
        ("/v2/embed", {"texts": TEXTS}),
        ("/tokenize", {"inputs": TEXTS}),
        ("/v1/rerank", {"query": "one", "documents": TEXTS * 10, "return_documents": True}),
    ],
)
def test_answers_are_compressed_where_that_is_wanted(server, raw, coding, path, body):
    plain = server.post(path, body, headers={**JSON, "accept-encoding": "identity"})
    assert "content-encoding" not in plain.headers
    response, content = raw("POST", path, json.dumps(body).encode(), **{"accept-encoding": coding})
    if len(plain.content) < LEAST[coding]:
        assert "content-encoding" not in response.headers
        return
    assert response.headers["content-encoding"] == coding
    assert response.headers["content-length"] == str(len(content))
    assert len(content) < len(plain.content)
    told = json.loads(OPEN[coding](content))
    assert type(told) is type(plain.json())
    if path != "/v1/rerank":  # which names each answer differently
        assert {**told, "id": 0} == {**plain.json(), "id": 0} if isinstance(told, dict) else told == plain.json()


@pytest.mark.parametrize("coding", CODINGS)
def test_bodies_may_come_compressed(server, coding):
    body = json.dumps({"inputs": TEXTS}).encode()
    plain = server.post("/embed", body)
    packed = server.post("/embed", CODINGS[coding](body), headers={**JSON, "content-encoding": coding})
    assert packed.json() == plain.json()
    halves = CODINGS[coding](body[:50]) + CODINGS[coding](body[50:])
    assert server.post("/embed", halves, headers={**JSON, "content-encoding": coding}).json() == plain.json()


@pytest.mark.parametrize("coding", CODINGS)
def test_a_bomb_is_stopped_at_the_limit(coding):
    bomb = CODINGS[coding](b'{"inputs":"' + b"a" * 200_000_000 + b'"}')
    with serving(server={"payload_limit": 300_000}) as running:
        assert len(bomb) < 300_000
        response = running.post("/embed", bomb, headers={**JSON, "content-encoding": coding})
        assert response.status_code == 413
        assert response.text == "Failed to buffer the request body: length limit exceeded"
        running.is_well()


@pytest.mark.parametrize("coding", CODINGS)
def test_the_limit_to_the_byte(coding):
    data = b"a" * 1000
    assert unfold(CODINGS[coding](data), coding, 1000) == data
    with pytest.raises(PayloadTooLarge):
        unfold(CODINGS[coding](data), coding, 999)
    with pytest.raises(BrokenBody, match="incomplete"):
        unfold(CODINGS[coding](data)[:-5], coding, 1000)
    with pytest.raises(BrokenBody):
        unfold(b"not compressed", coding, 1000)
    with pytest.raises(BrokenBody, match="streams"):
        unfold(CODINGS[coding](b"") * (MAX_STREAMS + 1), coding, 1000)
    assert unfold(b"", coding, 10) == b""


def test_a_window_larger_than_every_decoder_needs_is_refused():
    opened = zstd.ZstdCompressor(options={zstd.CompressionParameter.window_log: 27})
    wide = opened.compress(b"a" * 100_000) + opened.flush()  # without its length, so the window stays as it was asked for
    assert zstd.decompress(wide) == b"a" * 100_000
    with pytest.raises(BrokenBody):
        unfold(wide, "zstd", 1_000_000)


def test_codings_that_are_not_read_here():
    for codings in ("br", "gzip, zstd", "deflate"):
        with pytest.raises(CodingError):
            unfold(b"", codings, 10)
    assert unfold(b"x", "identity", 10) == b"x"
    assert unfold(zlib.compress(b"x", wbits=31), "X-GZIP", 10) == b"x"


@pytest.mark.parametrize(
    ("body", "coding", "status", "begin"),
    [
        (b"{}", "br", 415, "Expected `content-encoding` gzip, zstd or none. Given: br"),
        (b"{}", "gzip", 400, "Failed to buffer the request body: error reading a body from connection"),
        (gzip.compress(b"{", mtime=0), "gzip", 400, "Failed to parse the request body as JSON: "),
        (gzip.compress(b"{}", mtime=0), "gzip", 422, "Failed to deserialize the JSON body into the target type: "),
    ],
)
def test_refusals_are_plain_text(server, body, coding, status, begin):
    response = server.post("/embed", body, headers={**JSON, "content-encoding": coding})
    assert response.status_code == status
    assert response.text.startswith(begin)
    assert response.headers["content-type"].startswith("text/plain")


def same(one, other):
    """Equal, but for the last digits of numbers: one is the shortest decimal, the other the float32 itself."""
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one if key not in ("id", "created"))
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    return np.float32(one) == np.float32(other) if isinstance(one, float) else one == other


@pytest.mark.parametrize("encoding", ["identity", "zstd", "gzip"])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/embed", {"inputs": TEXTS}),
        ("/embed_all", {"inputs": "one"}),
        ("/embed_sparse", {"inputs": TEXTS}),
        ("/embed_multivector", {"inputs": TEXTS}),
        ("/embed_hybrid", {"inputs": TEXTS, "sparse_format": "tokens"}),
        ("/embed_hybrid", {"inputs": TEXTS, "output_dtype": "binary"}),
        ("/similarity", {"inputs": {"source_sentence": "one", "sentences": TEXTS[:3]}}),
        ("/tokenize", {"inputs": TEXTS}),
        ("/decode", {"ids": [[5, 6], [7]]}),
        ("/rerank", {"query": "one", "texts": TEXTS, "return_text": True}),
        ("/v2/rerank", {"query": "one", "documents": TEXTS}),
        ("/v1/embeddings", {"input": TEXTS, "encoding_format": "base64"}),
        ("/v2/embed", {"texts": TEXTS, "embedding_types": ["float", "ubinary"]}),
        ("/vertex", {"instances": [{"inputs": "one"}]}),
    ],
)
def test_messagepack_says_the_same(server, raw, path, body, encoding):
    plain = server.post(path, body).json()
    headers = {"accept": "application/msgpack", "accept-encoding": encoding}
    response, content = raw("POST", path, json.dumps(body).encode(), **headers)
    assert response.status_code == 200
    assert response.headers["content-type"] == "application/msgpack"
    if "content-encoding" in response.headers:
        assert response.headers["content-encoding"] == encoding
        content = OPEN[encoding](content)
    assert same(plain, msgspec.msgpack.decode(content))


def test_routes_without_a_body(server, raw):
    for path in ("/info", "/models", "/v1/models"):
        response, content = raw("GET", path, accept="application/msgpack")
        assert response.headers["content-type"] == "application/msgpack"
        assert same(server.get(path).json(), msgspec.msgpack.decode(content))
    response, content = raw("GET", "/info", **{"accept-encoding": "zstd"})
    assert len(content) == int(response.headers["content-length"])


def test_errors_stay_json(server, raw):
    response, content = raw("POST", "/embed", b'{"inputs":""}', accept="application/msgpack")
    assert response.status_code == 400
    assert json.loads(content)["error_type"] == "Empty"
