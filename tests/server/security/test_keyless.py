"""Bodies of the hook that come without a key in a header: bounded in bytes and in time; a key
passes by."""

import json
import socket
from contextlib import ExitStack, contextmanager, suppress

import pytest

from tests.server.http.raw import connected, heard
from tests.server.live import HANG, serving, until

SIZE = 1_900_000
KEY = {"authorization": "Bearer secret"}
BODY = {"inputs": [{"data": "one", "model": "small"}], "token": "secret"}
# The token stands last, as a Qdrant server sends it
LONG = json.dumps({"pad": "x" * SIZE, **BODY}).encode()


@pytest.fixture(scope="module")
def locked():
    with serving(server={"api_key": "secret"}) as running:
        yield running


HEAD = b"POST /qdrant/inference HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(LONG)


@contextmanager
def unfinished(running, count):
    """Clients that send all but the end of a body."""
    with ExitStack() as stack:
        clients = []
        for _ in range(count):
            client = socket.create_connection(("127.0.0.1", running.port), timeout=20)
            stack.callback(client.close)
            client.setblocking(False)
            clients.append(client)
        left = {client: memoryview(HEAD + LONG)[:-10] for client in clients}
        patience = 0
        # Until all is sent, or the server takes no more
        while left and patience < 2000:
            for client, data in list(left.items()):
                try:
                    left[client] = data[client.send(data) :]
                    patience = 0
                except BlockingIOError:
                    patience += 1
                except OSError:
                    left[client] = data[:0]
                if not left[client]:
                    del left[client]
        yield clients


def held(running):
    """How many bytes of unfinished bodies the requests at work were given."""
    return sum(
        len(connection.cycle.body)
        for connection in running.connections
        if connection.cycle is not None
    )


def refused(clients):
    found = 0
    for client in clients:
        with suppress(OSError):
            found += client.recv(13, socket.MSG_PEEK) == b"HTTP/1.1 503 "
    return found


def test_what_strangers_leave_unfinished_is_refused_beyond_the_bound_and_a_key_passes_by(
    monkeypatch,
):
    monkeypatch.setattr("hybridtei.server.serve.KEYLESS_SECONDS", HANG)
    with serving(server={"api_key": "secret"}) as running, unfinished(running, 24) as clients:
        # All but those that the bound has room for
        until(lambda: refused(clients) >= 24 - 16_000_000 // SIZE)
        assert running.post("/qdrant/inference", LONG, headers=KEY).status_code == 200
        # Comes whole, and so is never held
        assert running.post("/qdrant/inference", BODY).status_code == 200


def test_whole_bodies_are_answered_by_the_token_in_them(locked):
    for _ in range(12):
        assert locked.post("/qdrant/inference", LONG).status_code == 200
    assert locked.post("/qdrant/inference", LONG.replace(b"secret", b"Secret")).status_code == 401
    assert locked.post("/qdrant/inference", b"[" * SIZE).status_code == 401


def test_a_body_without_a_key_that_takes_too_long_is_408(monkeypatch):
    monkeypatch.setattr("hybridtei.server.serve.KEYLESS_SECONDS", 0.2)
    with serving(server={"api_key": "secret"}) as running, connected(running) as client:
        client.sendall(HEAD + LONG[:100_000])
        ((status, headers, body),) = heard(client)
        assert (status, headers[b"connection"]) == (408, b"close")
        assert b"it took too long to arrive (body-timeout) within 0.2 seconds" in body
        until(lambda: held(running) == 0)
