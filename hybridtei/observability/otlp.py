"""Spans to an OTLP collector over gRPC, in batches, by a thread of their own: one that is down holds up no request.

Spans are written down when they are over, so those that run are unknown to the SDK, which would charge each start and each
attribute tens of microseconds. Its batches, resource, propagation and environment variables (OTEL_*) are used as they are.
"""

from __future__ import annotations

import asyncio
import importlib.util
import random
import threading
from dataclasses import dataclass
from time import perf_counter_ns, time_ns
from typing import Any
from urllib.parse import urlsplit

from hybridtei.errors import HybridTeiError, LoadError
from hybridtei.observability.spans import Span

CLOSE_SECONDS = 3.0  # for the last batch
MESSAGE_MOST = 1000  # characters of an error


def require() -> None:
    """Raises LoadError if what sends traces is not installed."""
    try:
        found = importlib.util.find_spec("opentelemetry.exporter.otlp.proto.grpc")
    except ModuleNotFoundError:
        found = None
    if found is None:
        raise LoadError("--otlp-endpoint wants an extra that is not installed: pip install 'hybridtei[otlp]'")


@dataclass(frozen=True, slots=True)
class _Identity:
    """A span's place among others: contexts of the SDK's."""

    context: Any
    parent: Any
    is_outermost: bool


class OtlpRecorder:
    """A `tracing.Recorder`. Every span is kept, whatever the caller says of sampling."""

    def __init__(self, endpoint: str, service_name: str) -> None:
        """`endpoint`: a URL; without a scheme it is taken as http. Raises LoadError."""
        require()
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import SERVICE_NAME, Resource
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.sdk.util.instrumentation import InstrumentationScope
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        address = endpoint if "://" in endpoint else f"http://{endpoint}"
        self._resource = Resource.create({SERVICE_NAME: service_name})
        self._scope = InstrumentationScope("hybridtei")
        self._propagator = TraceContextTextMapPropagator()
        self._exporter = OTLPSpanExporter(endpoint=address, insecure=urlsplit(address).scheme != "https")
        self._batches = BatchSpanProcessor(self._exporter)
        self._random = random.Random()

    def begin(self, span: Span, headers: dict[str, str]) -> None:
        """Its ids, and its parent: the span around it, or the caller's."""
        from opentelemetry import trace

        outer: _Identity | None = None if span.outer is None else span.outer.identity
        if outer is not None:
            parent = outer.context
        elif headers:
            parent = trace.get_current_span(self._propagator.extract(headers)).get_span_context()
        else:
            parent = None
        is_child = parent is not None and parent.is_valid
        context = trace.SpanContext(
            parent.trace_id if is_child else self._random.getrandbits(128) or 1,
            self._random.getrandbits(64) or 1,
            is_remote=False,
            trace_flags=trace.TraceFlags(trace.TraceFlags.SAMPLED),
            trace_state=parent.trace_state if is_child else None,
        )
        span.identity = _Identity(context, parent if is_child else None, outer is None)

    def end(self, span: Span, error: BaseException | None) -> None:
        """Keep it for the next batch."""
        from opentelemetry.sdk.trace import ReadableSpan
        from opentelemetry.trace import SpanKind, Status, StatusCode

        identity: _Identity = span.identity
        now_ns = time_ns()
        self._batches.on_end(
            ReadableSpan(
                span.name,
                identity.context,
                identity.parent,
                self._resource,
                span.fields(),
                kind=SpanKind.SERVER if identity.is_outermost else SpanKind.INTERNAL,
                status=Status(StatusCode.UNSET) if error is None else Status(StatusCode.ERROR, _told(error)),
                start_time=now_ns - (perf_counter_ns() - span.began_ns),
                end_time=now_ns,
                instrumentation_scope=self._scope,
            )
        )

    async def close(self) -> None:
        """Send what waits, if the collector takes it within about `CLOSE_SECONDS`."""
        last = threading.Thread(target=self._batches.shutdown, name="otlp-close", daemon=True)
        last.start()
        await asyncio.to_thread(last.join, CLOSE_SECONDS)
        if last.is_alive():
            self._exporter.shutdown()  # or it would try for as long as it likes


def recorder_for(endpoint: str | None, service_name: str) -> OtlpRecorder | None:
    """None without an endpoint. Raises LoadError."""
    return None if endpoint is None else OtlpRecorder(endpoint, service_name)


def _told(error: BaseException) -> str:
    return str(error)[:MESSAGE_MOST] if isinstance(error, HybridTeiError) else type(error).__name__
