"""Which calls may be open: idle calls lock no client out, and a call that its client leaves open
ends."""

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import get_args

import grpc
import pytest
from google.protobuf.message import DecodeError
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2

from hybridtei import errors
from hybridtei.errors import ErrorType
from hybridtei.server.grpc import calls, messages, server
from hybridtei.server.grpc.server import REFLECTIONS
from tests.resident import leaving
from tests.server.conftest import labelled
from tests.server.grpc.live import rpc_serving, start
from tests.server.live import HANG, Hold, until

KEY = (("authorization", "Bearer secret"),)
WATCH = health_pb2.HealthCheckRequest(service="tei.v1.Info")
SERVING = health_pb2.HealthCheckResponse.SERVING
INVALID, PRECONDITION = grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.FAILED_PRECONDITION


class Silent:
    """Requests of a client that says what it is given, and then nothing until it is let go."""

    def __init__(self):
        self.let_go = threading.Event()

    def after(self, *said):
        yield from said
        self.let_go.wait(HANG)


@contextmanager
def silent():
    one = Silent()
    try:
        yield one
    finally:
        one.let_go.set()


def code_of(call):
    """Of a stream, after its answers."""
    with pytest.raises(grpc.RpcError) as caught:
        for _ in call:
            pass
    # The client's own
    assert caught.value.details() != "Deadline Exceeded"
    return caught.value.code().name


def headers_only(channel, path, one, **settings):
    """A call of a single method whose client never sends its message."""
    return channel.stream_stream(path)(one.after(), timeout=HANG, **settings)


def reflecting(channel, one, service=REFLECTIONS[0]):
    """A reflection call that was answered once, and is left open."""
    path, parse = (
        f"/{service}/ServerReflectionInfo",
        reflection_pb2.ServerReflectionResponse.FromString,
    )
    ask = channel.stream_stream(
        path, reflection_pb2.ServerReflectionRequest.SerializeToString, parse
    )
    answers = ask(one.after(reflection_pb2.ServerReflectionRequest(list_services="")), timeout=HANG)
    assert {named.name for named in next(answers).list_services_response.service} >= {
        *REFLECTIONS,
        "tei.v1.Embed",
    }
    return answers


def watching(channel):
    answers = health_pb2_grpc.HealthStub(channel).Watch(WATCH, timeout=HANG)
    assert next(answers).status == SERVING
    return answers


def is_serving(rpc):
    return health_pb2_grpc.HealthStub(rpc.channel).Check(WATCH, timeout=HANG).status == SERVING


def test_idle_calls_without_a_key_lock_no_client_out(monkeypatch):
    monkeypatch.setattr(calls, "MAX_CALLS", 4)
    monkeypatch.setattr(calls, "MAX_KEYLESS_CALLS", 4)
    with (
        rpc_serving(server={"api_key": "secret"}) as rpc,
        silent() as one,
        grpc.insecure_channel(rpc.address) as channel,
    ):
        refused = [start(channel, "EmbedStream", one.after()) for _ in range(8)]
        refused += [headers_only(channel, "/tei.v1.Embed/Embed", one) for _ in range(8)]
        opened = [
            *(reflecting(channel, one, name) for name in REFLECTIONS),
            *(watching(channel) for _ in range(4)),
        ]
        opened += [headers_only(channel, "/grpc.health.v1.Health/Check", one) for _ in range(8)]
        assert {code_of(call) for call in refused} == {"UNAUTHENTICATED"}
        assert rpc.ask("Embed", {"inputs": "one"}, metadata=KEY).embeddings
        assert len(rpc.ask("EmbedStream", [{"inputs": "one"}] * 3, metadata=KEY)) == 3
        assert is_serving(rpc)
        assert reflecting(rpc.channel, one)
        assert {code_of(call) for call in opened[:2]} == {"RESOURCE_EXHAUSTED"}


def test_at_the_bound_the_call_ends_that_waited_longest_for_its_client(monkeypatch):
    monkeypatch.setattr(calls, "MAX_CALLS", 2)
    with rpc_serving() as rpc, silent() as one, grpc.insecure_channel(rpc.address) as channel:
        stream = start(channel, "EmbedStream", one.after({"inputs": "one"}))
        assert next(stream).embeddings
        later = start(channel, "EmbedStream", one.after({"inputs": "one"}))
        assert next(later).embeddings
        assert rpc.ask("Embed", {"inputs": "one"}).embeddings
        assert code_of(stream) == "RESOURCE_EXHAUSTED"
        assert rpc.ask("Embed", {"inputs": "one"}).embeddings
        assert later.is_active()
        one.let_go.set()
        # It ends as if nothing had been
        assert [*later] == []
        rpc.is_well()


def test_at_the_bound_no_call_ends_that_the_server_works_for(monkeypatch):
    monkeypatch.setattr(calls, "MAX_CALLS", 2)
    hold = Hold()
    with rpc_serving(gate=hold) as rpc, ThreadPoolExecutor(2) as pool:
        working = [pool.submit(rpc.ask, "Embed", {"inputs": text}) for text in ("one", "two")]
        until(lambda: rpc.admission.free == 510)
        assert rpc.refusal("Embed", {"inputs": "three"}) == (
            "RESOURCE_EXHAUSTED",
            "2 calls are open already",
        )
        hold.let_go()
        assert all(future.result(HANG).embeddings for future in working)
        rpc.is_well()


OPEN = {
    "before the first message": lambda channel, one: start(channel, "EmbedStream", one.after()),
    "between two": lambda channel, one: start(channel, "EmbedStream", one.after({"inputs": "one"})),
    "single": lambda channel, one: headers_only(channel, "/tei.v1.Embed/Embed", one),
    "rerank": lambda channel, one: headers_only(channel, "/tei.v1.Rerank/RerankStream", one),
    "health": lambda channel, one: headers_only(channel, "/grpc.health.v1.Health/Check", one),
    "watch": lambda channel, _: watching(channel),
    "reflection": reflecting,
}


@pytest.mark.parametrize("what", OPEN)
def test_a_call_that_its_client_leaves_open_ends(monkeypatch, what):
    monkeypatch.setattr(calls, "IDLE_SECONDS", 0.2)
    patience = HANG if what in ("between two", "watch", "reflection") else 0.2
    with (
        rpc_serving(server={"body_timeout": patience}) as rpc,
        silent() as one,
        grpc.insecure_channel(rpc.address) as channel,
    ):
        assert code_of(OPEN[what](channel, one)) == "DEADLINE_EXCEEDED"
        assert rpc.ask("Embed", {"inputs": "one"}).embeddings
        rpc.is_well()


def test_connections_are_bounded():
    # Or channels would share a connection
    options = [("grpc.use_local_subchannel_pool", 1)]
    with rpc_serving(server={"max_connections": 2}) as rpc:
        channels = [grpc.insecure_channel(rpc.address, options=options) for _ in range(3)]
        for channel in channels[:2]:
            assert start(channel, "Embed", {"inputs": "one"})[0].embeddings
        with pytest.raises(grpc.RpcError) as caught:
            start(channels[2], "Embed", {"inputs": "one"})
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        for channel in channels:
            channel.close()


def test_a_call_without_a_message_is_told_so(rpc):
    assert (
        code_of(rpc.channel.stream_stream("/tei.v1.Embed/Embed")(iter(()), timeout=HANG))
        == "INTERNAL"
    )
    rpc.is_well()


def test_few_streams_to_rerank_are_read_at_a_time():
    text = {"query": "one", "text": "two"}
    with (
        rpc_serving(labelled("LABEL_0"), engine={"max_concurrent_requests": 16}) as rpc,
        silent() as one,
        ThreadPoolExecutor(1) as pool,
    ):
        first = pool.submit(rpc.ask, "RerankStream", one.after(text))
        until(lambda: rpc.running.service.gathering.free == 0)
        refusal = rpc.refusal("RerankStream", [text])
        assert refusal == ("RESOURCE_EXHAUSTED", "Model is overloaded")
        assert rpc.admission.free == 16
        one.let_go.set()
        assert len(first.result(HANG).ranks) == 1
        assert len(rpc.ask("RerankStream", [text] * 3).ranks) == 3


@pytest.mark.parametrize(
    ("error", "code", "details"),
    [
        (errors.EmptyInput("x"), INVALID, "Input validation error: x"),
        (errors.NoInputs("x"), INVALID, "x"),
        (errors.RequestRefused("x"), INVALID, "x"),
        (errors.TokenizerError("x"), PRECONDITION, "x"),
        (errors.UnsupportedHead("x"), PRECONDITION, "Backend error: x"),
        (errors.WrongModel("x"), PRECONDITION, "x"),
        (errors.Overloaded(), grpc.StatusCode.RESOURCE_EXHAUSTED, "Model is overloaded"),
        (errors.Unhealthy(), grpc.StatusCode.UNAVAILABLE, "unhealthy"),
        (errors.NotANumber(), PRECONDITION, "score is NaN"),
        (errors.UnknownModel("x"), grpc.StatusCode.NOT_FOUND, "x"),
        (errors.NoKey("x"), grpc.StatusCode.UNAUTHENTICATED, "x"),
        (
            errors.Ended(grpc.StatusCode.DEADLINE_EXCEEDED, "x"),
            grpc.StatusCode.DEADLINE_EXCEEDED,
            "x",
        ),
        (DecodeError("x"), grpc.StatusCode.INTERNAL, "x"),
        (KeyError("x"), grpc.StatusCode.INTERNAL, "internal error: KeyError"),
    ],
)
def test_status(error, code, details):
    assert calls.status_of(error) == (code, details)


def test_every_wire_name_of_http_has_a_code():
    assert {*get_args(ErrorType)} <= calls.CODES.keys()


@pytest.mark.parametrize("character", ["x", "%", "é", "深", "\U0001f600"])
def test_details_fit_into_the_trailers(rpc, monkeypatch, character):
    asked = {"inputs": "a", "prompt_name": character * 9000}
    assert character * 100 in rpc.refusal("Embed", asked)[1]
    monkeypatch.setattr(calls, "DETAIL_CHARACTERS", 80)
    code, details = rpc.refusal("Embed", asked)
    assert (code, len(details), details[-1]) == ("INVALID_ARGUMENT", 81, "…")


def test_a_refused_call_leaves_none_of_its_message(rpc):
    """A message of 3 MB takes 40 MB when it is decoded."""
    message = messages.message("PredictPairRequest")(inputs=["a"] * 1_000_000).SerializeToString()
    assert rpc.refusal("PredictPair", message)[0] != "INTERNAL"
    with leaving(60_000_000):
        for _ in range(4):
            rpc.refusal("PredictPair", message)


@pytest.mark.parametrize("name", ["Embed", "EmbedStream"])
def test_the_messages_of_all_calls_together_are_bounded(monkeypatch, name):
    monkeypatch.setattr(server, "MAX_INSIDE_BYTES", 1_000_000)
    hold = Hold()
    long = {"inputs": "one " * 100_000, "truncate": True}
    asked = [long] if name.endswith("Stream") else long
    with rpc_serving(gate=hold) as rpc, ThreadPoolExecutor(1) as pool:
        working = pool.submit(rpc.ask, name, asked)
        until(lambda: rpc.admission.free == 511)
        code, details = rpc.refusal(name, asked)
        assert (code, details[:30]) == ("RESOURCE_EXHAUSTED", "the messages of other calls ho")
        hold.let_go()
        assert working.result(HANG)
        # And each gives back what it has held
        assert rpc.ask(name, asked)
        rpc.is_well()
