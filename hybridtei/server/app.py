"""The Litestar application: routes, guard, error table, and the engine's life."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from functools import cache
from typing import TYPE_CHECKING

import orjson
from litestar import Litestar
from litestar.datastructures import State
from litestar.types import ASGIApp, Scope

from hybridtei.config import ModelConfig, ServerConfig
from hybridtei.engine.service import EngineService
from hybridtei.errors import LoadError
from hybridtei.load import default_alias
from hybridtei.observability.metrics import Registry
from hybridtei.observability.tracing import recorder_for
from hybridtei.server import invocations
from hybridtei.server.api import (
    classify,
    cohere,
    embed,
    openai,
    ops,
    points,
    qdrant_inference,
    rerank,
    scoring,
    search,
    tagging,
    tokens,
)
from hybridtei.server.api.search import StoreBounds
from hybridtei.server.context import Context, RequestMetrics
from hybridtei.server.dispatch import litestar_route
from hybridtei.server.http.body import Keyless
from hybridtei.server.http.connection import Refusals, Unsent
from hybridtei.server.http.edge import ALIASES, Edge
from hybridtei.server.http.error_responses import HANDLERS
from hybridtei.server.http.security import Authenticator, Keyring, certificate_of
from hybridtei.server.openapi import document
from hybridtei.server.registry import Models
from hybridtei.server.routing import Route
from hybridtei.server.vector_dtypes import ranges_in

if TYPE_CHECKING:
    from hybridtei.rpc.server import RpcServer
    from hybridtei.store.collection import CollectionSchemas


ROUTES: tuple[Route, ...] = (
    *(*ops.ROUTES, *embed.ROUTES, *openai.ROUTES, *cohere.ROUTES, *openai.OLLAMA_ROUTES, *classify.ROUTES, *tagging.ROUTES),
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
    """What handlers need to know of a model."""
    if model.quantization_ranges is not None:
        ranges_in(model.quantization_ranges)  # a file that cannot be read is told now
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

    async def count(error: Exception, scope: Scope) -> None:
        refusals.count(getattr(error, "limit", None))

    routes = [route for route in ROUTES if route.is_tei or not server.only_tei_routes]
    app = Litestar(
        [litestar_route(route) for route in routes],
        exception_handlers=dict(HANDLERS),
        after_exception=[count],
        on_startup=[models.start, *([rpc.start] if rpc else [])],
        on_shutdown=[
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
    app.asgi_handler = _edge(app, routes, server)
    return app


def rpc_server_class() -> type[RpcServer]:
    """What serves gRPC. Raises LoadError where the extra is not installed."""
    try:
        from hybridtei.rpc.server import RpcServer
    except ImportError as error:
        raise LoadError(f"--grpc-port needs an extra, pip install 'hybridtei[grpc]' ({error})") from None
    return RpcServer


def _edge(app: Litestar, routes: Sequence[Route], server: ServerConfig) -> ASGIApp:
    methods: dict[str, set[str]] = defaultdict(set)
    for method, path in [*((route.method, route.path) for route in routes), *ALIASES]:
        methods[path].add(method)
    return Edge(
        app.asgi_handler,
        server.cors_allow_origin,
        {path: frozenset(names) for path, names in methods.items()},
        below_aliases=not server.only_tei_routes,
        of_process=frozenset(route.path for route in routes if route.role == "manage"),
    )
