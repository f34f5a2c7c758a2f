"""Short cases: inputs that crash other servers, and corner cases of HTTP and JSON.

Those that fuzzing found here, and that no words tell better than their bytes, lie in `cases/`.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from typing import Any

DEEP = 10_000
Case = tuple[str, str, str, bytes, str]  # name, models whose it is, statuses, bytes, why


def post(path: str, body: bytes | Any, *headers: str) -> bytes:
    """Return a valid request; a value is written as JSON."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = (f"POST {path} HTTP/1.1", "Host: x", "Content-Type: application/json", f"Content-Length: {len(data)}", *headers)
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + data


def cases() -> Iterator[Case]:
    """All of them."""
    yield from _deadly_elsewhere()
    yield from _json()
    yield from _http()


def _deadly_elsewhere() -> Iterator[Case]:
    why = "TEI 1.9.3 ends: no id of the vocabulary is left"
    yield "id-outside-the-vocabulary", "hybrid splade", "422|424", post("/embed", {"inputs": [[999_999]]}), why
    why = "TEI 1.9.3 ends on XLM-R: the text of these ids has no tokens"
    yield "id-without-a-text", "hybrid", "200|422", post("/embed", {"inputs": [[8]]}), why
    why = "TEI 1.9.3 works for 8.7 s and takes 3.1 GB: both sides of a pair are long"
    long = "a b " * 8000
    yield "long-pair", "reranker", "200", post("/rerank", {"query": long, "texts": [long], "truncate": True}), why
    yield (
        "many-ids",
        "hybrid splade",
        "200|422",
        post("/embed_sparse", {"inputs": [7] * 100_000, "truncate": True}),
        "TEI computes them all",
    )
    yield "empty-list", "", "4xx", post("/embed", {"inputs": []}), "an input without anything"
    yield (
        "marks-only",
        "hybrid",
        "200|4xx",
        post("/embed", {"inputs": "\u0301" * 30_000, "truncate": True}),
        "one word of marks",
    )


def _json() -> Iterator[Case]:
    def embed(body: bytes) -> bytes:
        return post("/embed", body)

    deep = b'{"inputs":' + b"[" * DEEP + b"]" * DEEP + b"}"
    yield "deep-known", "", "4xx", embed(deep), "recursion"
    yield "deep-unknown", "", "4xx", embed(b'{"x":' + b'{"a":' * DEEP + b"1" + b"}" * DEEP + b',"inputs":"a"}'), "recursion"
    yield "deep-open", "", "4xx", embed(b"[" * 100_000), "recursion"
    yield "nan", "", "400", embed(b'{"inputs":"a","x":NaN}'), "no JSON"
    yield "beyond-floats", "", "200|4xx", embed(b'{"inputs":"a","x":1e400}'), "out of range in an unknown field"
    yield "long-integer", "", "4xx", embed(b'{"inputs":[' + b"9" * 5000 + b"]}"), "Python refuses to read 4,300 digits"
    yield (
        "long-integer-unknown",
        "",
        "200|4xx",
        embed(b'{"inputs":"a","x":' + b"9" * 5000 + b"}"),
        "the same where nobody looks",
    )
    yield "duplicate", "", "422", embed(b'{"inputs":"a","inputs":"b"}'), "a key twice"
    yield "duplicate-escaped", "", "422", embed(b'{"inputs":"a","\\u0069nputs":"b"}'), "a key twice in two spellings"
    yield "lone-surrogate", "", "400", embed(b'{"inputs":"\\ud800"}'), "no character"
    yield "no-utf8", "", "400", embed(b'{"inputs":"\xff\xfe"}'), "no UTF-8"
    yield "byte-order-mark", "", "400", embed(b'\xef\xbb\xbf{"inputs":"a"}'), "no JSON"
    yield "nul-in-a-text", "", "200|4xx", embed(b'{"inputs":"a\\u0000b"}'), "NUL as a character"
    yield "nul-for-a-body", "", "400", embed(b"\x00"), "no JSON"
    yield "no-body", "", "400", embed(b""), "nothing"
    yield (
        "top-k-of-ages",
        "classifier",
        "200|4xx",
        post("/predict", {"inputs": "a", "parameters": {"top_k": 10**30}}),
        "beyond 64 bits",
    )


def _http() -> Iterator[Case]:
    fine, gone = post("/tokenize", {"inputs": "baka"}), b"GET /nowhere HTTP/1.1\r\nHost: x\r\n\r\n"
    yield "pipelined", "", "200 404 200", fine + gone + fine, "answers keep their order"
    yield "http-1.0", "", "200", fine.replace(b"HTTP/1.1", b"HTTP/1.0"), "an old client"
    yield "many-headers", "", "431", b"GET / HTTP/1.1\r\n" + b"X: y\r\n" * 500 + b"\r\n", "TEI's hyper takes 100"
    yield "long-path", "", "414", b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n", "hyper's bound"
    yield "two-lengths", "", "400", fine.replace(b"Host: x", b"Host: x\r\nContent-Length: 3"), "smuggling"
    yield "length-and-chunks", "", "400", fine.replace(b"Host: x", b"Host: x\r\nTransfer-Encoding: chunked"), "smuggling"
    yield "negative-length", "", "400", b"POST /embed HTTP/1.1\r\nContent-Length: -1\r\n\r\n", "no number"
    yield (
        "chunk-of-ages",
        "",
        "400",
        b"POST /embed HTTP/1.1\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\nffffffffffffffffff\r\n",
        "no size",
    )
    yield "tls-hello", "", "400", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(100), "another protocol"
    yield "http-2-preface", "", "400", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", "another protocol"
    many = gzip.compress(bytes(30_000_000), 9)
    yield "gzip-bomb", "", "413", post("/embed", many, "Content-Encoding: gzip"), "30 kB that become 30 MB"
    streams = gzip.compress(b"") * 2000
    yield "gzip-streams", "", "400", post("/embed", streams, "Content-Encoding: gzip"), "thousands of empty streams"
    packed = b"\xdd\xff\xff\xff\xff" * 10
    yield (
        "msgpack-bomb",
        "",
        "415",
        post("/embed", packed).replace(b"application/json", b"application/msgpack"),
        "not read here",
    )
