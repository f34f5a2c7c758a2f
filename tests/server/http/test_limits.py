"""Bounds of connections and of time: each refuses by its name, counts the refusal, and affects no
other client."""

import asyncio
import json
import resource
import select
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridtei.config import EngineConfig
from hybridtei.limits import Bound
from hybridtei.retrieval.store.collection import CollectionSchemas
from hybridtei.retrieval.store.memory import MemoryStore
from hybridtei.server.http.body import BodyError, read_body
from hybridtei.server.http.connection import (
    BODY_BYTES_PER_SECOND,
    FILES_BESIDE,
    allow_files,
    body_deadline,
)
from tests.retrieval.search.small_search import MODEL, spec_in
from tests.server.clock import SteppedClock
from tests.server.http.raw import BODY, CHUNKED, GET, POST, WHOLE, connected, heard, statuses
from tests.server.live import HANG, JSON, Hold, serving, until

# Seconds: a bound that is reached at once
SOON = 0.2


def refusals(running, limit):
    line = f'hybridtei_refusals_total{{limit="{limit}"}} '
    text = running.get("/metrics").text
    return next(
        (int(found.removeprefix(line)) for found in text.splitlines() if found.startswith(line)), 0
    )


@contextmanager
def clocked(server, **settings):
    """A server, a connection to it, and the clock by which it keeps the bounds."""
    clock = SteppedClock()
    with serving(server=server, clock=clock, **settings) as running, connected(running) as client:
        yield running, client, clock


def send(running, client, data):
    """Returns once the server has read it."""
    protocol = protocol_of(running, client)
    before = protocol.bytes_read
    client.sendall(data)
    until(lambda: protocol.bytes_read == before + len(data))


def protocol_of(running, client):
    """The server's end of a connection, once it is accepted."""
    address = client.getsockname()

    def found():
        return [connection for connection in [*running.connections] if connection.client == address]

    until(found)
    return found()[0]


def answered(client, count):
    """This many answers have arrived, each 200."""
    answers = b""
    while answers.count(b"HTTP/1.1 ") < count or not answers.endswith(b"]" * bool(count)):
        part = client.recv(1 << 16)
        assert part, "cut off"
        answers += part
    assert answers.count(b"HTTP/1.1 200") == count


def drip(client, clock, part, seconds):
    """A part every half second."""
    for _ in range(int(2 * seconds)):
        client.sendall(part)
        clock.advance(0.5)


HEADS = {
    "in a word": b"GE",
    "in the path": b"GET /heal",
    "in a name": GET + b"acc",
    "in a value": GET + b"a: b",
    "after": GET,
}
DRIPS = {"after": b"x: y\r\n", "in a word": b""}


@pytest.mark.parametrize("where", HEADS)
@pytest.mark.parametrize("drips", [True, False])
def test_a_head_that_takes_too_long_is_408_by_name(where, drips):
    with clocked({"header_timeout": 10}) as (running, client, clock):
        send(running, client, HEADS[where])
        drip(client, clock, DRIPS.get(where, b"b") if drips else b"", 9)
        assert refusals(running, "header_timeout") == 0
        clock.advance(1)
        ((status, headers, body),) = heard(client)
        assert (status, headers[b"connection"]) == (408, b"close")
        assert body == b"the head of the request took too long (header-timeout)"
        assert refusals(running, "header_timeout") == 1
        running.is_well()


@pytest.mark.parametrize("sent", [b"", b"\r\n"])
def test_a_connection_on_which_nothing_is_asked_is_closed_without_a_word(sent):
    with clocked({"header_timeout": 10}) as (running, client, clock):
        send(running, client, sent)
        clock.advance(10)
        assert heard(client) == []
        assert refusals(running, "header_timeout") == 0


@pytest.mark.parametrize("before", [b"", WHOLE, WHOLE * 3])
@pytest.mark.parametrize("head", [CHUNKED + b"5\r\n", POST + b"content-length: 20\r\n\r\n{"])
def test_a_body_that_takes_too_long_is_408_by_name(head, before):
    with clocked({"body_timeout": 10}) as (running, client, clock):
        send(running, client, before + head)
        answered(client, before.count(b"POST"))
        clock.advance(9.9)
        assert refusals(running, "body_timeout") == 0
        clock.advance(0.1)
        ((status, headers, body),) = heard(client)
        assert (status, headers[b"connection"]) == (408, b"close")
        assert (
            body == b"Failed to buffer the request body: it took too long to arrive (body-timeout)"
        )
        assert refusals(running, "body_timeout") == 1
        running.is_well()


def test_a_byte_now_and_then_is_not_enough():
    with clocked({"body_timeout": 10}) as (running, client, clock):
        send(running, client, POST + b"content-length: 1000000\r\n\r\n")
        drip(client, clock, b" ", 10)
        assert refusals(running, "body_timeout") == 0
        clock.advance(0.1)
        assert statuses(heard(client)) == [408]


def test_a_refused_body_that_is_never_finished_keeps_no_connection():
    with clocked({"body_timeout": 10}) as (running, client, clock):
        send(running, client, POST.replace(b"/embed", b"/nope") + b"content-length: 20\r\n\r\n{")
        clock.advance(10)
        assert statuses(heard(client)) == [404]


def test_time_at_work_and_between_requests_is_not_the_clients():
    hold = Hold()
    with clocked({"header_timeout": 10, "body_timeout": 10}, gate=hold) as (_, client, clock):
        # Reading pauses behind the first
        client.sendall(WHOLE * 30)
        assert hold.entered.wait(HANG)
        for _ in range(6):
            clock.advance(10)
        hold.let_go()
        answered(client, 30)
        for _ in range(6):
            clock.advance(10)
        client.sendall(WHOLE)
        assert client.recv(1 << 16).startswith(b"HTTP/1.1 200")


def test_zero_is_no_bound():
    with clocked({"header_timeout": 0, "body_timeout": 0}) as (running, client, clock):
        for part in (POST, b"content-length: 20\r\n\r\n", BODY[:5]):
            send(running, client, part)
            clock.advance(86_400)
        client.sendall(BODY[5:])
        assert client.recv(1 << 16).startswith(b"HTTP/1.1 200")


def test_connections_beyond_the_most_are_told_so_and_a_place_that_is_free_is_given():
    with serving(server={"max_connections": 3}) as running, ExitStack() as stack:
        # The third is the test's own
        first, second = (stack.enter_context(connected(running)) for _ in range(2))
        first.sendall(WHOLE)
        assert first.recv(1 << 16).startswith(b"HTTP/1.1 200")
        second.sendall(WHOLE)
        assert second.recv(1 << 16).startswith(b"HTTP/1.1 200")
        for sent in (b"", WHOLE):
            with connected(running) as client:
                client.sendall(sent)
                ((status, headers, body),) = heard(client)
                assert (status, body) == (503, b"too many connections (max-connections)")
                assert headers[b"connection"] == b"close"
        assert refusals(running, "max_connections") == 2
        second.close()

        def has_room():
            with connected(running) as client:
                client.sendall(WHOLE)
                return client.recv(1 << 16).startswith(b"HTTP/1.1 200")

        until(has_room)


def test_beyond_twice_as_many_nobody_is_told():
    with serving(server={"max_connections": 1}) as running, ExitStack() as stack:
        clients = [stack.enter_context(connected(running)) for _ in range(6)]
        said = []
        for client in clients:
            try:
                said.append(client.recv(1 << 16))
            except ConnectionResetError:
                said.append(b"")
        assert any(one.startswith(b"HTTP/1.1 503") for one in said)
        assert b"" in said
        assert refusals(running, "max_connections") == 6


@given(st.floats(0, 1e6), st.floats(0, 1e6), st.integers(0, 10**9))
def test_who_sends_fast_enough_without_standing_still_is_never_late(began, took, size):
    now = began + took
    deadline = body_deadline(began, now, size, 60)
    assert deadline <= now + 60
    if size >= took * BODY_BYTES_PER_SECOND:
        assert deadline >= now + 60 - 1e-6
    assert body_deadline(began, now, size + 1000, 60) >= deadline


def test_open_files_are_allowed_as_connections_need_them(caplog):
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(1024, before[1]), before[1]))
        allow_files(1000)
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] >= min(1000 + FILES_BESIDE, before[1])
        assert caplog.records == []
        allow_files(before[1])
        assert "max-connections" in caplog.text
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_every_bound_of_a_request_is_counted_by_its_name():
    engine = {"max_concurrent_requests": 2, "max_answer_bytes": 5000}
    with serving(
        server={"payload_limit": 500, "max_client_batch_size": 3, "header_limit": 2000},
        engine=engine,
    ) as running:
        asked = {
            "payload_limit": (413, running.post("/embed", {"inputs": "x" * 600})),
            "max_client_batch_size": (422, running.post("/embed", {"inputs": ["one"] * 4})),
            "max_concurrent_requests": (429, running.post("/embed", {"inputs": ["one"] * 3})),
            "max_answer_bytes": (422, running.post("/embed_all", {"inputs": "one " * 40})),
            "header_limit": (431, running.post("/embed", {}, headers={**JSON, "x": "y" * 3000})),
        }
        for limit, (status, response) in asked.items():
            assert response.status_code == status, limit
            assert refusals(running, limit) == 1, limit
        assert "max-answer-bytes" in asked["max_answer_bytes"][1].json()["error"]
        assert running.post("/embed", {"inputs": "one"}).status_code == 200


@pytest.mark.parametrize("path", ["/embed_all", "/embed_multivector"])
def test_an_answer_that_would_be_too_large_costs_no_pass(path):
    with serving(engine={"max_answer_bytes": 10_000}) as running:
        assert running.post(path, {"inputs": "one two"}).status_code == 200
        assert running.post("/embed", {"inputs": ["one two three " * 15] * 20}).status_code == 200
        before = running.backend.forwards
        refused = running.post(path, {"inputs": ["one two three " * 15] * 20})
        assert (refused.status_code, refused.json()["error_type"]) == (422, "Validation")
        assert "maximum allowed 10000 (max-answer-bytes)" in refused.json()["error"]
        assert running.backend.forwards == before
        running.is_well()


def test_a_request_that_takes_too_long_is_503_and_its_place_is_free():
    hold = Hold()
    with serving(engine={"request_timeout": SOON}, gate=hold) as running:
        refused = running.post("/embed", {"inputs": "one"})
        assert (refused.status_code, refused.json()["error_type"]) == (503, "Overloaded")
        assert "within 0.2 seconds (request-timeout)" in refused.json()["error"]
        assert running.service.admission.free == EngineConfig().max_concurrent_requests
        assert refusals(running, "request_timeout") == 1
        assert 'te_request_failure{err="timeout"} 1' in running.get("/metrics").text
        hold.let_go()
        until(lambda: running.service.engine.metrics.queued.value() == 0)
        running.is_well()


def test_what_waiting_requests_hold_is_bounded_and_a_request_alone_is_let_in(monkeypatch, tmp_path):
    """JSON of two megabytes may become sixty of Python's objects. Commas in a text, and values of a
    field that no route reads, are held by nothing."""
    monkeypatch.setattr("hybridtei.server.app.MAX_INSIDE_BYTES", 4_000_000)
    hold = Hold()
    store = CollectionSchemas(MemoryStore())
    payload = [{"a": place} for place in range(10_000)]
    points = {"points": [{"text": "one", "payload": {"a": payload}}], "create": True}
    body = json.dumps(points).encode()
    commas = json.dumps({"inputs": "," * 15_000, "more": [[]] * 10_000})
    path = "/collections/c/points"
    with serving(spec_in(tmp_path), model_id=MODEL, schemas=store, gate=hold) as running:
        with connected(running) as client:
            head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            client.sendall(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
            assert hold.entered.wait(HANG)
            refused = running.post(path, body)
            assert (refused.status_code, "other requests hold" in refused.text) == (503, True)
            assert running.post("/embed", b"nonsense").status_code == 400
            assert running.post("/tokenize", commas.encode()).status_code == 200
            assert running.get("/health").status_code == 200
        # The work goes on without its client
        assert running.post(path, body).status_code == 503
        hold.let_go()
        until(lambda: running.post(path, body).status_code == 200)
        running.is_well()


def unfinished(size):
    """The head of a body of `size` bytes, and its first megabyte."""
    head = "POST /v1/embeddings HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {size}\r\n\r\n".encode() + b" " * 1_000_000


def test_bodies_that_stay_unfinished_stop_no_small_ones_and_the_longest_ends(monkeypatch):
    monkeypatch.setattr("hybridtei.server.app.MAX_ARRIVING_BYTES", 4_000_000)
    with serving() as running, ExitStack() as stack:
        clients = []
        for _ in range(4):
            client = stack.enter_context(connected(running))
            client.sendall(unfinished(20_000_000) + b" ")
            clients.append(client)
        # Three have room, which leaves a quarter; another one takes the place of the longest
        ended = []
        until(lambda: ended.extend(select.select(clients, [], [], 0)[0]) or ended)
        ((status, _, body),) = heard(ended[0])
        assert (status, b"held most for longest" in body) == (503, True)
        # A body in pieces passes by them
        pieces = (piece for piece in (b'{"inputs":"', b"one " * 100_000, b'"}'))
        assert running.client.post("/embed", content=pieces, headers=JSON).status_code == 200


async def test_a_body_has_a_second_for_each_of_some_announced_bytes():
    """Not of the bytes that came at once: then a client would hold them for hours."""
    parts = iter([b" " * 900_000])

    async def receive():
        await asyncio.sleep(0.001)
        return {"type": "http.request", "body": next(parts, b" "), "more_body": True}

    scope = {"headers": [(b"content-length", b"1000000")]}
    bound = Bound(4_000_000)
    with pytest.raises(BodyError, match=r"within 0\.02 seconds") as refused:
        await read_body(SimpleNamespace(scope=scope, receive=receive), bound, 2_000_000, 0.01, 1e8)
    assert (refused.value.status, refused.value.limit) == (408, "body_timeout")
    assert bound.units == 0
