"""From an HTTP request to its answer: methods, CORS, keys, body, handler, response. Knows no web framework.

`HttpMiddleware` wraps the application, and looks at paths, methods and origins before the framework is asked; `reply_of`
checks the key, reads, decodes, and runs a route's handler while the client is connected; `_respond` writes what it replied.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Coroutine, Iterable, Mapping
from dataclasses import replace
from functools import cache
from typing import Any, TypeVar

import msgspec

from hybridtei.config import ServerConfig
from hybridtei.engine.service import BYTES_PER_NUMBER
from hybridtei.errors import KeyNeeded, NoStore
from hybridtei.observability.tracing import arrived
from hybridtei.server.context import OFFLOAD_NUMBERS, Context, Reply, headers_of
from hybridtei.server.http.body import first_fields, read_plain
from hybridtei.server.http.connection import DISCONNECT, SMALL_BYTES, ClientDisconnected, Disconnect, Unsent
from hybridtei.server.http.decoding import decode, keys_of, model_name
from hybridtei.server.http.security import Origins, check_key, check_origin, is_keyless
from hybridtei.server.http.writers import FORM, Form, encode, negotiate, piecewise
from hybridtei.server.registry import Models, StoreContext, check_capacity
from hybridtei.server.routing import ALIAS, ALIASES, PAGE, Route, split_alias

FAILED = "hybridtei.failed"  # in a scope: what a handler raised outside of the framework
FINGERPRINT = b"x-hybridtei-fingerprint"
COMPRESS_ASIDE_NUMBERS = 8_000  # of these, gzip takes two milliseconds

T = TypeVar("T")
Work = Callable[..., Coroutine[Any, Any, Reply]]


def asgi_handler(route: Route, work: Work) -> Callable[[Any, Any, Any], Coroutine[Any, Any, None]]:
    """Return the ASGI application of a route. Its answer is not sent to a client that disconnected, where that is known."""

    async def handle(scope: Any, receive: Any, send: Any) -> None:
        if FAILED in scope:
            raise scope.pop(FAILED)
        form = form_of(scope)
        try:
            await _respond(scope, await reply_of(route, work, scope, receive, form), form, send)
        except ClientDisconnected:
            if disconnect_of(scope) is None:
                raise
            # our protocol needs no answer then, and making one takes longer than the rest of the request

    return handle


async def reply_of(route: Route, work: Work, scope: Any, receive: Any, form: Form) -> Reply:
    """Check the key, read, decode, and run a route's handler. Raises BodyError, ClientDisconnected, HybridTeiError."""
    state = scope["app"].state
    models: Models = state.models
    server: ServerConfig = state.server
    body = await _read(route, scope, receive, state)
    wire: Any = body if isinstance(route.request, tuple) else decode(body, route.request)
    alias: str | None = scope.get(ALIAS)
    target: tuple[Any, ...]
    if route.target == "model":
        context = models.only
        if context is None or alias is not None:
            context = models.choose(alias, None if alias or models.is_one else model_name(body, wire), route.capability)
        target = (context,)
    elif route.target == "models":
        target = models, alias
    else:
        if alias is not None:
            models.named(alias)
        target = (
            StoreContext(models, state.schemas, server, state.store_bounds, alias or wire.model),
            *scope["path_params"].values(),
        )
    if server.otlp_endpoint is not None:
        arrived(state.recorder, scope["headers"])
    FORM.set(form)
    working = work(*target, wire)
    reply: Reply = await (asyncio.shield(working) if route.outlives_client else while_connected(scope, working))
    return reply if route.target != "model" or route.is_tei else _signed(reply, target[0])


def _signed(reply: Reply, context: Context) -> Reply:
    """With the model's fingerprint as a header, once its weights are read."""
    reading = context.fingerprint
    found = reading.result() if reading.done() else None
    identity = None if found is None else found["id"]
    return reply if identity is None else replace(reply, headers=(*reply.headers, (FINGERPRINT, identity.encode())))


class _Token(msgspec.Struct):
    """The API key of a body."""

    token: str | None = None


async def _read(route: Route, scope: Any, receive: Any, state: Any) -> bytes:
    """Check the key and the limits, and read the body. Raises BodyError, ClientDisconnected, HybridTeiError."""
    keys = state.authenticator.keys
    if route.key_in_body and is_keyless(scope):
        state.unsent.check()
        async with state.keyless.bounded(scope, receive) as receive_bounded:
            body = await _read_connected(route, scope, receive_bounded, state)
        check_key(scope, "infer", keys_of(body, _Token).token)
        return body
    if not keys.is_open:
        check_key(scope, None if route.role == "any" else route.role)
    elif route.role == "write":
        check_origin(scope, state.server.cors_allow_origin)
    elif route.role == "manage":
        raise KeyNeeded
    if route.target == "store" and state.schemas is None:
        raise NoStore
    if route.role != "manage":
        state.unsent.check()
    check_capacity(route, scope.get(ALIAS), state.models, state.store_bounds)
    return await _read_connected(route, scope, receive, state)


async def _read_connected(route: Route, scope: Any, receive: Any, state: Any) -> bytes:
    """`read_plain`, unless the client disconnected by then, which is counted. Raises BodyError, ClientDisconnected."""
    try:
        return await read_plain(scope, receive, limit=state.server.payload_limit, type_required=route.needs_content_type)
    except ClientDisconnected:
        state.models.default.metrics.disconnected()
        raise


def form_of(scope: Any) -> Form:
    """The form of an answer that a request's headers ask for."""
    fields = first_fields(scope)
    return negotiate(fields.get(b"accept"), fields.get(b"accept-encoding"))


async def _respond(scope: Any, reply: Reply, form: Form, send: Any) -> None:
    """200 with the reply, and its timing headers if it has any. Raises AnswersUnsent, ClientDisconnected."""
    unsent: Unsent = scope["app"].state.unsent
    estimate = reply.numbers * BYTES_PER_NUMBER
    reserved = 0 if estimate <= SMALL_BYTES else await while_connected(scope, unsent.room(estimate))
    try:
        body, headers = await _encode(reply, form)
        unsent.add(len(body))
    finally:
        unsent.add(-reserved)
    if reply.usage is not None:
        headers = [*headers_of(reply.usage), *headers]
    headers = [*reply.headers, *headers]
    del reply  # its numbers need not wait for the client, too
    try:
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body, "more_body": False})
    finally:
        unsent.add(-len(body))


async def _encode(reply: Reply, form: Form) -> tuple[bytes, list[tuple[bytes, bytes]]]:
    if reply.numbers > (OFFLOAD_NUMBERS if form.coding is None else COMPRESS_ASIDE_NUMBERS):
        return await asyncio.to_thread(_encode_piecewise, reply.answer, form)
    return encode(reply.answer, form)


def _encode_piecewise(answer: Any, form: Form) -> tuple[bytes, list[tuple[bytes, bytes]]]:
    return encode(answer if form.msgpack else piecewise(answer), form)


def disconnect_of(scope: Any) -> Disconnect | None:
    """Whether the client disconnected, from our protocol; None under another server."""
    disconnect: Disconnect | None = (scope.get("extensions") or {}).get(DISCONNECT)
    return disconnect


async def while_connected(scope: Any, work: Coroutine[Any, Any, T]) -> T:
    """Run `work`, and cancel it if the client disconnects first. Raises ClientDisconnected then.

    ASGI servers report a disconnect in `receive` only, for which each request would need a task of its own; our protocol puts
    it into the scope. Under another server the work goes on.
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


HTML, XHTML = "text/html", "application/xhtml+xml"
BROWSERS_OWN = (HTML, XHTML, "image/", "*/*")  # what may be valued as much as HTML


def wants_page(headers: Iterable[tuple[bytes, bytes]]) -> bool:
    """Whether `accept` names HTML, and nothing that is no browser's before it or beside it."""
    accept = b",".join(value for name, value in headers if name == b"accept")
    if b"text/html" not in accept.lower():  # health probes end here
        return False
    qualities = dict(_quality(item) for item in accept.decode("latin-1").lower().split(","))
    html = qualities.get(HTML, 0.0)
    rivals = [name for name, quality in qualities.items() if quality >= html and name not in (HTML, XHTML)]
    if not rivals:
        return html > 0
    return html > 0 and XHTML in qualities and all(name.startswith(BROWSERS_OWN) and qualities[name] <= html for name in rivals)


def _quality(item: str) -> tuple[str, float]:
    name, *parameters = (part.strip() for part in item.split(";"))
    value = next((part[2:] for part in parameters if part.startswith("q=")), "1")
    try:
        return name, float(value)
    except ValueError:
        return name, 0.0


ENDING_IN_SLASH = ("/", "/docs/")
SLICE_BYTES = 262_144
PREFLIGHT = ((b"access-control-allow-methods", b"GET,POST"), (b"access-control-allow-headers", b"content-type"))
EMPTY = (b"content-length", b"0")
Headers = list[tuple[bytes, bytes]]


class HttpMiddleware:
    """Wraps an ASGI application. `methods`: path -> its methods; others are refused before anything else is looked at.

    `below_aliases`: whether routes are also there below `/m/ALIAS`: all but those at `of_process`, which belong to no model,
    and which a proxy in front may guard by their one path.
    """

    def __init__(
        self,
        app: Any,
        origins: tuple[str, ...],
        methods: Mapping[str, frozenset[str]],
        *,
        below_aliases: bool = True,
        of_process: frozenset[str] = frozenset(),
    ) -> None:
        self._app = app
        self._origins = Origins(origins)
        self._methods = methods
        self._below_aliases = below_aliases
        self._of_process = of_process
        self._allow = {path: [(b"allow", allow_header(names).encode())] for path, names in methods.items()}

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        alias, path = split_alias(scope["path"]) if self._below_aliases else (None, scope["path"])
        if alias is not None:
            scope = {**scope, "path": path, "raw_path": path.encode(), ALIAS: alias}
        method = scope["method"]
        headers = self._origins.headers(first_fields(scope).get(b"origin"))
        if method == "OPTIONS":
            await _bare(200, [*headers, *PREFLIGHT, *self._allow.get(path, ())], send)
            return
        misplaced = alias is not None and path in self._of_process
        if misplaced or "//" in path or (path.endswith("/") and path not in ENDING_IN_SLASH):
            await _bare(404, headers, send)  # the framework would strip slashes, TEI does not
            return
        is_head = method == "HEAD"
        if is_head:  # answered wherever GET is
            method = "GET"
        route = self._route(path)
        if route is not None and method not in self._methods[route]:
            await _bare(405, [*headers, *self._allow[route]], send)
            return
        path = ALIASES.get((method, path), path)
        if path == "/" and not is_head and PAGE in self._methods and wants_page(scope["headers"]):
            path = PAGE

        async def send_with_cors(message: Any) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), *headers]
            elif is_head and message["type"] == "http.response.body":
                message = {**message, "body": b""}
            if len(message.get("body", b"")) > SLICE_BYTES:
                await _send_sliced(message, send)
            else:
                await send(message)

        if is_head or path is not scope["path"]:
            scope = {**scope, "method": method, "path": path, "raw_path": path.encode()}
        await self._app(scope, receive, send_with_cors)

    def _route(self, path: str) -> str | None:
        """The path as it was registered, with parameters such as `{name:str}`; None for one that no route serves."""
        if path in self._methods:
            return path
        return next((route for route in self._methods if "{" in route and _pattern(route).fullmatch(path)), None)


@cache
def _pattern(route: str) -> re.Pattern[str]:
    return re.compile(re.sub(r"\{\w+:(\w+)\}", lambda found: ".+" if found[1] == "path" else "[^/]+", route))


async def _send_sliced(message: Any, send: Any) -> None:
    """A large body slice by slice: `send` waits until the system took the slice before, so that no second copy is kept."""
    body, more = memoryview(message["body"]), message.get("more_body", False)
    for begin in range(0, len(body), SLICE_BYTES):
        end = begin + SLICE_BYTES
        await send({"type": "http.response.body", "body": body[begin:end], "more_body": more or end < len(body)})
        await asyncio.sleep(0)  # a client that reads fast would keep all others waiting


async def _bare(status: int, headers: Headers, send: Any) -> None:
    await send({"type": "http.response.start", "status": status, "headers": [*headers, EMPTY]})
    await send({"type": "http.response.body", "body": b""})


def allow_header(methods: Iterable[str]) -> str:
    """Methods as TEI lists them: HEAD is there wherever GET is, OPTIONS is not named."""
    return ",".join("GET,HEAD" if name == "GET" else name for name in sorted({*methods} - {"OPTIONS", "HEAD"}))
