"""Bytes as clients should not send them: bounds of a head, malformed HTTP, pipelines, clients that leave in the middle."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import pytest

from hybridtei.config import ServerConfig
from hybridtei.server.http.connection import Answering
from hybridtei.server.http.protocol import (
    HEADER_COUNT_LIMIT,
    PIPELINE_LIMIT,
    URL_LIMIT_BYTES,
    BoundedHttpProtocol,
)
from tests.server.live import HANG, Running, serving
from tests.server.test_serve import Hold, until

HEAD_LIMIT_BYTES = ServerConfig().header_limit
BODY = b'{"inputs":"one two"}'
POST = b"POST /embed HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
CHUNKED = POST + b"transfer-encoding: chunked\r\n\r\n"
WHOLE = POST + b"content-length: 20\r\n\r\n" + BODY
LAST = POST + b"connection: close\r\ncontent-length: 20\r\n\r\n" + BODY
GET = b"GET /health HTTP/1.1\r\nhost: x\r\n"
CLOSE = b"connection: close\r\n\r\n"
BROKEN = b"Failed to buffer the request body: error reading a body from connection"
READ = 256_000  # uvloop's, at most

Answer = tuple[int, dict[bytes, bytes], bytes]


@pytest.fixture(scope="module")
def bounded() -> Iterator[Running]:
    """A server that all here may ask."""
    with serving() as running:
        yield running


@contextmanager
def connected(running: Running) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", running.port), timeout=HANG) as client:
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        yield client


def told(running: Running, *parts: bytes) -> list[Answer]:
    """Everything the server says until it closes."""
    with connected(running) as client:
        for part in parts:
            client.sendall(part)
        return heard(client)


def heard(client: socket.socket) -> list[Answer]:
    said = b"".join(iter(lambda: client.recv(1 << 16), b""))
    found = []
    while said:
        head, _, said = said.partition(b"\r\n\r\n")
        status, *lines = head.split(b"\r\n")
        headers = dict(line.split(b": ", 1) for line in lines)
        length = int(headers[b"content-length"])
        found.append((int(status.split()[1]), headers, said[:length]))
        said = said[length:]
    return found


def statuses(answers: list[Answer]) -> list[int]:
    return [status for status, _, _ in answers]


def fields(count: int) -> bytes:
    return b"a: b\r\n" * count


def send_without_end(client: socket.socket, part: bytes) -> None:
    while True:
        client.sendall(part)


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
    "with a body": (431, [POST + fields(HEADER_COUNT_LIMIT) + b"content-length: 20\r\n\r\n" + BODY]),
}


@pytest.mark.parametrize("name", BEYOND)
def test_a_head_beyond_the_bounds_is_refused_and_the_connection_closed(bounded, name):
    status, parts = BEYOND[name]
    answers = told(bounded, *parts)
    assert statuses(answers[:-1]) == ([200] if name == "behind another" else [])
    refused, headers, body = answers[-1]
    assert (refused, body) == (status, b"")
    assert headers.keys() - {b"date"} == {b"content-length", b"connection"}
    assert headers[b"connection"] == b"close"
    bounded.is_well()


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
def test_a_head_within_the_bounds_passes_however_it_is_cut(bounded, head):
    assert statuses(told(bounded, head)) == [200]
    step = max(1, len(head) // 97)
    assert statuses(told(bounded, *(head[start : start + step] for start in range(0, len(head), step)))) == [200]


def test_what_is_read_of_an_endless_head_is_bounded(bounded, monkeypatch):
    read = []
    feed = BoundedHttpProtocol._feed

    def counted(self, data):
        read.append(len(data))
        feed(self, data)

    monkeypatch.setattr(BoundedHttpProtocol, "_feed", counted)
    for start in (b"a: ", b"", b"a: b\r\n"):
        read.clear()
        assert statuses(told(bounded, GET, *[(start or b"b") * 100_000] * 30)) == [431]
        assert sum(read) <= HEAD_LIMIT_BYTES + 2 * READ


def test_each_request_of_a_connection_has_bounds_of_its_own(bounded):
    large = GET + fields(90) + b"a: " + b"b" * 50_000 + b"\r\n\r\n"
    assert statuses(told(bounded, *[large] * 10, GET + CLOSE)) == [200] * 11
    assert statuses(told(bounded, large * 10 + GET + CLOSE)) == [200] * 11


def test_bodies_do_not_count(bounded):
    long = json.dumps({"inputs": "one", "unknown": "x" * 1_000_000}).encode()
    plain = POST + b"content-length: %d\r\n" % len(long) + CLOSE + long
    assert statuses(told(bounded, plain)) == [200]
    small = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in (long[i : i + 5] for i in range(0, 300_000, 5)))
    rest = long[300_000:]
    chunked = small + b"%x\r\n%b\r\n0\r\na: b\r\n\r\n" % (len(rest), rest)
    assert statuses(told(bounded, CHUNKED + chunked + GET + CLOSE)) == [200, 200]


MALFORMED = [
    b"\x00\x01\x02\r\n\r\n",
    b"nonsense\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # TLS
    b"GET /health\r\n\r\n",
    b"GET /health HTTP/9.9\r\n\r\n",
    b"GET /health HTTP/2.0\r\n\r\n",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"BREW /health HTTP/1.1\r\n\r\n",  # hyper takes any word for a method; llhttp has a list
    b"GET /health HTTP/1.1\r\nbad header\r\n\r\n",
    b"GET /health HTTP/1.1\r\na: b\x00c\r\n\r\n",
    b"GET health HTTP/1.1\r\nhost: x\r\n\r\n",
    b"CONNECT x:1 HTTP/1.1\r\nhost: x\r\n\r\n",
    b"CONNECT /embed HTTP/1.1\r\nhost: x\r\n\r\n",
    POST + b"content-length: nan\r\n\r\n",
    POST + b"content-length: -1\r\n\r\n",
    POST + b"content-length: 1\r\ncontent-length: 2\r\n\r\n",
    POST + b"content-length: 20\r\ntransfer-encoding: chunked\r\n\r\n",
]


@pytest.mark.parametrize("head", MALFORMED)
def test_a_malformed_head_is_400_without_a_word(bounded, head):
    ((status, headers, body),) = told(bounded, head)
    assert (status, body) == (400, b"")
    assert headers.keys() - {b"date"} == {b"content-length", b"connection"}
    assert statuses(told(bounded, WHOLE + head)) == [200, 400]
    bounded.is_well()


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
def test_a_broken_chunk_is_told_as_tei_tells_it(bounded, name):
    for before in ([], [WHOLE], [WHOLE * 3]):
        *earlier, (status, headers, body) = told(bounded, *before, CHUNKED, *BROKEN_BODIES[name])
        assert (status, body) == (400, BROKEN)
        assert headers[b"content-type"].startswith(b"text/plain")
        assert statuses(earlier) == [200] * sum(part.count(b"POST") for part in before)
    bounded.is_well()


def test_what_comes_before_a_body_is_still_told_first(bounded):
    assert statuses(told(bounded, CHUNKED.replace(b"/json", b"/xml") + b"zz\r\n")) == [415]
    assert statuses(told(bounded, CHUNKED.replace(b"/embed", b"/nope") + b"zz\r\n")) == [404]
    with connected(bounded) as client:  # answered before its body breaks: no second answer
        client.sendall(CHUNKED.replace(b"/embed", b"/nope"))
        said = client.recv(12)
        client.sendall(b"zz\r\n")
        said += b"".join(iter(lambda: client.recv(1 << 16), b""))
    assert said.startswith(b"HTTP/1.1 404")
    assert said.count(b"HTTP/1.1") == 1
    bounded.is_well()


def test_trailers_are_no_headers():
    with serving(server={"api_key": "secret"}) as running:
        trailer = b"14\r\n" + BODY + b"\r\n0\r\nauthorization: Bearer secret\r\n\r\n"
        assert statuses(told(running, CHUNKED + trailer + GET + CLOSE)) == [401, 200]
        with_key = CHUNKED.replace(b"host: x", b"authorization: Bearer secret")
        assert statuses(told(running, with_key + trailer + GET + CLOSE)) == [200, 200]


def test_an_offer_to_upgrade_is_declined_and_the_body_read(bounded):
    offer = POST.replace(b"host: x\r\n", b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAEAAEAA\r\n")
    whole, chunked = offer + b"content-length: 20\r\n\r\n" + BODY, offer + b"transfer-encoding: chunked\r\n\r\n"
    plain = told(bounded, LAST)[0][2]
    for parts in (
        [whole, LAST],
        [whole + LAST],
        [whole[:-7], whole[-7:], LAST],
        [whole * 3 + LAST],
        [chunked + b"14\r\n", BODY + b"\r\n0\r\n\r\n" + LAST],
    ):
        answers = told(bounded, *parts)
        assert set(statuses(answers)) == {200}
        assert len(answers) == sum(part.count(b"POST") for part in parts)
        assert {body for _, _, body in answers} == {plain}
    assert statuses(told(bounded, offer + fields(HEADER_COUNT_LIMIT))) == [431]
    assert statuses(told(bounded, chunked + b"zz\r\n")) == [400]


@pytest.mark.parametrize("count", [2, PIPELINE_LIMIT + 1, 5 * PIPELINE_LIMIT])
@pytest.mark.parametrize("at_once", [True, False])
def test_pipelined_requests_are_answered_in_order(bounded, count, at_once):
    texts = [" ".join(["one"] * (1 + i % 30)) for i in range(count)]
    bodies = [json.dumps({"inputs": text}).encode() for text in texts]
    requests = [POST + b"content-length: %d\r\n\r\n" % len(body) + body for body in bodies] + [GET + CLOSE]
    answers = told(bounded, *([b"".join(requests)] if at_once else requests))
    assert statuses(answers) == [200] * (count + 1)
    assert [int(headers[b"x-compute-characters"]) for _, headers, _ in answers[:-1]] == [len(text) for text in texts]


@pytest.mark.parametrize(("bad", "status"), [(b"nonsense\r\n\r\n", 400), (GET + fields(200), 431)])
def test_a_refusal_waits_for_the_answers_before_it(bad, status):
    hold = Hold()
    with serving(gate=hold) as running, connected(running) as client:
        client.sendall(WHOLE * 2)
        assert hold.entered.wait(HANG)
        client.sendall(bad)
        assert running.get("/health").status_code == 200
        hold.let_go()
        assert statuses(heard(client)) == [200, 200, status]


def test_requests_behind_the_last_answer_of_a_connection_do_not_keep_it_open():
    hold = Hold()
    with serving(gate=hold) as running, connected(running) as client:
        client.sendall(LAST)
        assert hold.entered.wait(HANG)
        client.sendall(WHOLE + WHOLE[:-5])
        assert running.get("/health").status_code == 200
        hold.let_go()
        assert statuses(heard(client)) == [200]


def test_a_refused_client_that_goes_on_sending_hears_the_answer_and_is_cut_off(bounded):
    with connected(bounded) as client:
        client.sendall(GET + fields(200))
        assert client.recv(12) == b"HTTP/1.1 431"
        with pytest.raises((ConnectionResetError, BrokenPipeError)):
            send_without_end(client, fields(10_000))
    bounded.is_well()


@pytest.mark.parametrize("head", [b"POST /nowhere HTTP/1.0\r\n", b"POST /nowhere HTTP/1.1\r\nconnection: close\r\n"])
def test_a_client_that_is_answered_before_its_body_was_read_hears_the_answer(bounded, head):
    body = b"x" * 500_000
    with connected(bounded) as client:
        client.sendall(head + b"host: a\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
        answer = b"".join(iter(lambda: client.recv(1 << 16), b""))
    assert answer.startswith(b"HTTP/1.1 404")
    bounded.is_well()


def test_head_and_body_of_an_answer_come_in_one_piece(bounded):
    with connected(bounded) as client:
        for _ in range(3):
            client.sendall(WHOLE)
            head, _, body = client.recv(1 << 16).partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200 ")
            assert b"content-length: %d" % len(body) in head.lower()


def test_a_head_waits_for_its_body_and_nothing_else_waits():
    class Written:
        def __init__(self) -> None:
            self.parts: list[bytes] = []
            self.write = self.parts.append
            self.writelines = lambda parts: self.parts.append(b"".join(parts))

        def is_closing(self) -> bool:
            return False

    head, body, leave = b"HTTP/1.1 200 OK\r\n\r\n", b"HTTP/1.1 is a body", b"HTTP/1.1 100 Continue\r\n\r\n"
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


def test_a_client_that_waits_for_leave_to_send_its_body_gets_it(bounded):
    head, body = WHOLE.replace(b"content-length", b"expect: 100-continue\r\ncontent-length").split(b"\r\n\r\n")
    with connected(bounded) as client:
        client.sendall(head + b"\r\n\r\n")
        assert client.recv(1 << 16) == b"HTTP/1.1 100 Continue\r\n\r\n"
        client.sendall(body)
        assert client.recv(1 << 16).startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize("apart", [True, False])
@pytest.mark.parametrize("abrupt", [True, False])
def test_pipelining_clients_that_leave_cost_no_pass_and_leave_no_trace(caplog, apart, abrupt):
    hold = Hold()
    with serving(gate=hold) as running:
        permits = running.service.config.max_concurrent_requests
        first = threading.Thread(target=running.post, args=("/embed", {"inputs": "one"}))
        first.start()
        assert hold.entered.wait(HANG)
        clients = [socket.create_connection(("127.0.0.1", running.port), timeout=HANG) for _ in range(5)]
        for client in clients:
            client.sendall(WHOLE if apart else WHOLE * 6)
        until(lambda: running.service.admission.free == permits - 6)  # equal texts share a place in the queue
        for client in clients:
            if apart:
                client.sendall(WHOLE * 3)
                client.sendall(WHOLE * 2)
        assert running.get("/health").status_code == 200
        for client in clients:
            if abrupt:
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")
            client.close()
        until(lambda: running.service.admission.free == permits - 1)
        assert running.service.engine.metrics.dropped.value() == 5
        hold.let_go()
        first.join(HANG)
        until(lambda: running.service.engine.metrics.queued.value() == 0)
        assert running.backend.forwards == 1
        running.is_well()
        assert "te_request_count" in running.get("/metrics").text
    assert [record.getMessage() for record in caplog.records if record.levelname in ("ERROR", "CRITICAL")] == []


@pytest.mark.parametrize("stage", range(0, len(WHOLE) * 2, 23))
def test_a_client_may_leave_anywhere(bounded, caplog, stage):
    for abrupt in (True, False):
        with connected(bounded) as client:
            client.sendall((WHOLE * 2)[:stage])
            if abrupt:
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")
    bounded.is_well()
    assert [record for record in caplog.records if record.exc_info] == []
