"""At capacity: who is refused, in which words, in which order, and who is read later."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hybridtei.server.app import ROUTES
from hybridtei.server.http import overload
from tests.server.clock import SteppedClock
from tests.server.live import HANG, Running, serving
from tests.server.test_serve import Hold, until

PERMITS = 8
ONE = b'{"inputs":"one two"}'
EMBED = b"POST /embed HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
PLAIN = EMBED + b"content-length: 20\r\n\r\n" + ONE
CHUNKED = EMBED + b"transfer-encoding: chunked\r\n\r\n14\r\n" + ONE + b"\r\n0\r\n\r\n"
EXEMPT = [route for route in ROUTES if route.method == "POST" and not route.takes_permits]

Answer = tuple[int, dict[str, str], bytes]


@contextmanager
def at_capacity(held: int = PERMITS, **settings) -> Iterator[tuple[Running, Hold]]:
    """A server of which a request holds permits until the gate is opened, or this ends."""
    hold = Hold()
    with serving(engine={"max_concurrent_requests": PERMITS}, gate=hold, **settings) as running:
        key = settings.get("server", {}).get("api_key")
        headers = {"content-type": "application/json"} | ({"authorization": f"Bearer {key}"} if key else {})
        body = json.dumps({"inputs": ["one"] * held})
        holder = threading.Thread(target=lambda: running.client.post("/embed", content=body, headers=headers))
        holder.start()
        try:
            until(lambda: running.service.admission.free == PERMITS - held)
            yield running, hold
        finally:
            hold.let_go()
            holder.join(HANG)


@pytest.fixture
def read_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits to be read."""
    monkeypatch.setattr(overload, "READ_LATER_SECONDS", 0.0)
    monkeypatch.setattr(overload, "LATER_STEP_SECONDS", 0.0)


@pytest.fixture(scope="module")
def full() -> Iterator[Running]:
    """A server that many here may ask, where nobody waits to be read."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(overload, "READ_LATER_SECONDS", 0.0)
        patch.setattr(overload, "LATER_STEP_SECONDS", 0.0)
        with at_capacity() as (running, _):
            yield running


@contextmanager
def connected(running: Running) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", running.port), timeout=HANG) as client:
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        yield client


def answers(client: socket.socket, count: int, *, heads: Sequence[int] = ()) -> list[Answer]:
    """So many answers, none of them longer than it says; `heads`: places of those without their body."""
    stream = client.makefile("rb")
    found = []
    for place in range(count):
        status = int(stream.readline().split()[1])
        lines = iter(stream.readline, b"\r\n")
        headers = dict(line.decode().rstrip().split(": ", 1) for line in lines)
        size = 0 if place in heads else int(headers["content-length"])
        found.append((status, headers, stream.read(size)))
    return found


def raw(path: str, body: bytes = ONE, *, chunked: bool = False) -> bytes:
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n".encode()
    if chunked:
        return head + b"transfer-encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
    return head + b"content-length: %d\r\n\r\n%b" % (len(body), body)


BODIES = {
    "/similarity": {"inputs": {"source_sentence": "one", "sentences": ["two"]}},
    "/v1/embeddings": {"input": "one"},
    "/embeddings": {"input": "one"},
    "/api/embed": {"model": "x", "input": "one"},
    "/v2/embed": {"texts": ["one"], "model": "x", "input_type": "search_query", "embedding_types": ["float"]},
    "/v1/embed": {"texts": ["one"], "model": "x"},
    "/rerank": {"query": "one", "texts": ["two"]},
    "/v1/rerank": {"query": "one", "documents": ["two"]},
    "/v2/rerank": {"query": "one", "documents": ["two"]},
    "/score": {"text_1": "one", "text_2": "two"},
    "/v1/score": {"text_1": "one", "text_2": "two"},
    "/vertex": {"instances": [{"inputs": "one"}]},
}
OF_MODELS = [
    route
    for route in ROUTES
    if route.method == "POST" and route.takes_permits and route.target == "model" and "classify" not in route.path
]


@pytest.mark.parametrize("path", [route.path for route in OF_MODELS])
def test_what_is_prepared_is_what_the_route_itself_would_say(full, path):
    with connected(full) as client:
        client.sendall(raw(path) + raw(path, chunked=True))
        (status, prepared, body), ordinary = answers(client, 2)
        assert (status, {**prepared, "date": ""}, body) == (ordinary[0], {**ordinary[1], "date": ""}, ordinary[2])
        assert status == 429
        assert "Model is overloaded" in body.decode()


def test_only_answers_that_are_not_teis_say_when_to_come_back(full):
    tei = {"/embed", "/embed_all", "/embed_sparse", "/similarity", "/predict", "/rerank", "/invocations", "/", "/vertex"}
    with connected(full) as client:
        for path in [*(route.path for route in OF_MODELS), "/"]:
            client.sendall(raw(path))
            (answer,) = answers(client, 1)
            assert ("retry-after" in answer[1]) == (path not in tei), path


def test_with_teis_routes_only_the_answers_are_teis():
    with at_capacity(server={"only_tei_routes": True}) as (running, _), connected(running) as client:
        client.sendall(raw("/v1/embeddings"))
        assert "retry-after" not in answers(client, 1)[0][1]


def test_what_needs_no_permit_is_answered(full):
    management = {"/models/load", "/models/unload"}
    assert {route.path for route in EXEMPT} == {"/tokenize", "/decode", "/api/show", *management}
    assert full.post("/api/show", {}).status_code == 200
    assert full.post("/tokenize", {"inputs": "one"}).status_code == 200
    assert full.post("/decode", {"ids": [5]}).status_code == 200
    assert full.post("/decode", {"ids": [5]}).status_code == 200
    assert full.post("/models/load", {}).status_code == 403
    assert [full.get(path).status_code for path in ("/health", "/info", "/metrics")] == [200] * 3
    assert full.post("/no_such_route", {}).status_code == 404
    assert full.client.options("/embed").status_code == 200
    assert full.get("/embed").status_code == 405


def test_the_key_comes_first():
    with at_capacity(server={"api_key": "secret"}) as (running, _):
        for key, status in ((None, 401), ("wrong", 401), ("secret", 429)):
            headers = {"content-type": "application/json"} | ({"authorization": f"Bearer {key}"} if key else {})
            assert running.client.post("/embed", content=ONE, headers=headers).status_code == status


def test_pages_of_allowed_origins_may_read_the_refusal(read_at_once):
    with at_capacity(server={"cors_allow_origin": ("https://a.example",)}) as (running, _), connected(running) as client:
        for origin, allowed in (("https://a.example", "https://a.example"), ("https://b.example", None)):
            client.sendall(PLAIN.replace(b"host: x", b"host: x\r\norigin: " + origin.encode()))
            ((status, headers, _),) = answers(client, 1)
            assert (status, headers.get("access-control-allow-origin")) == (429, allowed)


def test_refusals_are_counted():
    with at_capacity() as (running, _):
        before = running.registry.text()
        assert running.post("/embed", {"inputs": "one"}).status_code == 429
        assert (
            running.client.post("/embed", content=iter([ONE]), headers={"content-type": "application/json"}).status_code == 429
        )
        after = running.registry.text()
        for sample, more in (
            ('hybridtei_refusals_total{limit="max_concurrent_requests"}', 2),
            ('te_request_failure{err="overloaded"}', 2),
            ('te_request_count{method="single"}', 2),
        ):
            assert value(after, sample) - value(before, sample) == more, sample


def value(text: str, sample: str) -> float:
    return next((float(line.rpartition(" ")[2]) for line in text.splitlines() if line.startswith(f"{sample} ")), 0.0)


KINDS = {
    "plain": (PLAIN, 429),
    "with a query": (PLAIN.replace(b"/embed", b"/embed?a=b"), 429),
    "not JSON": (EMBED + b"content-length: 4\r\n\r\noops", 429),
    "without a body": (EMBED + b"content-length: 0\r\n\r\n", 429),
    "a long body": (EMBED + b"content-length: 100000\r\n\r\n" + b" " * 100_000, 429),
    "in chunks": (CHUNKED, 429),
    "a chunk that looks like a request": (
        EMBED + b"transfer-encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (len(PLAIN), PLAIN),
        429,
    ),
    "a body that looks like a request": (EMBED + b"content-length: %d\r\n\r\n" % len(PLAIN) + PLAIN, 429),
    "a head that expects to go on": (PLAIN.replace(b"host: x", b"host: x\r\nexpect: 100-continue"), 429),
    "an offer to upgrade": (PLAIN.replace(b"host: x", b"host: x\r\nconnection: upgrade\r\nupgrade: h2c"), 429),
    "health": (b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n", 200),
    "tokens": (raw("/tokenize"), 200),
    "elsewhere": (raw("/nowhere"), 404),
    "options": (b"OPTIONS /embed HTTP/1.1\r\nhost: x\r\n\r\n", 200),
    "head": (b"HEAD /health HTTP/1.1\r\nhost: x\r\n\r\n", 200),
}


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(names=st.lists(st.sampled_from(sorted(KINDS)), min_size=1, max_size=6), cuts=st.lists(st.integers(0, 2000), max_size=8))
def test_whatever_arrives_in_whatever_pieces_is_answered_completely_and_in_order(full, names, cuts):
    stream = b"".join(KINDS[name][0] for name in names) + KINDS["health"][0]
    places = [0, *sorted(cut % len(stream) for cut in cuts), len(stream)]
    with connected(full) as client:
        for begin, end in pairwise(places):
            client.sendall(stream[begin:end])
        heads = [place for place, name in enumerate(names) if name == "head"]
        found = answers(client, len(names) + 1, heads=heads)
        assert [status for status, _, _ in found] == [*(KINDS[name][1] for name in names), 200]
        client.settimeout(0.001)
        with pytest.raises(TimeoutError):
            client.recv(1)


def test_a_request_that_is_the_last_closes_its_connection(full):
    for last in (PLAIN.replace(b"host: x", b"connection: close"), PLAIN.replace(b"HTTP/1.1", b"HTTP/1.0")):
        with connected(full) as client:
            client.sendall(last)
            assert answers(client, 1)[0][0] == 429
            assert client.recv(1) == b""


def test_a_refused_body_that_does_not_come_ends_the_connection():
    clock = SteppedClock()
    with at_capacity(server={"header_timeout": 10}, clock=clock) as (running, _), connected(running) as client:
        client.sendall(PLAIN[:-5])
        assert answers(client, 1)[0][0] == 429
        clock.advance(10)
        assert client.recv(1) == b""


def test_who_asks_again_at_once_is_read_when_permits_are_free(monkeypatch):
    monkeypatch.setattr(overload, "READ_LATER_SECONDS", HANG)
    with at_capacity() as (running, hold), connected(running) as client, connected(running) as other:
        client.sendall(PLAIN)
        assert answers(client, 1)[0][0] == 429
        client.sendall(PLAIN)  # is not read
        other.sendall(PLAIN)  # as any other connection is
        assert answers(other, 1)[0][0] == 429
        hold.let_go()
        assert answers(client, 1)[0][0] == 200


def test_nothing_is_read_of_who_waits_though_a_request_behind_the_refused_one_was_answered(monkeypatch):
    monkeypatch.setattr(overload, "READ_LATER_SECONDS", HANG)
    with at_capacity() as (running, _), connected(running) as client:
        client.sendall(CHUNKED + CHUNKED)
        assert [status for status, _, _ in answers(client, 2)] == [429, 429]
        running.get("/health")  # by now the server has done all that follows an answer
        (waiting,) = (one for one in running.connections if one.client == client.getsockname())
        client.sendall(PLAIN)
        until(lambda: waiting.flow.read_paused)
        assert len(waiting._kept) <= len(PLAIN)


def test_who_asks_again_at_once_is_read_after_a_while(monkeypatch):
    monkeypatch.setattr(overload, "READ_LATER_SECONDS", 0.01)
    with at_capacity() as (running, _), connected(running) as client:
        for _ in range(3):
            client.sendall(PLAIN + PLAIN)
            assert [status for status, _, _ in answers(client, 2)] == [429, 429]


def test_the_impatient_leave_permits_to_all_others(monkeypatch, read_at_once):
    monkeypatch.setattr(overload, "PAUSE_SECONDS", HANG)  # however slow this machine is
    left = PERMITS // overload.SHARE_LEFT
    with at_capacity(PERMITS) as (running, hold), connected(running) as impatient, connected(running) as other:
        for _ in range(2):
            impatient.sendall(PLAIN)
            assert answers(impatient, 1)[0][0] == 429
        hold.let_go()
        until(lambda: running.service.admission.free == PERMITS)
        with running.service.admission.inside(PERMITS - left):
            impatient.sendall(PLAIN)
            assert answers(impatient, 1)[0][0] == 429
            other.sendall(PLAIN)
            assert answers(other, 1)[0][0] == 200
        impatient.sendall(PLAIN)
        assert answers(impatient, 1)[0][0] == 200


def test_who_paused_is_patient_again(monkeypatch, read_at_once):
    with at_capacity(PERMITS) as (running, hold), connected(running) as client:
        for _ in range(2):
            client.sendall(PLAIN)
            assert answers(client, 1)[0][0] == 429
        hold.let_go()
        until(lambda: running.service.admission.free == PERMITS)
        monkeypatch.setattr(overload, "PAUSE_SECONDS", 0.0)  # any time is a pause
        with running.service.admission.inside(PERMITS - 1):
            client.sendall(PLAIN)
            assert answers(client, 1)[0][0] == 200
