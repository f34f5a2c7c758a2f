"""Clients that take none of their answers: what is kept for them is bounded, beside that of HTTP, and they are cut off."""

from __future__ import annotations

import itertools
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import grpc
import pytest

from hybridtei.rpc import calls, messages
from tests.engine import small
from tests.rpc.live import Rpc, method_of, rpc_serving, start
from tests.server.http.test_unsent import unsent
from tests.server.live import HANG
from tests.server.test_serve import until

LENGTH = 512
WIDE = small.model_spec(hidden_size=8192, max_input_length=LENGTH)
TEXT = "one two three " * 160  # an answer of some 16 MB, of which a kernel takes a part
LIMIT = 64_000_000
OWN = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_receive_message_length", -1)]  # or channels would share a connection


@contextmanager
def unread(rpc: Rpc, name: str, count: int) -> Iterator[list[Any]]:
    """Calls of as many clients that ask for much and take nothing: an answer is taken when it is iterated over."""
    method = method_of(name)
    body = messages.message(method.input_type.name)(inputs=TEXT).SerializeToString()
    path = f"/{method.containing_service.full_name}/{name}"
    over = threading.Event()

    def asks() -> Iterator[bytes]:
        yield from itertools.repeat(body, 100 if method.client_streaming else 1)
        over.wait(HANG)

    with ExitStack() as stack:
        stack.callback(over.set)
        channels = [stack.enter_context(grpc.insecure_channel(rpc.address, options=OWN)) for _ in range(count)]
        opened = [channel.stream_stream(path)(asks(), timeout=HANG) for channel in channels]
        yield opened  # and kept: a call ends when it is forgotten


@pytest.mark.parametrize("name", ["EmbedAll", "EmbedAllStream"])
def test_a_client_that_takes_nothing_is_cut_off_and_nothing_is_kept(monkeypatch, name):
    monkeypatch.setattr(calls.OpenCalls.__init__, "__kwdefaults__", {"look_seconds": 0.01})
    monkeypatch.setattr("hybridtei.server.http.connection.UNREAD_SECONDS", 0.2, raising=False)
    monkeypatch.setattr("hybridtei.rpc.calls.UNREAD_BYTES_PER_SECOND", 1e12, raising=False)
    with rpc_serving(WIDE) as rpc, unread(rpc, name, 2) as opened:
        assert [code_of_unread(call) for call in opened] == ["UNAVAILABLE"] * 2
        until(lambda: unsent(rpc.running) == 0)
        assert rpc.ask("Embed", {"inputs": "one"}).embeddings
        assert rpc.admission.free == 512


def code_of_unread(call: Any) -> str:
    until(lambda: not call.is_active())
    return call.code().name


@pytest.mark.parametrize("name", ["EmbedAll", "EmbedAllStream"])
def test_answers_that_nobody_takes_are_bounded_all_together(name):
    with rpc_serving(WIDE, server={"max_unsent_bytes": LIMIT}) as rpc:
        with unread(rpc, name, 12) as opened:
            until(lambda: any(not call.is_active() for call in opened))  # as much waits as may
            assert {call.code().name for call in opened if not call.is_active()} == {"RESOURCE_EXHAUSTED"}
            assert all("max-unsent-bytes" in call.details() for call in opened if not call.is_active())
            assert 0 < unsent(rpc.running) < LIMIT
            assert len(rpc.ask("Embed", {"inputs": "one"}).embeddings) == 8192  # a quarter is for what is small
        until(lambda: unsent(rpc.running) == 0)
        assert len(rpc.ask("EmbedAll", {"inputs": "one two"}).token_embeddings) > 0


def test_at_the_bound_no_call_is_begun_over_grpc_or_http():
    with rpc_serving(WIDE, server={"max_unsent_bytes": 1}) as rpc:
        with unread(rpc, "EmbedAll", 1):
            until(lambda: unsent(rpc.running) > 1)
            before = rpc.running.backend.forwards
            for name in ("Embed", "EmbedStream"):
                given = {"inputs": "one"}
                code, details = rpc.refusal(name, [given] if name.endswith("Stream") else given)
                assert code == "RESOURCE_EXHAUSTED"
                assert "1 are allowed (max-unsent-bytes): try again later" in details
            assert rpc.running.post("/embed", {"inputs": "one"}).status_code == 503
            assert rpc.running.backend.forwards == before
        until(lambda: unsent(rpc.running) == 0)
        assert rpc.ask("Embed", {"inputs": "one"}).embeddings


def test_an_answer_that_waits_for_room_is_given_when_others_leave():
    with rpc_serving(WIDE, server={"max_unsent_bytes": 24_000_000}) as rpc:
        with unread(rpc, "EmbedAll", 1):
            until(lambda: unsent(rpc.running) > 10_000_000)
            waiting = start(rpc.channel, "EmbedAll", {"inputs": "one " * 100}, wait=False)
            assert rpc.ask("Embed", {"inputs": "one"}).embeddings
            assert not waiting.done()
        assert len(waiting.result(HANG).token_embeddings) >= 100


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
def test_the_connection_of_one_peer_is_closed_and_no_other(family):
    from hybridtei.rpc.calls import close_connection

    host = "127.0.0.1" if family == socket.AF_INET else "::1"
    with socket.create_server((host, 0), family=family) as listening, ExitStack() as stack:
        clients = [stack.enter_context(socket.create_connection(listening.getsockname()[:2], timeout=HANG)) for _ in range(3)]
        accepted = [stack.enter_context(listening.accept()[0]) for _ in clients]
        port = clients[1].getsockname()[1]
        close_connection(f"ipv4:{host}:{port}" if family == socket.AF_INET else f"ipv6:%5B{host}%5D:{port}")
        assert clients[1].recv(1) == b""
        for place in (0, 2):
            accepted[place].sendall(b"x")
            assert clients[place].recv(1) == b"x"
