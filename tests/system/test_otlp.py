"""Traces at a real collector: a gRPC server that keeps what it is sent."""

import argparse
import asyncio
import socket
import threading
from concurrent import futures
from contextlib import contextmanager

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

from hybridtei.cli.serve import with_opentelemetry
from hybridtei.config import ServerConfig
from hybridtei.system import tracing
from hybridtei.system.tracing import HandlerSpan, Recorder, arrived
from tests.server.live import HANG, serving

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
TIMES = {"total_time", "tokenization_time", "queue_time", "inference_time"}


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    def __init__(self):
        self.requests = []

    def Export(self, request, context):
        self.requests.append(request)
        return trace_service_pb2.ExportTraceServiceResponse()

    def resources(self):
        return [resource for request in self.requests for resource in request.resource_spans]

    def spans(self):
        scopes = [scope for resource in self.resources() for scope in resource.scope_spans]
        return [span for scope in scopes for span in scope.spans]

    def services(self):
        return {
            attribute.value.string_value
            for resource in self.resources()
            for attribute in resource.resource.attributes
            if attribute.key == "service.name"
        }


@contextmanager
def collecting():
    """Its endpoint, and what it got."""
    server = grpc.server(futures.ThreadPoolExecutor(2))
    collector = Collector()
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}", collector
    server.stop(0).wait(HANG)


def traced(*requests, scheme="http://", **settings):
    """What a collector got by the time the server has stopped."""
    with collecting() as (address, collector):
        with serving(server={"otlp_endpoint": f"{scheme}{address}", **settings}) as running:
            for path, body, headers in requests:
                running.post(path, body, headers={"content-type": "application/json", **headers})
        return collector


def parent(version="00", flags="01"):
    return {"traceparent": f"{version}-{TRACE}-{PARENT}-{flags}", "tracestate": "vendor=1"}


@pytest.mark.parametrize(
    ("scheme", "settings", "name"),
    [
        ("http://", {}, "text-embeddings-inference.server"),
        ("", {"otlp_service_name": "mine"}, "mine"),
    ],
)
def test_a_request_is_a_span_with_its_times(scheme, settings, name):
    collector = traced(("/embed", {"inputs": "one"}, {}), scheme=scheme, **settings)
    (span,) = collector.spans()
    assert span.name == "embed"
    assert span.parent_span_id == b""
    assert (len(span.trace_id), len(span.span_id)) == (16, 8)
    assert span.end_time_unix_nano > span.start_time_unix_nano > 1_700_000_000 * 10**9
    assert {attribute.key for attribute in span.attributes} == TIMES
    assert all(attribute.value.string_value.endswith("s") for attribute in span.attributes)
    assert collector.services() == {name}


BY_SAMPLER = [(None, ["01"]), ("always_on", ["01", "00"]), ("always_off", [])]


@pytest.mark.parametrize(("sampler", "kept"), BY_SAMPLER)
def test_the_callers_span_is_the_parent_and_the_sampler_decides(monkeypatch, sampler, kept):
    """By default an unsampled trace of a caller is not exported."""
    if sampler is not None:
        monkeypatch.setenv("OTEL_TRACES_SAMPLER", sampler)
    spans = traced(
        *(("/v1/embeddings", {"input": "one"}, parent(flags=flags)) for flags in ("01", "00"))
    ).spans()
    for span in spans:
        assert (span.name, span.trace_id.hex(), span.parent_span_id.hex()) == (
            "openai_embed",
            TRACE,
            PARENT,
        )
        assert span.trace_state == "vendor=1"
    assert len(spans) == len(kept)


ENDPOINT, SERVICE = "OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_SERVICE_NAME"


@pytest.mark.parametrize(
    ("environment", "flags", "endpoint", "name"),
    [
        ({}, {}, None, None),
        ({ENDPOINT: "http://c:4317", SERVICE: "mine"}, {}, "http://c:4317", "mine"),
        (
            {ENDPOINT: "http://c:1", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://traces:1"},
            {},
            "http://traces:1",
            None,
        ),
        (
            {ENDPOINT: "http://c:1", SERVICE: "mine"},
            {"otlp_endpoint": "http://own:1", "otlp_service_name": "own"},
            "http://own:1",
            "own",
        ),
    ],
)
def test_opentelemetrys_variables_stand_behind_our_own(environment, flags, endpoint, name):
    given = ServerConfig(**flags)
    found, warnings = with_opentelemetry(given, argparse.Namespace(**flags), environment)
    assert found.otlp_endpoint == endpoint
    assert found.otlp_service_name == (name or ServerConfig().otlp_service_name)
    assert not warnings


def test_another_protocol_is_told():
    other = {ENDPOINT: "http://c:4318", "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"}
    found, (line,) = with_opentelemetry(ServerConfig(), argparse.Namespace(), other)
    assert found.otlp_endpoint is None
    assert "this server sends traces by gRPC, not by http/protobuf" in line


NO_PARENTS = (
    "",
    "nonsense",
    f"ff-{TRACE}-{PARENT}-01",
    f"00-{'0' * 32}-{PARENT}-01",
    f"00-{TRACE}-{'0' * 16}-01",
    "00-é-é-01",
)


def test_what_is_no_parent_is_none():
    headers = [{"traceparent": header.encode("latin-1")} for header in NO_PARENTS]
    spans = traced(*(("/embed", {"inputs": "one"}, one) for one in headers)).spans()
    assert len(spans) == len(NO_PARENTS)
    assert all(span.parent_span_id == b"" and span.trace_id.hex() != TRACE for span in spans)


def test_failures_and_spans_within_spans():
    body = {"instances": [{"inputs": "one"}, {"inputs": "two"}]}
    collector = traced(
        ("/vertex", body, parent()), ("/embed", {"inputs": ""}, {}), ("/embed", b"{", {})
    )
    spans = collector.spans()
    assert sorted(span.name for span in spans) == [*["embed"] * 3, "vertex_compatibility"]
    outer = next(span for span in spans if span.name == "vertex_compatibility")
    assert outer.parent_span_id.hex() == PARENT
    within = [span for span in spans if span.parent_span_id == outer.span_id]
    assert [span.trace_id for span in within] == [outer.trace_id] * 2
    (failed,) = [span for span in spans if span.status.code == 2]
    assert failed.parent_span_id == b""
    assert failed.status.message
    assert not failed.attributes


def test_several_batches_arrive_whole():
    collector = traced(*[("/embed", {"inputs": "one"}, {})] * 600)
    spans = collector.spans()
    assert len({span.span_id for span in spans}) == 600


def closed_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def test_a_collector_that_is_down_holds_up_no_request(monkeypatch):
    monkeypatch.setattr(tracing, "CLOSE_SECONDS", 0.2)
    with serving(server={"otlp_endpoint": f"http://127.0.0.1:{closed_port()}"}) as running:
        assert {running.post("/embed", {"inputs": "one"}).status_code for _ in range(20)} == {200}
        running.is_well()
    assert not any(
        thread.name == "otlp-close" and not thread.daemon for thread in threading.enumerate()
    )


async def slow():
    with HandlerSpan("slow"):
        await asyncio.Event().wait()


async def cancelled(address):
    """A handler's work that is cancelled, and the end of its recorder."""
    recorder = Recorder(address, "x")
    arrived(recorder, [])
    task = asyncio.create_task(slow())
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await asyncio.wait_for(recorder.close(), HANG)


def test_cancelled_work_is_a_span_too():
    with collecting() as (address, collector):
        asyncio.run(cancelled(address))
    (span,) = collector.spans()
    assert (span.name, span.status.code, span.status.message) == ("slow", 2, "CancelledError")


def test_a_collector_that_never_answers_does_not_keep_the_server(monkeypatch):
    monkeypatch.setattr(tracing, "CLOSE_SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        asyncio.run(cancelled(f"http://127.0.0.1:{silent.getsockname()[1]}"))
        silent.settimeout(HANG)
        # It was asked
        silent.accept()[0].close()
