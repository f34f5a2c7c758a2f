"""Spans for log lines and traces: a handler's work on one request, its times, and the handler around it.

`CURRENT` is the running request's span: each request runs in a task of its own, so a context variable holds it, and the log
reads it without knowing a server. `OtlpRecorder` exports spans where a collector is configured.
"""

from __future__ import annotations

import asyncio
import importlib.util
import logging
import random
import threading
from collections.abc import Callable, Coroutine, Iterable
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache, wraps
from time import perf_counter_ns, time, time_ns
from typing import Any, ParamSpec, Protocol, TypeVar
from urllib.parse import urlsplit

from hybridtei.errors import HybridTeiError, LoadError
from hybridtei.outputs import Timings
from hybridtei.system.machine import install_command

SECOND_NS, MILLISECOND_NS, MICROSECOND_NS = 1_000_000_000, 1_000_000, 1_000

CALLER: ContextVar[str | None] = ContextVar("hybridtei.caller", default=None)


@dataclass(slots=True, eq=False)
class Span:
    """One handler's work on one request.

    `timings` and `total_ns` are set once the engine has answered; `identity` belongs to the recorder; `caller` is the name of
    the request's API key, if keys have names.
    """

    name: str
    outer: Span | None = None
    began_ns: int = field(default_factory=perf_counter_ns)
    ended: bool = False
    timings: Timings | None = None
    total_ns: int = 0
    identity: Any = None
    caller: str | None = field(default_factory=CALLER.get)

    def computed(self, timings: Timings, total_ns: int) -> None:
        """Set the engine's times of the request."""
        self.timings, self.total_ns = timings, total_ns

    def fields(self) -> dict[str, str]:
        """Return TEI's fields in its order, none before the engine has answered; the caller's, which TEI lacks, comes first."""
        caller = {} if self.caller is None else {"key": self.caller}
        if self.timings is None:
            return caller
        return {
            **caller,
            "total_time": human(self.total_ns),
            "tokenization_time": human(self.timings.tokenization_ns),
            "queue_time": human(self.timings.queue_ns),
            "inference_time": human(self.timings.inference_ns),
        }

    def from_outermost(self) -> list[Span]:
        """Return the spans around this one, outermost first, and then itself."""
        chain = [self]
        while (outer := chain[-1].outer) is not None:
            chain.append(outer)
        return chain[::-1]


CURRENT: ContextVar[Span | None] = ContextVar("hybridtei.span", default=None)


def human(duration_ns: int) -> str:
    """Format a duration as Rust does: `1.5s`, `5.123ms`, `72.01µs`, `15ns`; exact, without trailing zeros."""
    for unit_ns, digits, unit in ((SECOND_NS, 9, "s"), (MILLISECOND_NS, 6, "ms"), (MICROSECOND_NS, 3, "µs")):
        if duration_ns >= unit_ns:
            whole, rest = divmod(duration_ns, unit_ns)
            return f"{whole}.{rest:0{digits}}".rstrip("0") + unit if rest else f"{whole}{unit}"
    return f"{duration_ns}ns"


log = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")
W = TypeVar("W", bound=Callable[..., Any])
Work = Callable[P, Coroutine[Any, Any, T]]

PROPAGATED = (b"traceparent", b"tracestate")  # W3C's headers


class Recorder(Protocol):
    """Records spans from begin to end."""

    def begin(self, span: Span, headers: dict[str, str]) -> None:
        """Give a span its identity; `headers`: the caller's, of which an outermost span is a child."""

    def end(self, span: Span, error: BaseException | None) -> None:
        """Record the end of a span, with its error if it failed."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """The recorder of a request's spans, and the headers that name its parent."""

    recorder: Recorder
    headers: dict[str, str]


ARRIVED: ContextVar[Arrival | None] = ContextVar("hybridtei.arrived", default=None)


def arrived(recorder: Recorder | None, headers: Iterable[tuple[bytes, bytes]]) -> None:
    """Set the recorder of the running task's request; call it before the handler. `headers`: names in lower case."""
    if recorder is not None:
        known = {name.decode(): value.decode("latin-1") for name, value in headers if name in PROPAGATED}
        ARRIVED.set(Arrival(recorder, known))


def handler(name: str) -> Callable[[Work[P, T]], Work[P, T]]:
    """Decorate a coroutine as a span of this name; log its success once the engine has answered, as TEI does.

    After a failure the span stays the current one, so that the error is logged within it.
    """

    def decorate(work: Work[P, T]) -> Work[P, T]:
        @wraps(work)
        async def spanned(*args: P.args, **kwargs: P.kwargs) -> T:
            outer, arrival = CURRENT.get(), ARRIVED.get()
            span = Span(name, None if outer is None or outer.ended else outer)
            if arrival is not None:
                arrival.recorder.begin(span, arrival.headers)
            CURRENT.set(span)
            failure: BaseException | None = None
            try:
                answer = await work(*args, **kwargs)
                if span.timings is not None and log.isEnabledFor(logging.INFO):
                    asyncio.get_running_loop().call_soon(log.handle, _success())  # once the answer is written
                CURRENT.set(span.outer)
                return answer
            except BaseException as error:
                failure = error
                raise
            finally:
                span.ended = True
                if arrival is not None:
                    arrival.recorder.end(span, failure)

        spanned.span_name = name  # type: ignore[attr-defined]
        return spanned

    return decorate


@cache
def _template() -> dict[str, Any]:
    return log.makeRecord(log.name, logging.INFO, *_PLACE, "Success", (), None, "handler").__dict__


def _success() -> logging.LogRecord:
    """The line of an answered request: to look for its place in the code each time would take longer than to write it."""
    record = logging.LogRecord.__new__(logging.LogRecord)
    record.__dict__.update(_template())
    record.created = time()
    return record


_PLACE = (__file__, handler.__code__.co_firstlineno)


def passes_on(work: W) -> W:
    """Decorate a coroutine that makes no span, since it passes the request to a handler that does."""
    work.span_name = None  # type: ignore[attr-defined]
    return work


def as_handler(work: Work[P, T]) -> Work[P, T]:
    """Return the coroutine as a span named after itself, unless it is decorated already."""
    return work if hasattr(work, "span_name") else handler(work.__name__)(work)


CLOSE_SECONDS = 3.0  # for the last batch
MAX_MESSAGE_CHARACTERS = 1000  # characters of an error


def require() -> None:
    """Raises LoadError if OpenTelemetry's exporter is not installed."""
    try:
        found = importlib.util.find_spec("opentelemetry.exporter.otlp.proto.grpc")
    except ModuleNotFoundError:
        found = None
    if found is None:
        raise LoadError(f"--otlp-endpoint needs an extra that is not installed: {install_command('otlp')}")


@dataclass(frozen=True, slots=True)
class _Identity:
    """A span's context and its parent's, as the SDK's `SpanContext`s."""

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
        """Give the span its ids and its parent: the span around it, or the caller's."""
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
        """Queue the span for the next batch."""
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
                status=Status(StatusCode.UNSET) if error is None else Status(StatusCode.ERROR, _message(error)),
                start_time=now_ns - (perf_counter_ns() - span.began_ns),
                end_time=now_ns,
                instrumentation_scope=self._scope,
            )
        )

    async def close(self) -> None:
        """Send the queued spans, within about `CLOSE_SECONDS`."""
        last = threading.Thread(target=self._batches.shutdown, name="otlp-close", daemon=True)
        last.start()
        await asyncio.to_thread(last.join, CLOSE_SECONDS)
        if last.is_alive():
            self._exporter.shutdown()  # or it would retry without end


def recorder_for(endpoint: str | None, service_name: str) -> OtlpRecorder | None:
    """Return None without an endpoint. Raises LoadError."""
    return None if endpoint is None else OtlpRecorder(endpoint, service_name)


def _message(error: BaseException) -> str:
    return str(error)[:MAX_MESSAGE_CHARACTERS] if isinstance(error, HybridTeiError) else type(error).__name__
