"""Run a handler's work, cancel it when its client disconnects, and send its reply as JSON."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, Generic, TypeVar

from litestar import Response
from litestar.types import ASGIApp

from hybridtei.engine.service import BYTES_PER_NUMBER
from hybridtei.server.context import OFFLOAD_NUMBERS, Context, Reply, headers_of
from hybridtei.server.http.connection import DISCONNECT, SMALL_BYTES, ClientDisconnected, Disconnect, Unsent
from hybridtei.server.http.writers import piecewise, to_json
from hybridtei.server.routing import ENDPOINT, Endpoint

T = TypeVar("T")

SLICE_BYTES = 262_144
MODEL = "hybridtei.model"  # in a scope: the context that answers
JSON = (b"content-type", b"application/json")


class Answer(Response[T], Generic[T]):
    """A response of type `T` as JSON: of a reply, or of the work that makes one. It waits for room among the server's unsent
    bytes."""

    def __init__(self, work: Reply | Coroutine[Any, Any, Reply]) -> None:
        self._work = work

    def to_asgi_response(self, *args: Any, **kwargs: Any) -> ASGIApp:  # type: ignore[override]
        """Called by Litestar: what sends the answer."""
        return self._respond

    async def _respond(self, scope: Any, receive: Any, send: Any) -> None:
        """200, with timing headers if a model ran. Raises what the work raises, AnswersUnsent, ClientDisconnected."""
        endpoint: Endpoint = scope["route_handler"].opt[ENDPOINT]
        work = self._work
        del self._work  # the reply's arrays are freed once they are encoded
        if isinstance(work, Reply):
            reply = work
        else:
            reply = await (asyncio.shield(work) if endpoint.outlives_client else while_connected(scope, work))
        model: Context | None = scope.get(MODEL)
        fingerprint = None if model is None or endpoint.is_tei else model.fingerprint_header
        unsent: Unsent = scope["app"].state.unsent
        estimate = reply.numbers * BYTES_PER_NUMBER
        reserved = 0 if estimate <= SMALL_BYTES else await while_connected(scope, unsent.room(estimate))
        try:
            is_large = reply.numbers > OFFLOAD_NUMBERS
            body = await asyncio.to_thread(piecewise, reply.answer) if is_large else to_json(reply.answer)
            unsent.add(len(body))
        finally:
            unsent.add(-reserved)
        timing = [] if reply.usage is None else headers_of(reply.usage)
        identity = [] if fingerprint is None else [fingerprint]
        headers = [*identity, *reply.headers, *timing, JSON, (b"content-length", b"%d" % len(body))]
        del reply, work
        try:
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await _send_body(b"" if scope["method"] == "HEAD" else body, send)
        finally:
            unsent.add(-len(body))


async def _send_body(body: bytes, send: Any) -> None:
    """A large body slice by slice: `send` waits until the system took the slice before, so that no second copy is kept."""
    rest: Any = body
    if len(body) > SLICE_BYTES:
        rest = memoryview(body)
        while len(rest) > SLICE_BYTES:
            await send({"type": "http.response.body", "body": rest[:SLICE_BYTES], "more_body": True})
            await asyncio.sleep(0)  # a client that reads fast would keep all others waiting
            rest = rest[SLICE_BYTES:]
    await send({"type": "http.response.body", "body": rest, "more_body": False})


async def while_connected(scope: Any, work: Coroutine[Any, Any, T]) -> T:
    """Run `work`, and cancel it if the client disconnects first. Raises ClientDisconnected then.

    ASGI servers report a disconnect in `receive` only, for which each request would need a task of its own; our protocol puts
    it into the scope. Under another server the work goes on.
    """
    disconnect: Disconnect | None = (scope.get("extensions") or {}).get(DISCONNECT)
    if disconnect is None:
        return await work
    running = asyncio.current_task()
    assert running is not None
    disconnect.on_disconnect = running.cancel
    try:
        return await work
    except asyncio.CancelledError:
        if not disconnect.happened:
            raise
        running.uncancel()
        raise ClientDisconnected from None
    finally:
        disconnect.on_disconnect = None
