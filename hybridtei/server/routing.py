"""The one way from an HTTP request to an answer: read, decode, run while the client is there, respond.

Routes that take JSON are ASGI applications inside the framework: it finds them and writes their errors. Its request, guard,
signature and response objects, which take longer than all that would be done with them here, are left out.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, TypeVar

from litestar import asgi
from litestar.handlers import ASGIRouteHandler
from litestar.response.base import ASGIResponse
from litestar.types import Receive, Scope, Send

from hybridtei.config import ServerConfig
from hybridtei.engine.service import BYTES_PER_NUMBER
from hybridtei.errors import KeyNeeded
from hybridtei.observability.tracing import arrived, as_handler
from hybridtei.server.context import OFFLOAD_NUMBERS, Context, Reply
from hybridtei.server.http.auth import check_key, door_of
from hybridtei.server.http.body import decode, model_name, read_plain
from hybridtei.server.http.content_coding import FORM, Form, wanted_form, written
from hybridtei.server.http.disconnect import DISCONNECT, ClientDisconnected, Disconnect
from hybridtei.server.http.edge import ALIAS
from hybridtei.server.http.limits import SMALL_BYTES, Unsent
from hybridtei.server.http.writers import piecewise
from hybridtei.server.observe import headers_of
from hybridtei.server.registry import ANY, Able, Models

COMPRESS_ASIDE_NUMBERS = 8_000  # of these, gzip takes two milliseconds

T = TypeVar("T")
Answer = Callable[[Context, T], Coroutine[Any, Any, Reply]]
Act = Callable[[Models, Context, T], Coroutine[Any, Any, Reply]]


def posted(
    path: str,
    kind: type[T],
    answer: Answer[T],
    *,
    job: Sequence[Able] = ANY,
    type_required: bool = True,
    errors: Mapping[Any, Any] | None = None,
) -> ASGIRouteHandler:
    """A route: POST with JSON of `kind` -> what `answer` says. Other methods never come here: the edge refuses them.

    `job`: which of several models is to answer where the request names none. What is raised here is written by the handlers of
    `server.errors`, or by `errors`, which are this route's own.
    """

    answer = as_handler(answer)

    async def handle(scope: Scope, receive: Receive, send: Send) -> None:
        models, server = models_of(scope), server_of(scope)
        check_key(scope, "infer")  # a guard would cost a copy of the route for each request
        unsent_of(scope).check()
        try:
            body = await read_from_who_stays(scope, receive, models, limit=server.payload_limit, type_required=type_required)
            wire = decode(body, kind)
            alias: str | None = scope.get(ALIAS)  # type: ignore[assignment]
            context = models.choose(alias, None if alias or models.is_one else model_name(body), job)
            if server.otlp_endpoint is not None:
                arrived(scope["app"].state.recorder, scope["headers"])
            FORM.set(form_of(scope))
            await respond(scope, await while_connected(scope, answer(context, wire)), send)
        except ClientDisconnected:
            if disconnect_of(scope) is None:
                raise
            # our protocol wants no answer for nobody, and making one takes longer than all the rest of it

    return asgi(path, copy_scope=False, exception_handlers=dict(errors or {}))(handle)


def managed(path: str, kind: type[T], act: Act[T], *, errors: Mapping[Any, Any]) -> ASGIRouteHandler:
    """A route that changes what is served: POST with JSON, only where there is an API key. A client's leaving stops nothing."""

    async def handle(scope: Scope, receive: Receive, send: Send) -> None:
        models, server = models_of(scope), server_of(scope)
        check_key(scope, "manage")
        if door_of(scope).keys.is_open:
            raise KeyNeeded
        body = await read_plain(scope, receive, limit=server.payload_limit, type_required=False)
        reply = await asyncio.shield(act(models, models.default, decode(body, kind)))
        await respond(scope, reply, send)

    return asgi(path, copy_scope=False, exception_handlers=dict(errors))(handle)


def unsent_of(scope: Any) -> Unsent:
    """The application's answers that wait for their clients."""
    return scope["app"].state.unsent  # type: ignore[no-any-return]


def models_of(scope: Any) -> Models:
    """The application's models."""
    return scope["app"].state.models  # type: ignore[no-any-return]


def server_of(scope: Any) -> ServerConfig:
    """The application's settings."""
    return scope["app"].state.server  # type: ignore[no-any-return]


def context_of(scope: Any) -> Context:
    """Of the model that the path names, or the first. Raises UnknownModel."""
    return models_of(scope).choose(scope.get(ALIAS), None, ANY)


def form_of(scope: Any) -> Form:
    """How the client wants its answer written."""
    accept = accept_encoding = None
    for name, value in scope["headers"]:
        if name == b"accept":
            accept = accept or value
        elif name == b"accept-encoding":
            accept_encoding = accept_encoding or value
    return wanted_form(accept, accept_encoding)


def told(scope: Any, answer: Any) -> ASGIResponse:
    """The answer of a route that takes no body."""
    body, headers = written(answer, form_of(scope))
    return ASGIResponse(body=body, headers=[(name.decode(), value.decode()) for name, value in headers])


async def respond(scope: Any, reply: Reply, send: Send) -> None:
    """200 with the reply, and its timing headers if it has any. Raises AnswersUnsent, ClientDisconnected."""
    unsent, form = unsent_of(scope), form_of(scope)
    estimate = reply.numbers * BYTES_PER_NUMBER
    reserved = 0 if estimate <= SMALL_BYTES else await while_connected(scope, unsent.room(estimate))
    try:
        body, headers = await _encoded(reply, form)
        unsent.add(len(body))
    finally:
        unsent.add(-reserved)
    if reply.usage is not None:
        headers = [*headers_of(reply.usage), *headers]
    del reply  # its numbers need not wait for the client, too
    try:
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body, "more_body": False})
    finally:
        unsent.add(-len(body))


async def _encoded(reply: Reply, form: Form) -> tuple[bytes, list[tuple[bytes, bytes]]]:
    if reply.numbers > (OFFLOAD_NUMBERS if form.coding is None else COMPRESS_ASIDE_NUMBERS):
        return await asyncio.to_thread(_written_aside, reply.answer, form)
    return written(reply.answer, form)


def _written_aside(answer: Any, form: Form) -> tuple[bytes, list[tuple[bytes, bytes]]]:
    return written(answer if form.msgpack else piecewise(answer), form)


def disconnect_of(scope: Any) -> Disconnect | None:
    """What our protocol tells of the client; None under another server."""
    disconnect: Disconnect | None = (scope.get("extensions") or {}).get(DISCONNECT)
    return disconnect


async def read_from_who_stays(scope: Any, receive: Any, models: Models, *, limit: int, type_required: bool) -> bytes:
    """`read_plain`, unless the client is gone by then, which is counted. Raises BodyError, ClientDisconnected."""
    disconnect = disconnect_of(scope)
    try:
        if disconnect is not None and disconnect.is_known():
            raise ClientDisconnected
        return await read_plain(scope, receive, limit=limit, type_required=type_required)
    except ClientDisconnected:
        models.default.metrics.left()
        raise


async def while_connected(scope: Any, work: Coroutine[Any, Any, T]) -> T:
    """Run `work`, and cancel it if the client goes away first. Raises ClientDisconnected then.

    ASGI servers tell of it only to whoever waits in `receive`, for which each request would need a task of its own; our
    protocol tells whoever asks the scope. Under another server nobody is told, and such work is done for nobody.
    """
    disconnect = disconnect_of(scope)
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
