"""Bytes as clients should not send them: bounds of a head, malformed HTTP, bodies that break,
clients that wait for leave."""

import json
from functools import partial

import pytest

from hybridtei.config import ServerConfig
from hybridtei.server.http.protocol import (
    HEADER_COUNT_LIMIT,
    URL_LIMIT_BYTES,
    Answering,
    BoundedHttpProtocol,
)
from tests.server.http.raw import (
    BODY,
    CHUNKED,
    CLOSE,
    GET,
    LAST,
    POST,
    WHOLE,
    connected,
    fields,
    statuses,
    told,
)
from tests.server.live import serving

HEAD_LIMIT_BYTES = ServerConfig().header_limit
BROKEN = b"Failed to buffer the request body: error reading a body from connection"
# Uvloop's, at most
READ = 256_000


BEYOND = {
    "one header too many": (431, [GET + fields(HEADER_COUNT_LIMIT) + b"\r\n"]),
    "headers without end": (431, [GET + fields(500_000)]),
    "headers one by one": (431, [GET, *[fields(1)] * 200]),
    "long together": (431, [GET + (b"a: " + b"b" * 1000 + b"\r\n") * 70 + b"\r\n"]),
    "a long value": (431, [GET + b"a: " + b"b" * HEAD_LIMIT_BYTES + b"\r\n\r\n"]),
    "a value without end": (431, [GET + b"a: ", *[b"b" * 100_000] * 20]),
    "a name without end": (431, [GET, *[b"b" * 100_000] * 20]),
    "before any head": (431, [b"\r\n" * 300_000]),
    "a long path": (414, [b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\nhost: x\r\n\r\n"]),
    "a path without end": (414, [b"GET /", *[b"a" * 100_000] * 20]),
    "a path just too long": (414, [b"GET /" + b"a" * URL_LIMIT_BYTES + b" HTTP/1.1\r\n\r\n"]),
    "behind another": (431, [GET + b"\r\n" + GET + fields(HEADER_COUNT_LIMIT) + b"\r\n"]),
    "with a body": (
        431,
        [POST + fields(HEADER_COUNT_LIMIT) + b"content-length: 20\r\n\r\n" + BODY],
    ),
}


@pytest.mark.parametrize("name", BEYOND)
def test_a_head_beyond_the_bounds_is_refused_and_the_connection_closed(server, name):
    status, parts = BEYOND[name]
    answers = told(server, *parts)
    assert statuses(answers[:-1]) == ([200] if name == "behind another" else [])
    refused, headers, body = answers[-1]
    assert (refused, body) == (status, b"")
    assert headers.keys() - {b"date"} == {b"content-length", b"connection"}
    assert headers[b"connection"] == b"close"
    server.is_well()


def test_refusals_need_no_key_and_count_as_no_request():
    with serving(server={"api_key": "secret"}) as running:
        before = running.get("/metrics").text
        for status, parts in BEYOND.values():
            assert statuses(told(running, *parts))[-1] == status
        assert [line for line in before.splitlines() if "request" in line] == [
            line for line in running.get("/metrics").text.splitlines() if "request" in line
        ]
        assert running.backend.forwards == 0


@pytest.mark.parametrize(
    "head",
    [
        GET + fields(HEADER_COUNT_LIMIT - 2) + CLOSE,
        GET + b"a: " + b"b" * 60_000 + b"\r\n" + CLOSE,
        b"GET /health?" + b"a" * 60_000 + b" HTTP/1.1\r\nhost: x\r\n" + CLOSE,
        b"\r\n\r\n" + GET + CLOSE,
    ],
)
def test_a_head_within_the_bounds_passes_however_it_is_cut(server, head):
    assert statuses(told(server, head)) == [200]
    step = max(1, len(head) // 97)
    assert statuses(
        told(server, *(head[start : start + step] for start in range(0, len(head), step)))
    ) == [200]


def test_what_is_read_of_an_endless_head_is_bounded(server, monkeypatch):
    read = []
    feed = BoundedHttpProtocol._feed

    def counted(self, data):
        read.append(len(data))
        feed(self, data)

    monkeypatch.setattr(BoundedHttpProtocol, "_feed", counted)
    for start in (b"a: ", b"", b"a: b\r\n"):
        read.clear()
        assert statuses(told(server, GET, *[(start or b"b") * 100_000] * 30)) == [431]
        assert sum(read) <= HEAD_LIMIT_BYTES + 2 * READ


def test_each_request_of_a_connection_has_bounds_of_its_own(server):
    large = GET + fields(90) + b"a: " + b"b" * 50_000 + b"\r\n\r\n"
    assert statuses(told(server, *[large] * 10, GET + CLOSE)) == [200] * 11
    assert statuses(told(server, large * 10 + GET + CLOSE)) == [200] * 11


def test_bodies_do_not_count(server):
    long = json.dumps({"inputs": "one", "unknown": "x" * 1_000_000}).encode()
    plain = POST + b"content-length: %d\r\n" % len(long) + CLOSE + long
    assert statuses(told(server, plain)) == [200]
    small = b"".join(
        b"%x\r\n%b\r\n" % (len(part), part)
        for part in (long[i : i + 5] for i in range(0, 300_000, 5))
    )
    rest = long[300_000:]
    chunked = small + b"%x\r\n%b\r\n0\r\na: b\r\n\r\n" % (len(rest), rest)
    assert statuses(told(server, CHUNKED + chunked + GET + CLOSE)) == [200, 200]


MALFORMED = [
    b"\x00\x01\x02\r\n\r\n",
    b"nonsense\r\n\r\n",
    # TLS
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    b"GET /health\r\n\r\n",
    b"GET /health HTTP/9.9\r\n\r\n",
    b"GET /health HTTP/2.0\r\n\r\n",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    # Hyper takes any word for a method; llhttp has a list
    b"BREW /health HTTP/1.1\r\n\r\n",
    b"GET /health HTTP/1.1\r\nbad header\r\n\r\n",
    b"GET /health HTTP/1.1\r\na: b\x00c\r\n\r\n",
    b"GET health HTTP/1.1\r\nhost: x\r\n\r\n",
    b"CONNECT x:1 HTTP/1.1\r\nhost: x\r\n\r\n",
    b"CONNECT /embed HTTP/1.1\r\nhost: x\r\n\r\n",
    POST + b"content-length: nan\r\n\r\n",
    b"GET /health HTTP/1.1\r\nhost: x\r\nHost: y\r\n\r\n",
    b"GET /health HTTP/1.1\r\nhost: x\r\na: b\r\na: c\r\nhost: x\r\n\r\n",
    POST + b"content-length: -1\r\n\r\n",
    POST + b"content-length: 1\r\ncontent-length: 2\r\n\r\n",
    POST + b"content-length: 20\r\ntransfer-encoding: chunked\r\n\r\n",
]


@pytest.mark.parametrize("head", MALFORMED)
def test_a_malformed_head_is_400_without_a_word(server, head):
    ((status, headers, body),) = told(server, head)
    assert (status, body) == (400, b"")
    assert headers.keys() - {b"date"} == {b"content-length", b"connection"}
    assert statuses(told(server, WHOLE + head)) == [200, 400]
    server.is_well()


BROKEN_BODIES = {
    "no size": [b"zz\r\n"],
    "a size too large": [b"fffffffffffffffffff\r\n"],
    "no line end": [b'3\r\n{"ix\r\n'],
    "later": [b'3\r\n{"i\r\n', b"nonsense"],
    "an extension without end": [b"3;", *[b"a" * 100_000] * 20],
    "too many trailers": [b"14\r\n" + BODY + b"\r\n0\r\n" + fields(200)],
    "trailers without end": [b"14\r\n" + BODY + b"\r\n0\r\na: ", *[b"a" * 100_000] * 20],
}


@pytest.mark.parametrize("name", BROKEN_BODIES)
def test_a_broken_chunk_is_told_as_tei_tells_it(server, name):
    for before in ([], [WHOLE], [WHOLE * 3]):
        *earlier, (status, headers, body) = told(server, *before, CHUNKED, *BROKEN_BODIES[name])
        assert (status, body) == (400, BROKEN)
        assert headers[b"content-type"].startswith(b"text/plain")
        assert statuses(earlier) == [200] * sum(part.count(b"POST") for part in before)
    server.is_well()


def test_what_comes_before_a_body_is_still_told_first(server):
    assert statuses(told(server, CHUNKED.replace(b"/json", b"/xml") + b"zz\r\n")) == [415]
    assert statuses(told(server, CHUNKED.replace(b"/embed", b"/nope") + b"zz\r\n")) == [404]
    # Answered before its body breaks: no second answer
    with connected(server) as client:
        client.sendall(CHUNKED.replace(b"/embed", b"/nope"))
        said = client.recv(12)
        client.sendall(b"zz\r\n")
        said += b"".join(iter(lambda: client.recv(1 << 16), b""))
    assert said.startswith(b"HTTP/1.1 404")
    assert said.count(b"HTTP/1.1") == 1
    server.is_well()


def test_trailers_are_no_headers():
    with serving(server={"api_key": "secret"}) as running:
        trailer = b"14\r\n" + BODY + b"\r\n0\r\nauthorization: Bearer secret\r\n\r\n"
        assert statuses(told(running, CHUNKED + trailer + GET + CLOSE)) == [401, 200]
        with_key = CHUNKED.replace(b"host: x", b"authorization: Bearer secret")
        assert statuses(told(running, with_key + trailer + GET + CLOSE)) == [200, 200]


def test_an_offer_to_upgrade_is_declined_and_the_body_read(server):
    offer = POST.replace(
        b"host: x\r\n",
        b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAEAAEAA\r\n",
    )
    whole, chunked = (
        offer + b"content-length: 20\r\n\r\n" + BODY,
        offer + b"transfer-encoding: chunked\r\n\r\n",
    )
    plain = told(server, LAST)[0][2]
    for parts in (
        [whole, LAST],
        [whole + LAST],
        [whole[:-7], whole[-7:], LAST],
        [whole * 3 + LAST],
        [chunked + b"14\r\n", BODY + b"\r\n0\r\n\r\n" + LAST],
    ):
        answers = told(server, *parts)
        assert set(statuses(answers)) == {200}
        assert len(answers) == sum(part.count(b"POST") for part in parts)
        assert {body for _, _, body in answers} == {plain}
    assert statuses(told(server, offer + fields(HEADER_COUNT_LIMIT))) == [431]
    assert statuses(told(server, chunked + b"zz\r\n")) == [400]


def test_a_head_waits_for_its_body_and_nothing_else_waits():
    class Written:
        def __init__(self):
            self.parts = []
            self.write = self.parts.append
            self.writelines = lambda parts: self.parts.append(b"".join(parts))

        def is_closing(self):
            return False

    head, body, leave = (
        b"HTTP/1.1 200 OK\r\n\r\n",
        b"HTTP/1.1 is a body",
        b"HTTP/1.1 100 Continue\r\n\r\n",
    )
    for given, wanted in (
        ([head, body], [head + body]),
        ([leave, head, memoryview(body), b"more"], [leave, head + body, b"more"]),
        ([head], [head]),
        ([head, b"", head, body], [head, head + body]),
    ):
        transport, closed = Written(), []
        answering = Answering(transport, partial(closed.append, True))
        for part in given:
            answering.write(part)
        answering.close()
        assert (transport.parts, closed) == (wanted, [True])


def test_a_client_that_waits_for_leave_to_send_its_body_gets_it(server):
    head, body = WHOLE.replace(b"content-length", b"expect: 100-continue\r\ncontent-length").split(
        b"\r\n\r\n"
    )
    with connected(server) as client:
        client.sendall(head + b"\r\n\r\n")
        assert client.recv(1 << 16) == b"HTTP/1.1 100 Continue\r\n\r\n"
        client.sendall(body)
        assert client.recv(1 << 16).startswith(b"HTTP/1.1 200 ")
