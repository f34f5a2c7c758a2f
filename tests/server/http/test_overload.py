"""At capacity: which requests are refused, before their bodies are read, and when their connections
are read again."""

import json
import threading
from contextlib import contextmanager
from itertools import pairwise

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hybridtei.server.http import protocol
from hybridtei.server.routing import ROUTES
from tests.server.clock import SteppedClock
from tests.server.http.raw import BODY, CHUNKED, POST, WHOLE, connected
from tests.server.live import HANG, Hold, serving, until

PERMITS = 8
Answer = tuple[int, dict[str, str], bytes]


@contextmanager
def at_capacity(**settings):
    """A server of which a request holds all permits until the gate is opened, or this ends."""
    hold = Hold()
    with serving(engine={"max_concurrent_requests": PERMITS}, gate=hold, **settings) as running:
        key = settings.get("server", {}).get("api_key")
        headers = {"content-type": "application/json"} | (
            {"authorization": f"Bearer {key}"} if key else {}
        )
        body = json.dumps({"inputs": ["one"] * PERMITS})
        holder = threading.Thread(
            target=lambda: running.client.post("/embed", content=body, headers=headers)
        )
        holder.start()
        try:
            until(lambda: running.service.admission.free == 0)
            yield running, hold
        finally:
            hold.let_go()
            holder.join(HANG)


@pytest.fixture(scope="module")
def full():
    """A server that all here may ask, and which reads on at once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(protocol, "PAUSE_SECONDS", 0.0)
        with at_capacity() as (running, _):
            yield running


def answers(client, count, *, heads=()):
    """So many answers, none of them longer than it says; `heads`: places of those without their
    body."""
    stream = client.makefile("rb")
    found = []
    for place in range(count):
        status = int(stream.readline().split()[1])
        lines = iter(stream.readline, b"\r\n")
        headers = dict(line.decode().rstrip().split(": ", 1) for line in lines)
        size = 0 if place in heads else int(headers["content-length"])
        found.append((status, headers, stream.read(size)))
    return found


ENDPOINTS = {path: one for one in ROUTES if "POST" in one.methods for path in sorted(one.paths)}
OF_MODELS = [
    path for path, needs in ENDPOINTS.items() if needs.takes_permits and needs.source != "store"
]


@pytest.mark.parametrize("path", OF_MODELS)
def test_every_route_is_refused_before_its_body_comes(full, path):
    with connected(full) as client:
        client.sendall(POST.replace(b"/embed", path.encode()) + b"content-length: 100\r\n\r\n")
        ((status, headers, body),) = answers(client, 1)
        assert (status, "Model is overloaded" in body.decode()) == (429, True)
        assert ("retry-after" in headers) == (not ENDPOINTS[path].is_tei)


def test_with_teis_routes_only_the_answers_are_teis():
    with at_capacity(server={"only_tei_routes": True}) as (running, _):
        refused = running.post("/v1/embeddings", {"input": "one"})
        assert (refused.status_code, "retry-after" in refused.headers) == (429, False)


def test_what_needs_no_permit_is_answered(full):
    exempt = {path for path, needs in ENDPOINTS.items() if not needs.takes_permits}
    of_models = {"/models/load", "/models/unload"}
    assert exempt == {"/tokenize", "/decode", "/api/show", "/api/pull"} | of_models
    assert full.post("/api/show", {}).status_code == 200
    assert full.post("/tokenize", {"inputs": "one"}).status_code == 200
    assert full.post("/decode", {"ids": [5]}).status_code == 200
    assert full.post("/models/load", {}).status_code == 403
    assert [full.get(path).status_code for path in ("/health", "/info", "/metrics")] == [200] * 3
    assert full.post("/no_such_route", {}).status_code == 404
    assert full.client.options("/embed").status_code == 200
    assert full.get("/embed").status_code == 405


def test_the_key_comes_first():
    with at_capacity(server={"api_key": "secret"}) as (running, _):
        for key, status in ((None, 401), ("wrong", 401), ("secret", 429)):
            headers = {"content-type": "application/json"} | (
                {"authorization": f"Bearer {key}"} if key else {}
            )
            assert (
                running.client.post("/embed", content=BODY, headers=headers).status_code == status
            )


CHUNK = CHUNKED + b"14\r\n" + BODY + b"\r\n0\r\n\r\n"
KINDS = {
    "plain": (WHOLE, 429),
    "not JSON": (POST + b"content-length: 4\r\n\r\noops", 429),
    "without a body": (POST + b"content-length: 0\r\n\r\n", 429),
    "a long body": (POST + b"content-length: 100000\r\n\r\n" + b" " * 100_000, 429),
    "in chunks": (CHUNK, 429),
    "a body that looks like a request": (
        POST + b"content-length: %d\r\n\r\n" % len(WHOLE) + WHOLE,
        429,
    ),
    "a head that expects to go on": (
        WHOLE.replace(b"host: x", b"host: x\r\nexpect: 100-continue"),
        429,
    ),
    "an offer to upgrade": (
        WHOLE.replace(b"host: x", b"host: x\r\nconnection: upgrade\r\nupgrade: h2c"),
        429,
    ),
    "health": (b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n", 200),
    "tokens": (WHOLE.replace(b"/embed", b"/tokenize"), 200),
    "elsewhere": (WHOLE.replace(b"/embed", b"/nowhere"), 404),
    "head": (b"HEAD /health HTTP/1.1\r\nhost: x\r\n\r\n", 200),
}


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    names=st.lists(st.sampled_from(sorted(KINDS)), min_size=1, max_size=6),
    cuts=st.lists(st.integers(0, 2000), max_size=8),
)
def test_requests_in_any_pieces_are_answered_completely_and_in_order(full, names, cuts):
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
    for last in (
        WHOLE.replace(b"host: x", b"connection: close"),
        WHOLE.replace(b"HTTP/1.1", b"HTTP/1.0"),
    ):
        with connected(full) as client:
            client.sendall(last)
            assert answers(client, 1)[0][0] == 429
            assert client.recv(1) == b""


def test_a_refused_body_that_does_not_come_ends_the_connection():
    clock = SteppedClock()
    with (
        at_capacity(server={"body_timeout": 10}, clock=clock) as (running, _),
        connected(running) as client,
    ):
        client.sendall(WHOLE[:-5])
        assert answers(client, 1)[0][0] == 429
        # By now the server has done all that follows an answer
        running.get("/health")
        for _ in range(3):
            clock.advance(10)
        assert client.recv(1) == b""


def test_a_refused_connection_is_read_again_after_one_pause_and_no_other_waits():
    clock = SteppedClock()
    with (
        at_capacity(clock=clock) as (running, hold),
        connected(running) as client,
        connected(running) as other,
    ):
        client.sendall(WHOLE)
        assert answers(client, 1)[0][0] == 429
        running.get("/health")
        hold.let_go()
        until(lambda: running.service.admission.free == PERMITS)
        (waiting,) = (one for one in running.connections if one.client == client.getsockname())
        client.sendall(WHOLE * 2)
        other.sendall(WHOLE)
        assert answers(other, 1)[0][0] == 200
        clock.advance(protocol.PAUSE_SECONDS - 0.01)
        assert waiting.bytes_read == len(WHOLE)
        clock.advance(0.01)
        assert [status for status, _, _ in answers(client, 2)] == [200, 200]
