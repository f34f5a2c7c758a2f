"""The one way from an HTTP request to an answer: read, decode, run while the client is there, respond."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from litestar import Request
from litestar.response.base import ASGIResponse

from hybridtei.server.body import ClientDisconnected, read_json
from hybridtei.server.context import Context, Reply

T = TypeVar("T")
Answer = Callable[[Context, T], Coroutine[Any, Any, Reply]]
AnyRequest = Request[Any, Any, Any]


async def serve(request: AnyRequest, kind: type[T], answer: Answer[T], *, type_required: bool = True) -> ASGIResponse:
    """Answer a POST with JSON. Errors are raised, and written by the handlers of `server.errors`."""
    context = context_of(request)
    wire = await read_json(request, kind, limit=context.server.payload_limit, type_required=type_required)
    reply = await while_connected(request, answer(context, wire))
    return json_response(reply)


def context_of(request: AnyRequest) -> Context:
    """The application's context."""
    return request.app.state.context  # type: ignore[no-any-return]


def json_response(reply: Reply) -> ASGIResponse:
    """200 with the reply, and its timing headers if it has any."""
    headers = reply.usage.headers() if reply.usage is not None else {}
    return ASGIResponse(body=reply.body, headers=headers, media_type="application/json", status_code=200)


async def while_connected(request: AnyRequest, work: Coroutine[Any, Any, T]) -> T:
    """Run `work`, and cancel it if the client goes away first. Raises ClientDisconnected then.

    ASGI servers tell of it only to whoever waits in `receive`, so a task of its own does.
    """
    running = asyncio.current_task()
    assert running is not None
    left = False

    async def watch() -> None:
        nonlocal left
        while (await request.receive())["type"] != "http.disconnect":
            pass
        left = True
        running.cancel()

    watcher = asyncio.create_task(watch())
    try:
        return await work
    except asyncio.CancelledError:
        if not left:
            raise
        running.uncancel()
        raise ClientDisconnected from None
    finally:
        watcher.cancel()
