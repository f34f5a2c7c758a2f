"""The Litestar application: routes, guard, error table, and the engine's life."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence

from litestar import Litestar, Router
from litestar.datastructures import State
from litestar.routes import ASGIRoute
from litestar.types import ASGIApp

from hybridtei.config import ModelConfig, ServerConfig
from hybridtei.engine.service import EngineService
from hybridtei.metrics import Registry
from hybridtei.model_list import default_alias
from hybridtei.server.auth import require_key
from hybridtei.server.context import Context
from hybridtei.server.edge import ALIASES, Edge
from hybridtei.server.errors import HANDLERS
from hybridtei.server.models import Models
from hybridtei.server.observe import RequestMetrics
from hybridtei.server.quantised import ranges_in
from hybridtei.server.routes import fleet, hybrid, openai, ops, rank, tei


def create_app(
    service: EngineService, server: ServerConfig, model: ModelConfig | None = None, *, registry: Registry | None = None
) -> Litestar:
    """An ASGI application over one service, which it starts and stops. `registry` should be the one the service counts in."""
    model = model or ModelConfig()
    context = context_for(service, server, model, registry or Registry())
    return create_fleet_app(Models({default_alias(model.model_id): context}), server)


def context_for(service: EngineService, server: ServerConfig, model: ModelConfig, registry: Registry) -> Context:
    """What handlers need to know of a model."""
    if model.quantization_ranges is not None:
        ranges_in(model.quantization_ranges)  # a file that cannot be read is told now
    metrics = RequestMetrics(registry, service.model.reader.max_input_length)
    return Context(service, server, model, registry, metrics)


def create_fleet_app(
    models: Models, server: ServerConfig, *, on_stop: Sequence[Callable[[], Awaitable[None]]] = ()
) -> Litestar:
    """An ASGI application over several models, which it starts and stops; `on_stop` comes after."""
    guarded = Router("/", route_handlers=[*ops.GUARDED], guards=[require_key])
    app = Litestar(
        [*tei.ROUTES, *openai.ROUTES, *hybrid.ROUTES, *rank.ROUTES, *fleet.ROUTES, guarded, *ops.PUBLIC],
        exception_handlers=dict(HANDLERS),
        on_startup=[models.start],
        on_shutdown=[models.stop, *on_stop],
        state=State({"models": models, "server": server}),
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
        if isinstance(route, ASGIRoute):  # see `serve.posted`
            methods[route.path].add("POST")
    for method, path in ALIASES:
        methods[path].add(method)
    return Edge(app.asgi_handler, server.cors_allow_origin, {path: frozenset(names) for path, names in methods.items()})
