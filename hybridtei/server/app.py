"""The Litestar application: its routes, their shared state, and the start and stop of models, store
and gRPC server."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from importlib import import_module
from pkgutil import iter_modules
from typing import TYPE_CHECKING, Any

from litestar import Litestar, route
from litestar.handlers import HTTPRouteHandler
from litestar.types import Scope

from hybridtei.config import ModelConfig, ServerConfig
from hybridtei.errors import LoadError, Overloaded, StoreError
from hybridtei.inference.engine.service import EngineService
from hybridtei.limits import (
    MAX_ARRIVING_BYTES,
    MAX_INSIDE_BYTES,
    MAX_KEYLESS_BYTES,
    Bound,
)
from hybridtei.server import api
from hybridtei.server.agents import Agents
from hybridtei.server.answers import Origins
from hybridtei.server.context import Context, RequestMetrics
from hybridtei.server.http.body import REFUSED, too_much_arrives
from hybridtei.server.http.connection import ConnectionLimits
from hybridtei.server.http.security import Keyring, certificate_of
from hybridtei.server.models import STORE_ERRORS, Models, StoreBounds, store_errors
from hybridtei.server.routing import ALLOW, BELOW, HANDLERS, ROUTE, ROUTES, allow_header
from hybridtei.server.serve import HttpRequest, Shared, preflight, serve, too_much_inside
from hybridtei.server.vectors import ranges_in
from hybridtei.system.machine import install_command
from hybridtei.system.metrics import Registry
from hybridtei.system.tracing import Recorder

log = logging.getLogger(__name__)

for _module in iter_modules(api.__path__):
    # The import adds the module's routes to `ROUTES`
    import_module(f"{api.__name__}.{_module.name}")

if TYPE_CHECKING:
    from litestar.plugins import PluginProtocol

    from hybridtei.retrieval.store.base import Store
    from hybridtei.retrieval.store.collection import CollectionSchemas
    from hybridtei.server.grpc.server import RpcServer


def context_for(
    service: EngineService, server: ServerConfig, model: ModelConfig, registry: Registry
) -> Context:
    """The context of a model. Raises LoadError for unreadable quantization ranges."""
    if model.quantization_ranges is not None:
        # So an unreadable file stops the server before it listens
        ranges_in(model.quantization_ranges)
    metrics = RequestMetrics(registry, service.reader.max_input_length)
    return Context(service, server, model, registry, metrics)


async def close_within(store: Store, seconds: float) -> None:
    """Close a store that may have stopped: its engine keeps what it acknowledged, so the server's
    end waits no longer."""
    try:
        async with asyncio.timeout(seconds):
            await store.close()
    except TimeoutError:
        log.warning(
            "%s has not answered for %g s: the server ends without it", store.place, seconds
        )


def create_models_app(
    models: Models,
    server: ServerConfig,
    *,
    on_stop: Sequence[Callable[[], Awaitable[None]]] = (),
    schemas: CollectionSchemas | None = None,
    app: Litestar | None = None,
) -> Litestar:
    """Make the ASGI application. It starts and stops the models; after they stop it runs `on_stop`
    and closes the store of `schemas`. `app`: of `framework`, if it is made already. Raises
    LoadError."""
    certificate = certificate_of(server)
    recorder = (
        None
        if server.otlp_endpoint is None
        else Recorder(server.otlp_endpoint, server.otlp_service_name)
    )
    keys, limits = Keyring.of(server, models.registry), ConnectionLimits(server, models.registry)
    rpc = None
    if server.grpc_port is not None:
        rpc = rpc_server_class()(models, server, recorder, keys, certificate=certificate)
    models.registry.observed(
        "hybridtei_unsent_bytes", lambda: limits.unsent.units + (rpc.unsent.units if rpc else 0)
    )
    of_store = None if schemas is None else store_errors(models.registry)

    async def count(error: Exception, scope: Scope) -> None:
        limit = getattr(error, "limit", None)
        if limit is not None:
            limits.refused(limit)
        if of_store is not None and isinstance(error, StoreError):
            kinds = (
                kind for error_class, kind in STORE_ERRORS.items() if isinstance(error, error_class)
            )
            of_store.add(kind=next(kinds))
        if isinstance(error, Overloaded) and scope.get("extensions") is not None:
            scope["extensions"][REFUSED] = {}  # type: ignore[index]

    agents = Agents()
    # Requests to the store get as many permits as those to a model
    permits = models.default.service.config.max_concurrent_requests
    app = framework(server) if app is None else app
    app.state = Shared(  # type: ignore[assignment]
        server=server,
        models=models,
        schemas=schemas,
        store_bounds=StoreBounds(Bound(permits)),
        keyring=keys,
        arriving=Bound(MAX_ARRIVING_BYTES, too_much_arrives),
        keyless=Bound(MAX_KEYLESS_BYTES, too_much_arrives),
        inside=Bound(MAX_INSIDE_BYTES, too_much_inside),
        origins=Origins(server.cors_allow_origin),
        limits=limits,
        recorder=recorder,
        rpc=rpc,
        certificate=certificate,
        agents=agents,
    )
    app.after_exception.append(count)
    app.on_startup.append(models.start)
    if rpc is not None:
        app.on_startup.append(rpc.start)
        app.on_shutdown.append(rpc.stop)
    app.on_shutdown += [agents.stop, models.stop, *on_stop]
    if schemas is not None:
        app.on_shutdown.append(partial(close_within, schemas.store, server.drain_seconds))
    if recorder is not None:
        app.on_shutdown.append(recorder.close)
    return app


class _Framework(Litestar):
    """Litestar without the plugins for types of pydantic and attrs, which no route uses: importing
    pydantic, if installed, takes a tenth of a second at each start."""

    @staticmethod
    def _get_default_plugins(plugins: list[PluginProtocol]) -> list[PluginProtocol]:
        return plugins


def framework(server: ServerConfig | None = None) -> Litestar:
    """Make the Litestar application with its paths, before it has models.

    Each path of a model is also served below `/m/ALIAS`. Those that manage the process are not:
    they belong to no model, and a proxy can guard them by their single path.
    """
    server = server or ServerConfig()
    methods: dict[str, set[str]] = {}
    handlers: list[HTTPRouteHandler] = []
    two_faced = {path for route in ROUTES if route.only_tei for path in route.paths}
    for entry in ROUTES:
        if server.only_tei_routes and not entry.is_tei:
            continue
        if entry.only_tei != server.as_tei and entry.paths[0] in two_faced:
            continue
        paths = [*entry.paths]
        if not (server.only_tei_routes or entry.role == "manage"):
            paths += [f"{BELOW}{path}" for path in entry.paths]
        for path in paths:
            methods.setdefault(path, set()).update(entry.methods)
        handlers.append(_handler(paths, entry.methods, {ROUTE: entry}, serve))
    # They come first, or Litestar would add its own
    preflights = [
        _handler([path], ["OPTIONS"], {ALLOW: allow_header(verbs)}, preflight)
        for path, verbs in methods.items()
    ]
    return _Framework(
        [*preflights, *handlers],
        exception_handlers=dict(HANDLERS),
        openapi_config=None,
        logging_config=None,
    )


def _handler(
    paths: Sequence[str], methods: Any, options: dict[str, Any], function: Any
) -> HTTPRouteHandler:
    return route(
        paths, http_method=methods, opt=options, status_code=200, request_class=HttpRequest
    )(function)


def rpc_server_class() -> type[RpcServer]:
    """Import the gRPC server. Raises LoadError if the extra is not installed."""
    try:
        from hybridtei.server.grpc.server import RpcServer
    except ImportError as error:
        raise LoadError(f"--grpc-port needs an extra: {install_command('grpc')}: {error}") from None
    return RpcServer
