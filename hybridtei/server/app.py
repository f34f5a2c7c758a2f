"""The Litestar application: routes, what is written of an error, and the engine's life. All that knows Litestar is here.

Its request, guard, signature and response objects are bypassed for routes without parameters in their path: they take longer
than all else that this server does for a short request. So dependency injection, guards, response headers and hooks of the
framework do not work in a route; `dispatch` checks keys and methods. Litestar has no ASGI routes with parameters, so those are
ordinary ones.

Errors of the framework (unknown route, wrong method) are written here too, so no body leaks its shape.
"""

from __future__ import annotations

import logging
import re
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from functools import cache
from traceback import clear_frames
from typing import TYPE_CHECKING, Any

import msgspec
import orjson
from litestar import Litestar, Request, Response, asgi, get, post
from litestar.datastructures import State
from litestar.exceptions import HTTPException
from litestar.handlers import BaseRouteHandler
from litestar.response.base import ASGIResponse
from litestar.types import ASGIApp, Receive, Scope, Send

from hybridtei.config import ModelConfig, ServerConfig
from hybridtei.engine.service import EngineService
from hybridtei.errors import HybridTeiError, LoadError, NoKey, Overloaded, anchor_of
from hybridtei.load import default_alias
from hybridtei.observability.metrics import Registry
from hybridtei.observability.tracing import as_handler, recorder_for
from hybridtei.server import invocations
from hybridtei.server.api import (
    cohere,
    embed,
    ollama,
    openai,
    ops,
    points,
    predict,
    qdrant_inference,
    rerank,
    scoring,
    search,
    tokens,
)
from hybridtei.server.context import Context, Reply, RequestMetrics
from hybridtei.server.dispatch import FAILED, HttpMiddleware, Work, asgi_handler, form_of, reply_of
from hybridtei.server.http.body import BodyError, Keyless, first_fields
from hybridtei.server.http.connection import REFUSED, ClientDisconnected, Refusals, Unsent
from hybridtei.server.http.security import Authenticator, Keyring, certificate_of, check_key
from hybridtei.server.http.writers import encode
from hybridtei.server.openapi import document
from hybridtei.server.registry import Models, StoreBounds
from hybridtei.server.routing import ALIASES, ErrorResponse, Route, asks_to_wait, help_link
from hybridtei.server.store_health import StoreHealth
from hybridtei.server.vectors import ranges_in
from hybridtei.system.machine import install_command

if TYPE_CHECKING:
    from hybridtei.rpc.server import RpcServer
    from hybridtei.store.collection import CollectionSchemas

log = logging.getLogger(__name__)

PLAIN_HOST = re.compile(rb"[A-Za-z0-9.-]+(:[0-9]{1,5})?")  # of others Litestar's router decides

ROUTES: tuple[Route, ...] = (
    *(*ops.ROUTES, *embed.ROUTES, *openai.ROUTES, *cohere.ROUTES, *ollama.ROUTES, *predict.ROUTES),
    *(*rerank.ROUTES, *scoring.ROUTES, *tokens.ROUTES, *invocations.ROUTES),
    *(*search.ROUTES, *points.ROUTES, *qdrant_inference.ROUTES, *ops.MANAGEMENT_ROUTES),
)


def create_app(
    service: EngineService,
    server: ServerConfig,
    model: ModelConfig | None = None,
    *,
    registry: Registry | None = None,
    schemas: CollectionSchemas | None = None,
) -> Litestar:
    """An ASGI application over one service, which it starts and stops. `registry` should be the one the service counts in."""
    model = model or ModelConfig()
    context = context_for(service, server, model, registry or Registry())
    return create_fleet_app(Models({default_alias(model.model_id): context}), server, schemas=schemas)


def context_for(service: EngineService, server: ServerConfig, model: ModelConfig, registry: Registry) -> Context:
    """The context of a model. Raises LoadError for unreadable quantization ranges."""
    if model.quantization_ranges is not None:
        ranges_in(model.quantization_ranges)  # an unreadable file is an error now, before the server listens
    metrics = RequestMetrics(registry, service.reader.max_input_length)
    return Context(service, server, model, registry, metrics)


def create_fleet_app(
    models: Models,
    server: ServerConfig,
    *,
    on_stop: Sequence[Callable[[], Awaitable[None]]] = (),
    schemas: CollectionSchemas | None = None,
) -> Litestar:
    """An ASGI application over several models, which it starts and stops; `on_stop` comes after. `schemas`: of a vector store,
    which it closes. Raises LoadError."""
    certificate = certificate_of(server)
    recorder = recorder_for(server.otlp_endpoint, server.otlp_service_name)
    authenticator, refusals = Authenticator(Keyring.of(server), models.registry), Refusals(models.registry)
    unsent = Unsent(server.max_unsent_bytes)
    models.registry.observed("hybridtei_unsent_bytes", lambda: unsent.bytes)
    rpc = None
    if server.grpc_port is not None:
        rpc = rpc_server_class()(models, server, recorder, authenticator, unsent=unsent, certificate=certificate)

    health = None if schemas is None else StoreHealth(schemas.store, models.registry)

    async def count(error: Exception, scope: Scope) -> None:
        refusals.count(getattr(error, "limit", None))
        if health is not None:
            health.count(error)
        if isinstance(error, Overloaded) and scope.get("extensions") is not None:
            scope["extensions"][REFUSED] = {}  # type: ignore[index]

    routes = list(ROUTES)
    if server.only_tei_routes:
        routes = [rerank.TEI_ALONE if route is rerank.TEI else route for route in ROUTES if route.is_tei]
    app = Litestar(
        [litestar_route(route, server) for route in routes],
        exception_handlers=dict(HANDLERS),
        after_exception=[count],
        on_startup=[models.start, *(part.start for part in (rpc, health) if part)],
        on_shutdown=[
            *([health.stop] if health else []),
            *([rpc.stop] if rpc else []),
            models.stop,
            *on_stop,
            *([schemas.store.close] if schemas else []),
            *([recorder.close] if recorder else []),
        ],
        state=State(
            {
                **{"models": models, "server": server, "rpc": rpc, "recorder": recorder, "schemas": schemas},
                **{
                    "authenticator": authenticator,
                    "refusals": refusals,
                    "certificate": certificate,
                    "unsent": unsent,
                    "keyless": Keyless(),
                    "openapi": cache(lambda: orjson.dumps(document(routes))),
                    "store_bounds": StoreBounds.of(models),
                },
            }
        ),
        openapi_config=None,
        logging_config=None,
    )
    app.asgi_handler = _with_middleware(_past_the_router(app, routes), routes, server)
    return app


def rpc_server_class() -> type[RpcServer]:
    """What serves gRPC. Raises LoadError where the extra is not installed."""
    try:
        from hybridtei.rpc.server import RpcServer
    except ImportError as error:
        raise LoadError(f"--grpc-port needs an extra: {install_command('grpc')}: {error}") from None
    return RpcServer


def _with_middleware(app: ASGIApp, routes: Sequence[Route], server: ServerConfig) -> ASGIApp:
    methods: dict[str, set[str]] = defaultdict(set)
    for method, path in [*((route.method, route.path) for route in routes), *ALIASES]:
        methods[path].add(method)
    return HttpMiddleware(
        app,
        server.cors_allow_origin,
        {path: frozenset(names) for path, names in methods.items()},
        below_aliases=not server.only_tei_routes,
        of_process=frozenset(route.path for route in routes if route.role == "manage"),
    )


def _past_the_router(app: Litestar, routes: Sequence[Route]) -> ASGIApp:
    """Litestar's application, but for requests to paths that need no router; it still writes what these raise."""
    framework = app.asgi_handler
    direct = {
        route.path: asgi_handler(route, work_of(route)) for route in routes if route.method == "POST" and "{" not in route.path
    }

    async def handle(scope: Any, receive: Any, send: Any) -> None:
        handler = direct.get(scope["path"]) if scope["type"] == "http" and scope["method"] == "POST" else None
        if handler is None or not has_valid_host(first_fields(scope)):
            await framework(scope, receive, send)
            return
        scope["path_params"] = {}
        try:
            await handler(scope, receive, send)
        except Exception as error:
            scope[FAILED] = error
            await framework(scope, receive, send)

    return handle


def has_valid_host(fields: Mapping[bytes, bytes]) -> bool:
    """Whether Litestar's router would take the `host`, if there is one."""
    host = fields.get(b"host")
    return host is None or PLAIN_HOST.fullmatch(host) is not None


def work_of(route: Route) -> Work:
    """The handler of a route, in a span of its own."""
    return as_handler(route.handler) if route.target == "model" else route.handler


def litestar_route(route: Route, server: ServerConfig) -> BaseRouteHandler:
    """What Litestar serves for a route. Other methods never reach it: see `HttpMiddleware`."""
    waits = asks_to_wait(route, only_tei_routes=server.only_tei_routes)
    errors: Any = error_handlers(route.error, asks_to_wait=waits, has_help=not route.is_tei)
    work = work_of(route)

    async def response_of(scope: Any, receive: Receive) -> ASGIResponse:
        form = form_of(scope)
        if route.method == "POST":
            return _response(*encode((await reply_of(route, work, scope, receive, form)).answer, form))
        if route.role is not None:
            check_key(scope, None)
        content = await route.handler(scope)
        if isinstance(content, Reply):
            return _response(*encode(content.answer, form))
        media_type = [] if content.media_type is None else [(b"content-type", content.media_type.encode())]
        return _response(content.body, [*media_type, *content.headers], content.status)

    if "{" in route.path:

        async def handle_request(request: Request[Any, Any, Any]) -> ASGIResponse:
            return await response_of(request.scope, request.receive)

        handler: Any = get if route.method == "GET" else post
        return handler(route.path, exception_handlers=errors)(handle_request)  # type: ignore[no-any-return]

    async def handle(scope: Scope, receive: Receive, send: Send) -> None:
        await (await response_of(scope, receive))(scope, receive, send)

    return asgi(route.path, copy_scope=False, exception_handlers=errors)(
        handle if route.method == "GET" else asgi_handler(route, work)
    )


def _response(body: bytes, headers: Iterable[tuple[bytes, bytes]], status: int = 200) -> ASGIResponse:
    fields = {name.decode(): value.decode() for name, value in headers}
    response = ASGIResponse(body=body, status_code=status, headers=fields)
    if "content-type" not in fields:
        del response.headers["content-type"]
    return response


CLOSING = (408, 413)  # the rest of the body is not read


def error_handlers(kind: Any, *, asks_to_wait: bool, has_help: bool) -> dict[Any, Any]:
    """Of a route whose errors are of a struct such as `routing.ErrorResponse`; `asks_to_wait`: at capacity; `has_help`: they
    link to the page on errors."""
    handler = error_handler(kind, asks_to_wait=asks_to_wait, has_help=has_help)
    return {
        HybridTeiError: handler,
        NoKey: handler if has_help else no_key,
        BodyError: handler if kind.takes_body_errors else body_error_handler(has_help=has_help),
    }


def error_handler(
    kind: Any, *, asks_to_wait: bool = False, has_help: bool = False
) -> Callable[[Request[Any, Any, Any], Exception], Response[bytes]]:
    """A handler that writes errors as a struct of this kind."""

    def handle(request: Request[Any, Any, Any], error: Exception) -> Response[bytes]:
        if isinstance(error, HybridTeiError):
            log.error("%.1000s (errors.md#%s)", error, anchor_of(error))
        status, body = kind.of(error)
        clear_frames(error.__traceback__)  # they hold the request until garbage is collected, beside the next one
        headers = dict([help_link(error)]) if has_help else {}
        if isinstance(error, BodyError) and status in (*CLOSING, 503):
            headers["connection"] = "close"
        if isinstance(error, NoKey):
            headers["www-authenticate"] = "Bearer"
        if asks_to_wait and isinstance(error, Overloaded):
            headers["retry-after"] = "1"  # seconds, the least that the header can say
        return Response(msgspec.json.encode(body), status_code=status, media_type="application/json", headers=headers)

    return handle


def body_error_handler(*, has_help: bool) -> Callable[[Request[Any, Any, Any], BodyError], Response[str]]:
    """A handler that writes the error of a body as plain text."""

    def handle(request: Request[Any, Any, Any], error: BodyError) -> Response[str]:
        clear_frames(error.__traceback__)
        headers = dict([help_link(error)]) if has_help else {}
        if error.status in CLOSING:
            headers["connection"] = "close"
        return Response(str(error), status_code=error.status, media_type="text/plain", headers=headers)

    return handle


class StatusOnly(Response[bytes]):
    """A response without body and content type."""

    def __init__(self, status_code: int) -> None:
        super().__init__(b"", status_code=status_code)

    def to_asgi_response(self, *args: Any, **kwargs: Any) -> ASGIResponse:
        response = super().to_asgi_response(*args, **kwargs)
        del response.headers["content-type"]
        return response


def framework_error(request: Request[Any, Any, Any], error: HTTPException) -> Response[bytes]:
    """404, 405 …: the status alone; `HttpMiddleware` adds the allowed methods."""
    return StatusOnly(error.status_code)


def no_key(request: Request[Any, Any, Any], error: NoKey) -> Response[bytes]:
    """TEI's 401 is a status alone; the log says what is missing."""
    log.error("%.1000s (errors.md#%s)", error, anchor_of(error))
    return StatusOnly(401)


def unforeseen_error(request: Request[Any, Any, Any], error: Exception) -> Response[bytes]:
    """A defect of ours: the log has its trace, the answer does not."""
    log.critical("unforeseen error on %s", request.scope.get("path"), exc_info=error)
    body = orjson.dumps({"error": f"internal error: {type(error).__name__}", "error_type": "Backend"})
    return Response(body, status_code=500, media_type="application/json")


def client_disconnected(request: Request[Any, Any, Any], error: ClientDisconnected) -> Response[bytes]:
    """The status that nginx logs for a client that disconnected; no client reads it."""
    return StatusOnly(499)


HANDLERS: Mapping[Any, Any] = {
    BodyError: body_error_handler(has_help=False),
    HybridTeiError: error_handler(ErrorResponse),
    HTTPException: framework_error,
    ClientDisconnected: client_disconnected,
    Exception: unforeseen_error,
}
