"""How to write a route: a coroutine function that returns a `Reply`, under `post` or `get`.

    @post("/embed", list[Vector], capability=EMBED, is_tei=True)
    async def embed(context: Context, request: EmbedRequest) -> Reply:
        \"\"\"Dense vectors, one an input.\"\"\"

The type of a parameter says what it gets: `Context` the model that answers, `Models` all models, `StoreContext` the vector
store, `ApiRequest` the HTTP request, `FromPath[str]` a part of the path, `RawBody` the body, any other type the decoded body.
Parameters with a default get nothing.

Litestar routes. This module replaces the parts that are too slow for short requests: one middleware, `admitted`, replaces
guards, `SOURCES` dependencies, `ApiRequest` reads and decodes bodies, and `Answer` writes answers. `HttpMiddleware` stands
before Litestar. CONTRIBUTING.md has the figures.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from inspect import Parameter, Signature, signature
from typing import Any, TypeVar, get_type_hints

import litestar
from litestar import Litestar, Request
from litestar.handlers import HTTPRouteHandler
from litestar.params import FromPath, JSONBody, RawBody, SkipValidation
from litestar.types import ASGIApp, Empty, Receive, Scope, Send
from msgspec import Struct

from hybridtei.config import ServerConfig
from hybridtei.errors import KeyNeeded, NoStore
from hybridtei.server.answers import MODEL, Answer
from hybridtei.server.context import Context
from hybridtei.server.http.body import (
    SyntaxRefused,
    body_parts,
    decode,
    first_fields,
    keys_of,
    model_name,
    read_body,
)
from hybridtei.server.http.connection import ClientDisconnected
from hybridtei.server.http.security import check_origin
from hybridtei.server.models import Models, StoreContext, check_capacity
from hybridtei.server.routing import ENDPOINT, Endpoint, allow_header
from hybridtei.system.tracing import arrived, handler

ALIAS = "hybridtei.alias"  # in a scope: the model that the path named
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
        self.decoded = decode(
            await self.body(),
            self.endpoint.by_field or self.route_handler.parsed_data_field.annotation,  # type: ignore[union-attr]
        )
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


async def itself(request: ApiRequest) -> ApiRequest:
    return request


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
        endpoint = scope["route_handler"].opt.get(ENDPOINT)
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
    keys = state.keyring
    if not keys.is_open:
        authorization = first_fields(scope).get(b"authorization", b"")
        if endpoint.key_in_body and keys.find_in_header(authorization) is None:
            scope[KEYLESS] = True
            state.limits.unsent.check()
            return
        keys.check(authorization, None if role == "any" else role)
    elif role == "write":
        check_origin(scope, state.server.cors_allow_origin)
    elif role == "manage":
        raise KeyNeeded(scope["path"])
    if endpoint.needs_store and state.schemas is None:
        raise NoStore
    if scope["method"] != "POST":
        return
    if role != "manage":
        state.limits.unsent.check()
    check_capacity(endpoint, scope.get(ALIAS), state.models, state.store_bounds)


ROUTES: list[HTTPRouteHandler] = []  # of the imported dialects
# The type of a parameter -> the function that makes it of the request. Others come from Litestar: the body, a part of the path.
SOURCES: Mapping[Any, Callable[[ApiRequest], Awaitable[Any]]] = {
    Context: served_model,
    Models: all_models,
    StoreContext: vector_store,
    ApiRequest: itself,
    RawBody: ApiRequest.body,
}
Work = TypeVar("Work", bound=Callable[..., Coroutine[Any, Any, Any]])


def post(
    path: str | list[str],
    answer: Any,
    *,
    span: str | None = "",
    in_schema: bool = True,
    **needs: Any,
) -> Callable[[Work], Work]:
    """Decorate a coroutine function that returns a `Reply`. `answer`: the type of its JSON. `needs`: fields of `Endpoint`.
    `span`: the name in logs and traces; default: the function's; None: it calls a function that has one."""
    return _registering(path, ["POST"], answer, Endpoint(**needs), span=span, in_schema=in_schema)


def get(
    path: str | list[str], answer: Any = None, *, in_schema: bool = True, **needs: Any
) -> Callable[[Work], Work]:
    """Decorate a coroutine function that answers GET and HEAD. Without `answer` it returns a `Response`."""
    endpoint = Endpoint(**{"role": "any", **needs, "takes_permits": False})
    return _registering(path, ["GET", "HEAD"], answer, endpoint, span=None, in_schema=in_schema)


def _registering(
    path: str | list[str],
    methods: Any,
    answer: Any,
    endpoint: Endpoint,
    *,
    span: str | None,
    in_schema: bool,
) -> Callable[[Work], Work]:
    serve = litestar.route(
        path,
        http_method=methods,
        status_code=200,
        include_in_schema=in_schema,
        middleware=[admitted],
        opt={ENDPOINT: endpoint},
        request_class=ApiRequest,
    )

    def register(work: Any) -> Any:
        traced = work if span is None else handler(span or work.__name__)(work)
        ROUTES.append(serve(_for_litestar(traced, answer)))
        return traced

    return register


def _for_litestar(work: Callable[..., Coroutine[Any, Any, Any]], answer: Any) -> Any:
    """The function that Litestar calls. Its types are those of the body, the path and the answer of `work`."""
    hints = get_type_hints(work, include_extras=True)
    kinds = {
        one.name: hints[one.name]
        for one in signature(work).parameters.values()
        if one.default is one.empty
    }
    places = [
        (SOURCES.get(kind), name if kind == FromPath[str] else "data")
        for name, kind in kinds.items()
    ]
    types: dict[str, Any] = {"request": ApiRequest}
    for (source, place), kind in zip(places, kinds.values(), strict=True):
        if source is None:
            types[place] = kind if kind == FromPath[str] else JSONBody[SkipValidation[kind]]  # type: ignore[misc, valid-type]

    async def respond(request: ApiRequest, **values: Any) -> Any:
        running = work(
            *[
                values[place] if source is None else await source(request)
                for source, place in places
            ]
        )
        return await running if answer is None else Answer(running)

    respond.__name__, respond.__doc__ = work.__name__, work.__doc__
    respond.__annotations__ = {
        **types,
        "return": hints["return"] if answer is None else Answer[answer],
    }
    respond.__signature__ = Signature([Parameter(name, Parameter.KEYWORD_ONLY) for name in types])  # type: ignore[attr-defined]
    return respond


BELOW = "/m/"  # the prefix of each model's routes: /m/ALIAS/embed
ENDING_IN_SLASH = ("/", "/docs/")
PREFLIGHT = (
    (b"access-control-allow-methods", b"GET,POST"),
    (b"access-control-allow-headers", b"content-type"),
)
ALLOW_ORIGIN = b"access-control-allow-origin"
VARY = (b"vary", b"origin, access-control-request-method, access-control-request-headers")


def split_alias(path: str) -> tuple[str | None, str]:
    """`/m/name/embed` -> ("name", "/embed"); other paths -> (None, path)."""
    if not path.startswith(BELOW):
        return None, path
    alias, _, rest = path[len(BELOW) :].partition("/")
    return alias, f"/{rest}"


class HttpMiddleware:
    """Answers preflights, adds CORS headers, removes `/m/ALIAS` from a path, and answers 404 to doubled and trailing slashes.

    Each model route is also served below `/m/ALIAS`. Routes that manage the process are not: they belong to no model, and a
    proxy can guard them by their single path. With `only_tei_routes` there is no `/m/ALIAS`.
    """

    def __init__(self, app: Litestar, server: ServerConfig) -> None:
        """`app`: still has Litestar's own ASGI handler."""
        self._app = app.asgi_handler
        origins = server.cors_allow_origin
        self._any_origin = not origins or "*" in origins
        self._origins = frozenset(
            name.encode("latin-1", "replace") for name in origins
        )  # whose pages may read answers
        self._below_aliases = not server.only_tei_routes
        self._of_process = {
            path for one in ROUTES if one.opt[ENDPOINT].role == "manage" for path in one.paths
        }
        routes = [route for route in app.routes if route.methods]
        self._allow = {
            route.path_format: [(b"allow", allow_header(route.methods).encode())]
            for route in routes
        }

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = self._cors(first_fields(scope).get(b"origin"))
        alias, path = split_alias(scope["path"]) if self._below_aliases else (None, scope["path"])
        if scope["method"] == "OPTIONS":
            await _bare(200, [*headers, *PREFLIGHT, *self._allow.get(path, ())], send)
            return
        misplaced = alias is not None and path in self._of_process
        if misplaced or "//" in path or (path.endswith("/") and path not in ENDING_IN_SLASH):
            await _bare(404, headers, send)  # Litestar would strip slashes; TEI does not
            return
        if alias is not None:
            scope = {**scope, "path": path, "raw_path": path.encode(), ALIAS: alias}

        async def send_with_cors(message: Any) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), *headers]
            await send(message)

        await self._app(scope, receive, send_with_cors)

    def _cors(self, origin: bytes | None) -> list[tuple[bytes, bytes]]:
        """The CORS headers of every answer to a page of `origin`."""
        if self._any_origin:
            return [VARY, (ALLOW_ORIGIN, b"*")]
        return (
            [VARY]
            if origin is None or origin not in self._origins
            else [VARY, (ALLOW_ORIGIN, origin)]
        )


async def _bare(status: int, headers: list[tuple[bytes, bytes]], send: Any) -> None:
    await send(
        {
            "type": "http.response.start",
            "status": status,
            "headers": [*headers, (b"content-length", b"0")],
        }
    )
    await send({"type": "http.response.body", "body": b""})
