"""Spans for log lines and traces: a handler's work on one request, its times, and the enclosing
handler.

`CURRENT` is the current request's span. It is a context variable, since each request runs in its
own task, and so the log does not depend on the server. If a collector is configured,
OpenTelemetry's SDK exports the same spans.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Coroutine, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from time import time
from typing import TYPE_CHECKING, Any, Self, TypeVar
from urllib.parse import urlsplit

from hybridtei.errors import HybridTeiError, LoadError
from hybridtei.outputs import Timings
from hybridtei.system.machine import install_command

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer

# For the last batch
CLOSE_SECONDS = 3.0
# Characters of an error
MAX_MESSAGE_CHARACTERS = 1000
SECOND_NS, MILLISECOND_NS, MICROSECOND_NS = 1_000_000_000, 1_000_000, 1_000

log = logging.getLogger(__name__)

T = TypeVar("T")

CALLER: ContextVar[str | None] = ContextVar("hybridtei.caller", default=None)


@dataclass(slots=True, eq=False)
class HandlerSpan:
    """One handler's work on one request: a context manager around it.

    As in TEI, a success is logged if the engine has answered. After a failure the span stays
    current, so that the error's log line has it. `timings` and `total_ns` are set when the engine
    has answered. `caller`: the name of the request's API key, if it has one.
    """

    name: str
    outer: HandlerSpan | None = None
    ended: bool = False
    timings: Timings | None = None
    total_ns: int = 0
    caller: str | None = field(default_factory=CALLER.get)
    _export: AbstractContextManager[None] | None = None

    def __enter__(self) -> Self:
        outer, tracer = CURRENT.get(), TRACER.get()
        self.outer = None if outer is None or outer.ended else outer
        CURRENT.set(self)
        if tracer is not None:
            self._export = _traced(self, tracer)
            self._export.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: Any
    ) -> None:
        self.ended = True
        if self._export is not None:
            self._export.__exit__(kind, error, trace)
        if error is not None:
            return
        if self.timings is not None and log.isEnabledFor(logging.INFO):
            # The line is logged after the answer is written
            asyncio.get_running_loop().call_soon(log.handle, _success())
        CURRENT.set(self.outer)

    def fields(self) -> dict[str, str]:
        """Return `caller`, which TEI lacks, then TEI's fields in its order; these only after the
        engine has answered."""
        fields: dict[str, str] = {}
        if self.caller is not None:
            fields["key"] = self.caller
        if self.timings is not None:
            fields["total_time"] = human(self.total_ns)
            for name in ("tokenization", "queue", "inference"):
                fields[f"{name}_time"] = human(getattr(self.timings, f"{name}_ns"))
        return fields

    def from_outermost(self) -> list[HandlerSpan]:
        """Return the enclosing spans, outermost first, and this one last."""
        if self.outer is None:
            return [self]
        return [*self.outer.from_outermost(), self]


CURRENT: ContextVar[HandlerSpan | None] = ContextVar("hybridtei.span", default=None)
TRACER: ContextVar[Tracer | None] = ContextVar("hybridtei.tracer", default=None)
NO_SPAN = nullcontext()


def span(name: str | None) -> AbstractContextManager[Any]:
    """A span of this name; without a name, no span."""
    return NO_SPAN if name is None else HandlerSpan(name)


def human(duration_ns: int) -> str:
    """Format a duration as Rust does, exactly and without trailing zeros: `1.5s`, `5.123ms`,
    `72.01µs`, `15ns`."""
    for unit_ns, digits, unit in (
        (SECOND_NS, 9, "s"),
        (MILLISECOND_NS, 6, "ms"),
        (MICROSECOND_NS, 3, "µs"),
    ):
        if duration_ns >= unit_ns:
            whole, rest = divmod(duration_ns, unit_ns)
            return f"{whole}.{rest:0{digits}}".rstrip("0").rstrip(".") + unit
    return f"{duration_ns}ns"


def arrived(recorder: Recorder | None, headers: Iterable[tuple[bytes, bytes]]) -> None:
    """Trace the current task's request as a child of the span in `headers` (lower-case names). Call
    it before the handler."""
    if recorder is not None:
        from opentelemetry import context, propagate

        TRACER.set(recorder.tracer)
        context.attach(
            propagate.extract(
                {name.decode("latin-1"): value.decode("latin-1") for name, value in headers}
            )
        )


async def spanned(name: str, work: Coroutine[Any, Any, T]) -> T:
    """Run `work` in a span of this name, where `serve` opens none."""
    with HandlerSpan(name):
        return await work


def _success() -> logging.LogRecord:
    """Log an answered request, with a fixed place in the code: finding it for each line takes
    longer than the writing."""
    record = logging.LogRecord.__new__(logging.LogRecord)
    record.__dict__.update(SUCCESS.__dict__, created=time())
    return record


SUCCESS = log.makeRecord(
    log.name, logging.INFO, __file__, _success.__code__.co_firstlineno, "Success", (), None
)


@contextmanager
def _traced(span: HandlerSpan, tracer: Tracer) -> Iterator[None]:
    """Export the enclosed work with the span's fields. For an error: a HybridTeiError's message,
    any other error's class."""
    from opentelemetry.trace import SpanKind, StatusCode

    kind = SpanKind.SERVER if span.outer is None else SpanKind.INTERNAL
    with tracer.start_as_current_span(
        span.name, kind=kind, record_exception=False, set_status_on_exception=False
    ) as traced:
        try:
            yield
        except BaseException as error:
            is_known = isinstance(error, HybridTeiError)
            traced.set_status(
                StatusCode.ERROR,
                str(error)[:MAX_MESSAGE_CHARACTERS] if is_known else type(error).__name__,
            )
            raise
        finally:
            traced.set_attributes(span.fields())


def require() -> None:
    """Raises LoadError if OpenTelemetry's exporter is not installed."""
    try:
        from opentelemetry.exporter.otlp.proto.grpc import trace_exporter  # noqa: F401
    except ImportError:
        raise LoadError(
            f"--otlp-endpoint needs an extra that is not installed: {install_command('otlp')}"
        ) from None


class Recorder:
    """OpenTelemetry's tracer. It sends spans to a collector in batches: those that
    OTEL_TRACES_SAMPLER selects, by default all but those of a caller whose trace is not sampled."""

    def __init__(self, endpoint: str, service_name: str) -> None:
        """`endpoint`: a URL; the default scheme is http. Raises LoadError."""
        require()
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import SERVICE_NAME, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        address = endpoint if "://" in endpoint else f"http://{endpoint}"
        self._exporter = OTLPSpanExporter(
            endpoint=address, insecure=urlsplit(address).scheme != "https"
        )
        resource = Resource.create({SERVICE_NAME: service_name})
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(self._exporter))
        self.tracer = self._provider.get_tracer("hybridtei")

    async def close(self) -> None:
        """Send the queued spans, within about `CLOSE_SECONDS`."""
        last = threading.Thread(target=self._provider.shutdown, name="otlp-close", daemon=True)
        last.start()
        await asyncio.to_thread(last.join, CLOSE_SECONDS)
        if last.is_alive():
            # Otherwise the exporter retries for half a minute
            self._exporter.shutdown()
