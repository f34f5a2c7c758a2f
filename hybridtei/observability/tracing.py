"""Handlers as spans: named as TEI names them, with the times of each stage, in the log and, where there is a collector, sent.

Knows no exporter: `otlp` is one. What arrives with a request for it (who records, and the caller's own span) lies in the
context, since handlers are asked by HTTP, by gRPC and by each other.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Coroutine, Iterable
from contextvars import ContextVar
from dataclasses import dataclass
from functools import wraps
from typing import Any, ParamSpec, Protocol, TypeVar

from hybridtei.observability.spans import CURRENT, Span

log = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")
W = TypeVar("W", bound=Callable[..., Any])
Work = Callable[P, Coroutine[Any, Any, T]]

PROPAGATED = (b"traceparent", b"tracestate")  # W3C's headers


class Recorder(Protocol):
    """Who keeps spans."""

    def begin(self, span: Span, headers: dict[str, str]) -> None:
        """Give a span its identity; `headers`: the caller's, of which an outermost span is a child."""

    def end(self, span: Span, error: BaseException | None) -> None:
        """A span is over, well or not."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """Who records a request's spans, and whose span it comes from."""

    recorder: Recorder
    headers: dict[str, str]


ARRIVED: ContextVar[Arrival | None] = ContextVar("hybridtei.arrived", default=None)


def arrived(recorder: Recorder | None, headers: Iterable[tuple[bytes, bytes]]) -> None:
    """To be called in a request's own task, before its handler. `headers`: names in lower case."""
    if recorder is not None:
        known = {name.decode(): value.decode("latin-1") for name, value in headers if name in PROPAGATED}
        ARRIVED.set(Arrival(recorder, known))


def handler(name: str) -> Callable[[Work[P, T]], Work[P, T]]:
    """A decorator: the coroutine is a span of this name; once it has been computed, the log says so, as TEI does.

    After a failure the span stays the current one, so that whoever tells of the error tells it within.
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
                if span.timings is not None:
                    log.info("Success")
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


def passes_on(work: W) -> W:
    """A decorator: the coroutine is no span of its own, since it hands the request on to a handler that is one."""
    work.span_name = None  # type: ignore[attr-defined]
    return work


def as_handler(work: Work[P, T]) -> Work[P, T]:
    """The same, as a span named after itself, unless it says otherwise."""
    return work if hasattr(work, "span_name") else handler(work.__name__)(work)
