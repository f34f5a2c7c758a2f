"""Start a server from settings: one model, or several models that share devices in one process.

A thread imports the HTTP modules and makes the routes (a third of a second of Python) while the
runtime, in C++, packs the model's weights. So functions of this module import HTTP modules locally.
"""

from __future__ import annotations

import asyncio
import gc
import ipaddress
import logging
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any, TypeVar, cast

from msgspec.structs import replace

from hybridtei import __version__
from hybridtei.config import EngineConfig, ModelConfig, NamedModel, ServerConfig, StoreConfig
from hybridtei.errors import BackendError, HybridTeiError, LoadError, UsageError
from hybridtei.inference.backends.select import may_use_gpu
from hybridtei.inference.engine.chunks import permits_for
from hybridtei.inference.engine.device import STOP_SECONDS, Device
from hybridtei.inference.engine.service import EngineService
from hybridtei.inference.load import LoadedModel, default_alias, load_model
from hybridtei.server.http.connection import ports
from hybridtei.system.machine import LaneKind
from hybridtei.system.metrics import Registry

if TYPE_CHECKING:
    from litestar import Litestar

    from hybridtei.client import AsyncClient
    from hybridtei.retrieval.store.collection import CollectionSchemas
    from hybridtei.server.context import Context
    from hybridtei.server.engine_process import EngineProcess, RemoteEngine


log = logging.getLogger(__name__)


class ModelLoader:
    """The engine settings and devices that the models of a server share, and the engine's process
    if there is one.
    `fixed_permits`: as for `serve`."""

    def __init__(
        self,
        engine: EngineConfig,
        *,
        fixed_permits: bool = True,
        process: EngineProcess | None = None,
    ) -> None:
        self.engine = engine
        self._fixed_permits = fixed_permits
        self._process = process
        self._devices: dict[tuple[LaneKind, ...], Device] = {}

    def load(self, config: ModelConfig) -> tuple[LoadedModel, RemoteEngine | None]:
        """Load a model here or in the engine's process, and log the choices made for it. Raises
        LoadError."""
        remote: RemoteEngine | None = None
        if self._process is None:
            loaded = load_model(config, self.engine)
        else:
            loaded, remote = self._process.load(config)
        for line, facts in zip(loaded.summary(), loaded.facts(), strict=True):
            log.info("%s", line, extra={"facts": facts})
        prompt_name = loaded.model.reader.prompts.own
        if prompt_name is not None:
            log.info(
                "prompt   `%s`, the checkpoint's default, which TEI's routes use only with "
                "--use-default-prompt",
                prompt_name,
                extra={"facts": {"default_prompt_name": prompt_name}},
            )
        return loaded, remote

    def context(
        self,
        loaded: LoadedModel,
        remote: RemoteEngine | None,
        server: ServerConfig,
        config: ModelConfig,
    ) -> Context:
        """Put a loaded model behind an engine: `remote`, or one on the device that models with the
        same lanes share."""
        from hybridtei.server.app import context_for

        registry = Registry() if remote is None else remote.registry
        engine = self.engine
        # The default follows the hardware
        if not self._fixed_permits:
            permits = permits_for(
                engine.max_concurrent_requests, loaded.backend, loaded.budget_tokens
            )
            engine = replace(engine, max_concurrent_requests=permits)
        service = EngineService(
            loaded.model,
            loaded.backend,
            engine,
            budget_tokens=loaded.budget_tokens,
            registry=registry,
            device=self.device(loaded.backend.lanes) if remote is None else None,
            engine=remote,
        )
        return context_for(service, server, config, registry)

    async def stop(self) -> None:
        """Stop the lanes. Call it after the services have stopped."""
        for device in self._devices.values():
            await asyncio.to_thread(device.stop, STOP_SECONDS)
        if self._process is not None:
            await asyncio.to_thread(self._process.close)

    def device(self, lanes: tuple[LaneKind, ...]) -> Device:
        """The running device of these lanes."""
        if lanes not in self._devices:
            self._devices[lanes] = Device(
                lanes,
                bulk_niceness=self.engine.bulk_niceness,
                pass_timeout=self.engine.pass_timeout,
            )
            self._devices[lanes].start()
        return self._devices[lanes]

    @property
    def dead(self) -> BackendError | None:
        """The error that ended a lane; None while all lanes run."""
        return next(
            (device.dead for device in self._devices.values() if device.dead is not None), None
        )


@contextmanager
def _engine_process(
    server: ServerConfig, engine: EngineConfig, models: Sequence[ModelConfig]
) -> Iterator[EngineProcess | None]:
    """Yield the engine's process, not started yet; None if the engine runs in this process.

    By default it exists if a GPU may be used, or the models leave the memory when idle. Python
    launches a GPU pass by some hundred calls; each releases the GIL, and then waits for it while
    the event loop is busy.
    """
    has_process = server.engine_process
    if has_process is None:
        has_process = server.idle_unload > 0 or any(map(may_use_gpu, models))
    if server.idle_unload and not has_process:
        raise UsageError("--idle-unload needs the engine's process: leave --engine-process out")
    if not has_process:
        yield None
        return
    from hybridtei.server.engine_process import EngineProcess

    is_json = server.json_output or server.log_format == "json"
    process = EngineProcess(
        engine,
        {"json_output": is_json, "level": server.log_level, "spans": not server.disable_spans},
        server.idle_unload,
    )
    try:
        yield process
    finally:
        process.close()


def serve(
    configs: Sequence[ModelConfig],
    engine: EngineConfig,
    server: ServerConfig,
    store: StoreConfig | None = None,
    flags: ModelConfig | None = None,
    *,
    fixed_permits: bool = True,
) -> None:
    """Serve models until a signal; one that does not load leaves the others serving.

    `configs`: one `ModelConfig`, which accepts every model name; or `NamedModel`s, and more can be
    loaded at run time. `flags`: default settings of models loaded later. `fixed_permits`: the user
    chose `max_concurrent_requests`, so the hardware does not change it. Raises LoadError if no
    model loads; UsageError, StoreError, OSError.
    """
    application: Future[Litestar] = Future()
    threading.Thread(
        target=_make_app, args=(server, application), name="imports", daemon=True
    ).start()
    with (
        _checked(server, store) as (schemas, sockets),
        _engine_process(server, engine, configs) as process,
    ):
        loader = ModelLoader(engine, fixed_permits=fixed_permits, process=process)
        contexts: dict[str, Context] = {}
        failures: dict[str, LoadError] = {}
        for config in configs:
            alias = (
                config.alias if isinstance(config, NamedModel) else default_alias(config.model_id)
            )
            log.info("hybridtei %s: loading %s as %s", __version__, config.model_id, alias)
            try:
                contexts[alias] = loader.context(*loader.load(config), server, config)
            except LoadError as error:
                if len(configs) == 1:
                    raise
                log.error("%s is not served: %s", alias, error)
                failures[alias] = error
        if not contexts:
            raise next(iter(failures.values()))

        async def opener(config: NamedModel) -> Context:
            # In a thread, so that the other models still answer
            loaded, remote = await on_thread(loader.load, config)
            context = loader.context(loaded, remote, server, config)
            await context.service.start()
            return context

        from hybridtei.server.app import create_models_app
        from hybridtei.server.models import Entry, Models
        from hybridtei.server.run import run_server

        models = Models(contexts, opener if isinstance(configs[0], NamedModel) else None, flags)
        models.entries |= {
            alias: Entry(alias, "failed", error=str(error)) for alias, error in failures.items()
        }
        app = create_models_app(
            models, server, on_stop=[loader.stop], schemas=schemas, app=application.result()
        )
        run_server(app, server, sockets)


@asynccontextmanager
async def in_process(
    configs: Sequence[ModelConfig], engine: EngineConfig, store: StoreConfig
) -> AsyncIterator[AsyncClient]:
    """Load models, and yield a client of an in-process server without a socket. Raises LoadError,
    StoreError."""
    import httpx

    from hybridtei.asking import IN_PROCESS
    from hybridtei.client import AsyncClient
    from hybridtei.server.app import create_models_app
    from hybridtei.server.models import Models

    loader, server = ModelLoader(engine, fixed_permits=False), ServerConfig()
    contexts = {
        default_alias(config.model_id): loader.context(*loader.load(config), server, config)
        for config in configs
    }
    app = create_models_app(
        Models(contexts), server, on_stop=[loader.stop], schemas=_schemas(store, server)
    )
    transport = httpx.ASGITransport(cast(Any, app))
    errors_of_server = logging.getLogger("hybridtei.server")
    level = errors_of_server.level
    # The client raises errors itself
    errors_of_server.setLevel(logging.CRITICAL)
    failure: HybridTeiError | None = None
    try:
        async with app.lifespan(), AsyncClient(IN_PROCESS, transport=transport) as client:
            try:
                yield client
            except HybridTeiError as error:
                # Raised here, Litestar would put it into a group
                failure = error
    finally:
        errors_of_server.setLevel(level)
    if failure is not None:
        raise failure


@contextmanager
def _checked(
    server: ServerConfig, store: StoreConfig | None
) -> Iterator[tuple[CollectionSchemas | None, list[socket.socket]]]:
    """Check keys, certificate, gRPC, store and ports before a model is loaded. Yield the store's
    schemas and the sockets.

    Raises UsageError, LoadError, StoreError, OSError.
    """
    if server.api_key_file is not None or server.certfile is not None:
        from hybridtei.server.http.security import Keyring, certificate_of

        Keyring.of(server)
        certificate_of(server)
    if server.grpc_port is not None:
        from hybridtei.server.app import rpc_server_class

        rpc_server_class()
    schemas = _schemas(store, server)
    with ports(server) as sockets:
        yield schemas, sockets


def _make_app(server: ServerConfig, application: Future[Litestar]) -> None:
    try:
        import_module("hybridtei.server.run")
        application.set_result(import_module("hybridtei.server.app").framework(server))
    except BaseException as error:
        # The main thread raises it
        application.set_exception(error)
    # Modules live until the process ends, so the collector need not visit them
    gc.freeze()


def _schemas(store: StoreConfig | None, server: ServerConfig) -> CollectionSchemas | None:
    """The schemas of the vector store, if the settings name one. Raises UsageError, LoadError,
    StoreError."""
    from hybridtei.retrieval.store import open_store

    if store is None or server.only_tei_routes:
        return None
    opened = open_store(store, patient=False)
    from hybridtei.retrieval.store.collection import CollectionSchemas

    _warn_if_open(server)
    # The first search would import these on the event loop, for a quarter of a second
    for name in ("search.searcher", "store.query"):
        import_module(f"hybridtei.retrieval.{name}")
    return CollectionSchemas(opened)


def _warn_if_open(server: ServerConfig) -> None:
    if (
        server.api_key is None
        and server.api_key_file is None
        and not ipaddress.ip_address(server.hostname).is_loopback
    ):
        log.warning(
            "no --api-key, and the server listens on %s: EVERY client may read and change the "
            "vector store, and web pages may read it; set a key, or listen on --hostname 127.0.0.1",
            server.hostname,
        )


T = TypeVar("T")


async def on_thread(work: Callable[..., T], *arguments: Any) -> T:
    """Run `work` in a daemon thread: the process can end while it runs, and cancelling the caller
    does not stop it."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    # On the event loop: the caller may have been cancelled meanwhile
    def settle(setter: Callable[[Any], object], value: Any) -> None:
        if not done.done():
            setter(value)

    def run() -> None:
        try:
            callback = partial(settle, done.set_result, work(*arguments))
        except BaseException as error:
            # The caller raises it
            callback = partial(settle, done.set_exception, error)
        # Raised if the event loop is closed
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(callback)

    threading.Thread(
        target=run, name=f"aside-{getattr(work, '__name__', 'work')}", daemon=True
    ).start()
    return await done
