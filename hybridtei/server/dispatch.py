"""The one way from an HTTP request to an answer: check the key, read, decode, run while the client is connected, respond.

Litestar finds the routes, starts and stops the application, and has errors written. Its request, guard, signature and response
objects are bypassed, here and nowhere else: they take longer than all else that this server does for a short request. What it
costs: `_read` checks the key of a route, `http.edge` its methods before the framework is asked, and dependency injection,
guards, response headers and hooks of the framework do not work in a route. Paths with parameters are not bypassed, because
Litestar has no ASGI routes with these.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Mapping
from typing import Any, TypeVar

import msgspec
from litestar import Request, asgi, get, post
from litestar.handlers import BaseRouteHandler
from litestar.response.base import ASGIResponse
from litestar.types import Receive, Scope, Send

from hybridtei.config import ServerConfig
from hybridtei.engine.service import BYTES_PER_NUMBER
from hybridtei.errors import KeyNeeded, NoStore
from hybridtei.observability.tracing import arrived, as_handler
from hybridtei.server.api.search import StoreContext
from hybridtei.server.context import OFFLOAD_NUMBERS, Reply, headers_of
from hybridtei.server.http.body import read_plain
from hybridtei.server.http.connection import DISCONNECT, SMALL_BYTES, ClientDisconnected, Disconnect, Unsent
from hybridtei.server.http.decoding import decode, keys_of, model_name
from hybridtei.server.http.edge import ALIAS
from hybridtei.server.http.error_responses import error_handlers
from hybridtei.server.http.security import authenticator_of, check_key, is_keyless
from hybridtei.server.http.writers import FORM, Form, piecewise, wanted_form, written
from hybridtei.server.registry import Models
from hybridtei.server.routing import Route

COMPRESS_ASIDE_NUMBERS = 8_000  # of these, gzip takes two milliseconds

T = TypeVar("T")
Work = Callable[..., Coroutine[Any, Any, Reply]]


def litestar_route(route: Route) -> BaseRouteHandler:
    """What Litestar serves for a route. Methods other than its own never come here: see `http.edge`."""
    errors: Mapping[Any, Any] = error_handlers(route.error)
    if route.method == "GET":
        return _get_route(route, errors)
    work: Work = as_handler(route.handler) if route.target == "model" else route.handler
    if "{" in route.path:

        @post(route.path, exception_handlers=dict(errors))
        async def handle_request(request: Request[Any, Any, Any]) -> ASGIResponse:
            form = form_of(request.scope)
            reply = await _answer(route, work, request.scope, request.receive, form)
            return _response(*written(reply.answer, form))

        return handle_request

    async def handle(scope: Scope, receive: Receive, send: Send) -> None:
        form = form_of(scope)
        try:
            await respond(scope, await _answer(route, work, scope, receive, form), form, send)
        except ClientDisconnected:
            if disconnect_of(scope) is None:
                raise
            # our protocol wants no answer for nobody, and making one takes longer than all the rest of it

    return asgi(route.path, copy_scope=False, exception_handlers=dict(errors))(handle)


def _get_route(route: Route, errors: Mapping[Any, Any]) -> BaseRouteHandler:
    async def response_of(scope: Any) -> ASGIResponse:
        if route.role is not None:
            check_key(scope, None)
        answer = await route.handler(scope)
        if isinstance(answer, Reply):
            body, headers = written(answer.answer, form_of(scope))
            return _response(body, headers)
        media_type = [] if answer.media_type is None else [(b"content-type", answer.media_type.encode())]
        return _response(answer.body, [*media_type, *answer.headers], answer.status)

    if "{" in route.path:

        @get(route.path, exception_handlers=dict(errors))
        async def handle_request(request: Request[Any, Any, Any]) -> ASGIResponse:
            return await response_of(request.scope)

        return handle_request

    async def handle(scope: Scope, receive: Receive, send: Send) -> None:
        await (await response_of(scope))(scope, receive, send)

    return asgi(route.path, copy_scope=False, exception_handlers=dict(errors))(handle)


def _response(body: bytes, headers: Iterable[tuple[bytes, bytes]], status: int = 200) -> ASGIResponse:
    named = {name.decode(): value.decode() for name, value in headers}
    response = ASGIResponse(body=body, status_code=status, headers=named)
    if "content-type" not in named:
        del response.headers["content-type"]
    return response


async def _answer(route: Route, work: Work, scope: Any, receive: Any, form: Form) -> Reply:
    """What a route's handler says to a request. Raises BodyError, ClientDisconnected, HybridTeiError."""
    models, server = models_of(scope), server_of(scope)
    body = await _read(route, scope, receive, models, server)
    wire: Any = body if isinstance(route.request, tuple) else decode(body, route.request)
    alias: str | None = scope.get(ALIAS)
    target: tuple[Any, ...]
    if route.target == "model":
        named = None if alias or models.is_one else model_name(body, wire)
        target = (models.choose(alias, named, route.capability),)
    elif route.target == "models":
        target = models, alias
    else:
        if alias is not None:
            models.named(alias)
        state = scope["app"].state
        target = (
            StoreContext(models, state.schemas, server, state.store_bounds, alias or wire.model),
            *scope["path_params"].values(),
        )
    if server.otlp_endpoint is not None:
        arrived(scope["app"].state.recorder, scope["headers"])
    FORM.set(form)
    working = work(*target, wire)
    return await (asyncio.shield(working) if route.outlives_client else while_connected(scope, working))


class _Token(msgspec.Struct):
    """The key in a body."""

    token: str | None = None


async def _read(route: Route, scope: Any, receive: Any, models: Models, server: ServerConfig) -> bytes:
    """The body, once it is known that the route may be used. Raises BodyError, ClientDisconnected, HybridTeiError."""
    manages = route.role == "manage"
    if route.key_in_body and is_keyless(scope):
        unsent_of(scope).check()
        async with scope["app"].state.keyless.bounded(scope, receive) as receive_bounded:
            body = await _read_connected(route, scope, receive_bounded, models, server)
        check_key(scope, "infer", keys_of(body, _Token).token)
        return body
    check_key(scope, None if route.role == "any" else route.role)
    if manages and authenticator_of(scope).keys.is_open:
        raise KeyNeeded
    if route.target == "store" and scope["app"].state.schemas is None:
        raise NoStore
    if not manages:
        unsent_of(scope).check()
    return await _read_connected(route, scope, receive, models, server)


async def _read_connected(route: Route, scope: Any, receive: Any, models: Models, server: ServerConfig) -> bytes:
    """`read_plain`, unless the client is gone by then, which is counted. Raises BodyError, ClientDisconnected."""
    disconnect = disconnect_of(scope)
    try:
        if disconnect is not None and disconnect.is_known():
            raise ClientDisconnected
        return await read_plain(scope, receive, limit=server.payload_limit, type_required=route.needs_content_type)
    except ClientDisconnected:
        models.default.metrics.left()
        raise


def unsent_of(scope: Any) -> Unsent:
    """The application's count of answers that wait for their clients."""
    return scope["app"].state.unsent  # type: ignore[no-any-return]


def models_of(scope: Any) -> Models:
    """The application's models."""
    return scope["app"].state.models  # type: ignore[no-any-return]


def server_of(scope: Any) -> ServerConfig:
    """The application's settings."""
    return scope["app"].state.server  # type: ignore[no-any-return]


def form_of(scope: Any) -> Form:
    """How the client wants its answer written."""
    accept = accept_encoding = None
    for name, value in scope["headers"]:
        if name == b"accept":
            accept = accept or value
        elif name == b"accept-encoding":
            accept_encoding = accept_encoding or value
    return wanted_form(accept, accept_encoding)


async def respond(scope: Any, reply: Reply, form: Form, send: Send) -> None:
    """200 with the reply, and its timing headers if it has any. Raises AnswersUnsent, ClientDisconnected."""
    unsent = unsent_of(scope)
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


async def while_connected(scope: Any, work: Coroutine[Any, Any, T]) -> T:
    """Run `work`, and cancel it if the client disconnects first. Raises ClientDisconnected then.

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
