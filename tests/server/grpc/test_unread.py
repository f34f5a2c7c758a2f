"""Clients that take none of their answers: flow control and `--max-unsent-bytes` bound the memory
of all of them."""

import itertools
import threading
from contextlib import ExitStack, contextmanager

import grpc
import pytest

from hybridtei.server.grpc import messages
from tests.inference.engine import small
from tests.resident import resident
from tests.server.grpc.live import method_of, rpc_serving, start
from tests.server.http.test_unsent import unsent
from tests.server.live import HANG, Hold, until

WIDE = small.model_spec(hidden_size=8192, max_input_length=512)
# An answer of some 16 MB, of which a kernel takes a part
TEXT = "one two three " * 160
LIMIT = 64_000_000
# Or channels would share a connection
OWN = [
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.max_receive_message_length", -1),
]
# Messages of a stream, or calls of a connection
AS_MANY = 100


@contextmanager
def unread(rpc, name, clients, messages_of_each=AS_MANY, text=TEXT):
    """Calls that ask for much, on a connection for each client. It takes nothing: answers are taken
    by iterating over them."""
    method = method_of(name)
    body = messages.message(method.input_type.name)(inputs=text).SerializeToString()
    path = f"/{method.containing_service.full_name}/{name}"
    over = threading.Event()
    in_a_call, calls = (messages_of_each, 1) if method.client_streaming else (1, messages_of_each)

    def asks():
        yield from itertools.repeat(body, in_a_call)
        over.wait(HANG)

    with ExitStack() as stack:
        stack.callback(over.set)
        channels = [
            stack.enter_context(grpc.insecure_channel(rpc.address, options=OWN))
            for _ in range(clients)
        ]
        opened = [
            channel.stream_stream(path)(asks(), timeout=HANG)
            for channel in channels
            for _ in range(calls)
        ]
        # And kept: a call ends when it is forgotten
        yield opened


def ended(opened):
    return [call for call in opened if not call.is_active()]


@pytest.mark.parametrize(("name", "clients"), [("EmbedAll", 1), ("EmbedAllStream", 12)])
def test_the_memory_for_answers_that_no_client_takes_is_bounded(name, clients):
    """Each of them is asked for some 1.6 GB."""
    with rpc_serving(WIDE, server={"max_unsent_bytes": LIMIT}) as rpc:
        before = resident()
        with unread(rpc, name, clients) as opened:
            # As much waits as may
            until(lambda: ended(opened))
            assert {call.code().name for call in ended(opened)} == {"RESOURCE_EXHAUSTED"}
            assert all("max-unsent-bytes" in call.details() for call in ended(opened))
            # What was begun is answered
            until(lambda: unsent(rpc.running) > LIMIT // 3 and rpc.admission.free == 512)
            assert 0 < unsent(rpc.running) < LIMIT
            # An answer is copied on its way, and the client has buffers too
            assert resident() - before < 6 * LIMIT
            # A quarter is for what is small
            assert len(rpc.ask("Embed", {"inputs": "one"}).embeddings) == 8192
            # HTTP has its own bound
            assert rpc.running.post("/embed_all", {"inputs": TEXT[:1500]}).status_code == 200
        until(lambda: unsent(rpc.running) == 0)
        assert len(rpc.ask("EmbedAll", {"inputs": "one two"}).token_embeddings) > 0


def test_one_stream_whose_client_takes_nothing_leaves_room_to_others():
    with (
        rpc_serving(WIDE, server={"max_unsent_bytes": LIMIT}) as rpc,
        unread(rpc, "EmbedAllStream", 1) as opened,
    ):
        until(lambda: unsent(rpc.running) >= 16_000_000)
        for _ in range(20):
            assert len(rpc.ask("EmbedAll", {"inputs": "one two"}).token_embeddings) > 0
        assert unsent(rpc.running) < LIMIT // 2
        assert not ended(opened)


def test_small_answers_of_a_stream_are_counted_before_they_are_there():
    """Else it would begin as many as there are permits: 384 of 160 kB."""
    hold = Hold()
    with (
        rpc_serving(WIDE, gate=hold) as rpc,
        unread(rpc, "EmbedAllStream", 1, 400, "one two three"),
    ):
        until(lambda: unsent(rpc.running) >= 16_000_000)
        assert rpc.admission.free > 400
        hold.let_go()
        until(lambda: rpc.admission.free == 512)
        assert unsent(rpc.running) < 17_000_000


def test_at_the_bound_no_call_is_begun():
    with rpc_serving(WIDE, server={"max_unsent_bytes": 1}) as rpc:
        with unread(rpc, "EmbedAll", 1, 1):
            until(lambda: unsent(rpc.running) > 1)
            before = rpc.running.backend.forwards
            for name in ("Embed", "EmbedStream"):
                given = {"inputs": "one"}
                code, details = rpc.refusal(name, [given] if name.endswith("Stream") else given)
                assert code == "RESOURCE_EXHAUSTED"
                assert "1 are allowed (max-unsent-bytes): try again later" in details
            assert rpc.running.backend.forwards == before
        until(lambda: unsent(rpc.running) == 0)
        assert rpc.ask("Embed", {"inputs": "one"}).embeddings


def test_an_answer_that_waits_for_room_is_given_when_others_leave():
    with rpc_serving(WIDE, server={"max_unsent_bytes": 24_000_000}) as rpc:
        with unread(rpc, "EmbedAll", 1, 1):
            until(lambda: unsent(rpc.running) > 10_000_000)
            waiting = start(rpc.channel, "EmbedAll", {"inputs": "one " * 100}, wait=False)
            assert rpc.ask("Embed", {"inputs": "one"}).embeddings
            assert not waiting.done()
        assert len(waiting.result(HANG).token_embeddings) >= 100
