"""How to write a route: a coroutine function that returns a `Reply`, under `post` or `get`.

    @post("/embed", list[Vector], capability=EMBED, is_tei=True)
    @handler("embed")
    async def embed(context: Context, request: EmbedRequest) -> Reply:
        \"\"\"Dense vectors, one an input.\"\"\"

The type of a parameter says what it gets: `Context` the model that answers, `Models` all models, `StoreContext` the vector
store, `ApiRequest` the HTTP request, `FromPath[str]` a part of the path, `RawBody` the body, any other type the decoded body.
Parameters with a default get nothing.

Litestar routes, injects and documents. This module replaces the parts that are too slow for short requests: one middleware,
`admitted`, replaces guards, `ApiRequest` reads and decodes bodies, and `Answer` writes answers. CONTRIBUTING.md has the
figures.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Mapping
from contextlib import aclosing
from inspect import Parameter, Signature, signature
from typing import Any, Generic, TypeVar, get_type_hints

import litestar
from litestar import Request, Response
from litestar.di import NamedDependency
from litestar.handlers import HTTPRouteHandler
from litestar.params import FromPath, JSONBody, RawBody, SkipValidation
from litestar.types import ASGIApp, Empty, Receive, Scope, Send
from msgspec import Struct

from hybridtei.errors import HybridTeiError, KeyNeeded, NoStore
from hybridtei.inference.engine.service import BYTES_PER_NUMBER
from hybridtei.server.context import OFFLOAD_NUMBERS, Context, Reply, headers_of
from hybridtei.server.http.body import SyntaxRefused, body_parts, decode, first_fields, keys_of, model_name, read_body
from hybridtei.server.http.connection import DISCONNECT, SMALL_BYTES, ClientDisconnected, Disconnect, Unsent
from hybridtei.server.http.security import check_origin
from hybridtei.server.http.writers import piecewise, to_json
from hybridtei.server.models import Models, StoreContext, check_capacity
from hybridtei.server.routing import ALIAS, ENDPOINT, Endpoint, endpoint_of
from hybridtei.system.tracing import arrived

T = TypeVar("T")
log = logging.getLogger(__name__)

MODEL = "hybridtei.model"  # in a scope: the context that answers
KEYLESS = "hybridtei.keyless"  # in a scope: the key may come in the body


class _Token(Struct):
    """The API key in a body."""

    token: str | None = None


class ApiRequest(Request[Any, Any, Any]):
    """A request whose body is bounded in size and time."""

    __slots__ = ("decoded",)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.decoded: Any = None  # the body as a struct

    @property
    def endpoint(self) -> Endpoint:
        return self.route_handler.opt[ENDPOINT]  # type: ignore[no-any-return]

    @property
    def alias(self) -> str | None:
        """The alias in the path, or None."""
        return self.scope.get(ALIAS)  # type: ignore[return-value]

    async def body(self) -> bytes:
        """Raises BodyError, ClientDisconnected, NoKey."""
        if self._body is Empty:
            self._body = await self._read()
        return self._body

    async def _read(self) -> bytes:
        scope, state = self.scope, self.scope["app"].state
        if KEYLESS not in scope:
            return await self._read_connected(self.receive)
        async with state.keyless.bounded(self.receive) as receive:
            body = await self._read_connected(receive)
        state.keyring.check(b"", "infer", keys_of(body, _Token).token)
        return body

    async def _read_connected(self, receive: Receive) -> bytes:
        """Read the body. Counts a client that disconnects before the end."""
        state = self.scope["app"].state
        try:
            limit, needs_type = state.server.payload_limit, self.endpoint.needs_content_type
            body = await read_body(self.scope, receive, limit=limit, type_required=needs_type)
        except ClientDisconnected:
            state.models.default.metrics.disconnected.add()
            raise
        if not body:
            raise SyntaxRefused("it ends too early (byte 0)")
        return body

    async def parts(self) -> AsyncIterator[bytes]:
        """Yield the body in parts, for a handler without `data`. Raises BodyError, ClientDisconnected."""
        try:
            async for part in body_parts(self.scope, self.receive):
                yield part
        except ClientDisconnected:
            self.scope["app"].state.models.default.metrics.disconnected.add()
            raise

    async def json(self) -> Any:
        """Decode the body to the handler's struct. Raises the errors of `body` and `decode`."""
        self.decoded = decode(await self.body(), self.endpoint.by_field or self.route_handler.parsed_data_field.annotation)  # type: ignore[union-attr]
        return self.decoded


async def served_model(request: ApiRequest) -> Context:
    """The model that the path or the body names, else the first one with the route's capability. Raises UnknownModel."""
    models: Models = request.scope["app"].state.models
    alias = request.alias
    name = None
    if alias is None and not models.is_one and request.method == "POST":
        name = model_name(await request.body(), request.decoded)
    context = models.choose(alias, name, request.endpoint.capability)
    request.scope[MODEL] = context  # type: ignore[literal-required]
    return context


async def all_models(request: ApiRequest) -> Models:
    return request.scope["app"].state.models  # type: ignore[no-any-return]


async def vector_store(request: ApiRequest) -> StoreContext:
    """The vector store, and the model that the path or the body names, if any. Raises UnknownModel."""
    state, alias = request.scope["app"].state, request.alias
    if alias is not None:
        state.models.named(alias)
    named = alias or getattr(request.decoded, "model", None)
    return StoreContext(state.models, state.schemas, state.server, state.store_bounds, named)


def admitted(app: ASGIApp) -> ASGIApp:
    """A middleware: check key, role, store and capacity before the body is read."""

    async def handle(scope: Scope, receive: Receive, send: Send) -> None:
        endpoint = endpoint_of(scope)
        if endpoint is not None:
            _admit(endpoint, scope)
        state = scope["app"].state
        if state.recorder is not None:
            arrived(state.recorder, scope["headers"])
        await app(scope, receive, send)

    return handle


def _admit(endpoint: Endpoint, scope: Any) -> None:
    """Raises NoKey, RoleNeeded, OtherOrigin, KeyNeeded, NoStore, AnswersUnsent, Overloaded."""
    state, role = scope["app"].state, endpoint.role
    if role is None:
        return
    keys, authorization = state.keyring, first_fields(scope).get(b"authorization", b"")
    if endpoint.key_in_body and not keys.is_open and keys.find_in_header(authorization) is None:
        scope[KEYLESS] = True
        state.limits.unsent.check()
        return
    keys.check(authorization, None if role == "any" else role)
    if keys.is_open and role == "write":
        check_origin(scope, state.server.cors_allow_origin)
    if keys.is_open and role == "manage":
        raise KeyNeeded(scope["path"])
    if endpoint.needs_store and state.schemas is None:
        raise NoStore
    if scope["method"] != "POST":
        return
    if role != "manage":
        state.limits.unsent.check()
    check_capacity(endpoint, scope.get(ALIAS), state.models, state.store_bounds)


SLICE_BYTES = 262_144
JSON, JSON_LINES = (b"content-type", b"application/json"), (b"content-type", b"application/jsonl")


class Answer(Response[T], Generic[T]):
    """A JSON response of type `T`, made from a reply or from the coroutine that returns one. It waits while too many bytes of
    answers are unsent."""

    def __init__(self, work: Reply | Coroutine[Any, Any, Reply]) -> None:
        self._work = work

    def to_asgi_response(self, *args: Any, **kwargs: Any) -> ASGIApp:  # type: ignore[override]
        """Litestar calls this to get the function that sends the answer."""
        return self._respond

    async def _respond(self, scope: Any, receive: Any, send: Any) -> None:
        """Send 200, with timing headers if a model ran. Raises the work's errors, AnswersUnsent, ClientDisconnected."""
        endpoint: Endpoint = scope["route_handler"].opt[ENDPOINT]
        work = self._work
        del self._work  # the reply's arrays are freed once they are encoded
        if isinstance(work, Reply):
            reply = work
        else:
            reply = await (asyncio.shield(work) if endpoint.outlives_client else while_connected(scope, work))
        model: Context | None = scope.get(MODEL)
        fingerprint = None if model is None or endpoint.is_tei else model.fingerprint_header
        unsent: Unsent = scope["app"].state.limits.unsent
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


class Lines(Response[Any]):
    """A generator's lines as a JSON-lines response. The first line precedes the status, so an error before it gets its own
    status; a later error closes the connection."""

    def __init__(self, lines: AsyncGenerator[bytes]) -> None:
        self._lines = lines

    def to_asgi_response(self, *args: Any, **kwargs: Any) -> ASGIApp:  # type: ignore[override]
        """Litestar calls this to get the function that sends the answer."""
        return self._respond

    async def _respond(self, scope: Any, receive: Any, send: Any) -> None:
        """Raises what the generator raises before its first lines. A disconnect of the client ends the generator."""
        disconnect: Disconnect = (scope.get("extensions") or {}).get(DISCONNECT) or Disconnect()
        async with aclosing(self._lines) as lines:
            first = await anext(lines)
            await send({"type": "http.response.start", "status": 200, "headers": [JSON_LINES]})
            if scope["method"] != "HEAD":
                await _send_body(first, send, ends=False)
                try:
                    async for some in lines:
                        if disconnect.happened:
                            return
                        await _send_body(some, send, ends=False)
                except HybridTeiError as error:
                    log.error("%s is cut off: %.1000s", scope["path"], error)
                    return
        await _send_body(b"", send)


async def _send_body(body: bytes, send: Any, *, ends: bool = True) -> None:
    """Send a large body in slices: `send` waits until the system took the previous slice, so no second copy is kept."""
    rest: Any = body
    if len(body) > SLICE_BYTES:
        rest = memoryview(body)
        while len(rest) > SLICE_BYTES:
            await send({"type": "http.response.body", "body": rest[:SLICE_BYTES], "more_body": True})
            await asyncio.sleep(0)  # otherwise a fast client makes all others wait
            rest = rest[SLICE_BYTES:]
    await send({"type": "http.response.body", "body": rest, "more_body": not ends})


async def while_connected(scope: Any, work: Coroutine[Any, Any, T]) -> T:
    """Run `work`, and cancel it if the client disconnects first. Raises ClientDisconnected.

    ASGI servers report a disconnect only in `receive`, so each request would need a second task. `BoundedHttpProtocol` puts
    the disconnect into the scope instead. Under another server the work continues.
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


TAG = "Text Embeddings Inference"  # of all routes in the OpenAPI document
ROUTES: list[HTTPRouteHandler] = []  # of the imported dialects
# The type of a parameter -> its name and type for Litestar.
INJECTED: Mapping[Any, tuple[str, Any]] = {
    Context: ("model", NamedDependency[SkipValidation[Context]]),  # `served_model`
    Models: ("models", NamedDependency[SkipValidation[Models]]),  # `all_models`
    StoreContext: ("store", NamedDependency[SkipValidation[StoreContext]]),  # `vector_store`
    ApiRequest: ("request", ApiRequest),
    RawBody: ("body", RawBody),
}
Work = TypeVar("Work", bound=Callable[..., Coroutine[Any, Any, Any]])


def post(path: str | list[str], answer: Any, *, in_schema: bool = True, **needs: Any) -> Callable[[Work], Work]:
    """Decorate a coroutine function that returns a `Reply`. `answer`: the type of its JSON. `needs`: fields of `Endpoint`."""
    return _registering(path, ["POST"], answer, in_schema, Endpoint(**needs))


def get(path: str | list[str], answer: Any = None, *, in_schema: bool = True, **needs: Any) -> Callable[[Work], Work]:
    """Decorate a coroutine function that answers GET and HEAD. Without `answer` it returns a `Response`."""
    return _registering(path, ["GET", "HEAD"], answer, in_schema, Endpoint(**{"role": "any", **needs, "takes_permits": False}))


def _registering(
    path: str | list[str], methods: Any, answer: Any, in_schema: bool, endpoint: Endpoint
) -> Callable[[Work], Work]:
    serve = litestar.route(
        path,
        http_method=methods,
        status_code=200,
        include_in_schema=in_schema,
        middleware=[admitted],
        opt={ENDPOINT: endpoint},
        request_class=ApiRequest,
        tags=[TAG],
    )

    def register(work: Work) -> Work:
        ROUTES.append(serve(_for_litestar(work, answer)))
        return work

    return register


def _for_litestar(work: Callable[..., Coroutine[Any, Any, Any]], answer: Any) -> Any:
    """A function with Litestar's names and types of the parameters of `work`, and of its answer."""
    hints = get_type_hints(work, include_extras=True)
    given = [_injected(one.name, hints[one.name]) for one in signature(work).parameters.values() if one.default is one.empty]
    names = [name for name, _ in given]

    async def respond(**values: Any) -> Any:
        running = work(*[values[name] for name in names])
        return await running if answer is None else Answer(running)

    respond.__name__, respond.__doc__ = work.__name__, work.__doc__
    respond.__annotations__ = {**dict(given), "return": hints["return"] if answer is None else Answer[answer]}
    respond.__signature__ = Signature([Parameter(name, Parameter.KEYWORD_ONLY) for name in names])  # type: ignore[attr-defined]
    return respond


def _injected(name: str, kind: Any) -> tuple[str, Any]:
    if kind == FromPath[str]:
        return name, kind
    return INJECTED.get(kind) or ("data", JSONBody[SkipValidation[kind]])  # type: ignore[misc]
