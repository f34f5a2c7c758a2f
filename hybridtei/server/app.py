"""The Litestar application: routes, guard, error table, and the engine's life."""

from __future__ import annotations

from collections import defaultdict

from litestar import Litestar, Router
from litestar.datastructures import State
from litestar.types import ASGIApp

from hybridtei.config import ModelConfig, ServerConfig
from hybridtei.engine.service import EngineService
from hybridtei.metrics import Registry
from hybridtei.server.auth import require_key
from hybridtei.server.context import Context
from hybridtei.server.edge import Edge
from hybridtei.server.errors import HANDLERS
from hybridtei.server.observe import RequestMetrics
from hybridtei.server.routes import hybrid, openai, ops, tei


def create_app(
    service: EngineService, server: ServerConfig, model: ModelConfig | None = None, *, registry: Registry | None = None
) -> Litestar:
    """An ASGI application over a service, which it starts and stops. `registry` should be the one the service counts in."""
    registry = registry or Registry()
    metrics = RequestMetrics(registry, service.model.reader.max_input_length)
    context = Context(service, server, model or ModelConfig(), registry, metrics)
    guarded = Router("/", route_handlers=[*tei.ROUTES, *openai.ROUTES, *hybrid.ROUTES, ops.info], guards=[require_key])
    app = Litestar(
        [guarded, *ops.PUBLIC],
        exception_handlers=dict(HANDLERS),
        on_startup=[service.start],
        on_shutdown=[service.stop],
        state=State({"context": context}),
        openapi_config=None,
        logging_config=None,
    )
    app.asgi_handler = _edge(app, server)
    return app


def _edge(app: Litestar, server: ServerConfig) -> ASGIApp:
    methods: dict[str, set[str]] = defaultdict(set)
    for route in app.routes:
        for handler in getattr(route, "route_handlers", ()):
            methods[route.path] |= set(handler.http_methods)
    return Edge(app.asgi_handler, server.cors_allow_origin, {path: frozenset(names) for path, names in methods.items()})
