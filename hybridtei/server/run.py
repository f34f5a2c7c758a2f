"""Run the application under uvicorn until SIGTERM or SIGINT; then finish open requests and exit
with status 0.

When the drain ends, unfinished requests, such as stalled ones, are cut off. On the port of
`--prometheus-port`, for scrapers that must not reach the API, metrics are the only paths.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from math import ceil
from types import FrameType
from typing import TYPE_CHECKING, Any

import uvicorn

from hybridtei.config import ServerConfig
from hybridtei.limits import Bound
from hybridtei.server.http.connection import ConnectionLimits, allow_files
from hybridtei.server.http.protocol import BoundedHttpProtocol
from hybridtei.server.http.security import Certificate, Handshake
from hybridtei.system import memory

if TYPE_CHECKING:
    from hybridtei.server.grpc.server import RpcServer
    from hybridtei.server.serve import Shared


# The number of connections that wait to be accepted
BACKLOG = 2048
# From one look for a dead engine to the next
LOOK_SECONDS = 1.0
METRICS = re.compile(r"(?:/m/[^/]+)?/metrics")
log = logging.getLogger(__name__)


class DrainingServer(uvicorn.Server):
    """uvicorn, but SIGTERM ends it with status 0: uvicorn raises the signal again after the
    shutdown, and exits with -15."""

    def __init__(
        self,
        settings: uvicorn.Config,
        drain_seconds: float,
        rpc: RpcServer | None = None,
        reload: Callable[[], object] | None = None,
        dead: Callable[[], object] = lambda: None,
        *,
        drain_delay: float = 0.0,
        leave: Callable[[], object] = lambda: None,
    ) -> None:
        """`rpc`: the application's gRPC server; both drain together. `reload`: called on SIGHUP;
        None: SIGHUP ends the process.
        `dead`: polled; returns the error that should end the server, or None.
        `leave`: called at the begin of `drain_delay`."""
        super().__init__(settings)
        self._drain_delay, self._leave = drain_delay, leave
        self._dead = dead
        self._drain_seconds = drain_seconds
        self._rpc = rpc
        self._reload = reload

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        handled = (signal.SIGINT, signal.SIGTERM)
        before = {number: signal.signal(number, self.handle_exit) for number in handled}
        if (reload := self._reload) is not None:
            before[signal.SIGHUP] = signal.signal(signal.SIGHUP, lambda *_: reload())
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Handle SIGINT and SIGTERM. uvicorn exits at once at the second Ctrl-C."""
        super().handle_exit(sig, frame)
        if self.force_exit and self._rpc is not None:
            self._rpc.hurry()

    def look(self) -> None:
        """End a server with a dead engine, which would answer 503 until a restart."""
        if self._dead() is not None:
            self.should_exit = True
        else:
            asyncio.get_running_loop().call_later(LOOK_SECONDS, self.look)

    async def startup(self, sockets: Any = None) -> None:
        if self._rpc is not None:
            # A taken port is an error before anything starts
            await self._rpc.bind()
        await super().startup(sockets)
        self.look()
        # Modules and models live until the process ends, so the collector need not visit them
        memory.collect_as_usual()
        # A signal may have arrived during startup
        if self.started and not self.should_exit:
            self.announce()

    def announce(self) -> None:
        """Log that the server is ready."""
        (host, port), *metrics = (server.sockets[0].getsockname()[:2] for server in self.servers)
        log.info(
            "Starting HTTP server: %s:%d", host, port, extra={"facts": {"host": host, "port": port}}
        )
        for address in metrics:
            log.info("Serving metrics: %s:%d", *address)
        log.info("Ready")

    async def _stay(self) -> None:
        """Answer for `drain_delay`, or until a second Ctrl-C."""
        self._leave()
        loop = asyncio.get_running_loop()
        end = loop.time() + self._drain_delay
        while loop.time() < end and not self.force_exit:
            await asyncio.sleep(min(LOOK_SECONDS, end - loop.time()))

    async def shutdown(self, sockets: Any = None) -> None:
        if self._dead() is None and self._drain_delay:
            await self._stay()
        if self._rpc is not None:
            self._rpc.drain()
        end = asyncio.get_running_loop().call_later(self._drain_seconds, self._cut_off)
        try:
            await super().shutdown(sockets)
        finally:
            end.cancel()

    def _cut_off(self) -> None:
        connections = [*self.server_state.connections]
        if connections:
            log.warning("the drain is over: %d connections are cut off", len(connections))
        for connection in connections:
            connection.transport.abort()


def settings_of(
    app: Any,
    config: ServerConfig,
    limits: ConnectionLimits,
    certificate: Certificate | None = None,
    metrics_port: int | None = None,
) -> uvicorn.Config:
    """uvicorn's settings for an application. `metrics_port`: of `only_metrics`, without TLS."""
    settings = uvicorn.Config(
        app if metrics_port is None else only_metrics(app, metrics_port),
        host=config.hostname,
        port=config.port,
        loop="uvloop",
        http=partial(BoundedHttpProtocol, limits=limits),  # type: ignore[arg-type]
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        date_header=True,
        backlog=BACKLOG,
        timeout_keep_alive=config.keep_alive_timeout,
        # A pipelined request starts in the context of the previous one, with that one's key and
        # span
        reset_contextvars=True,
        # A second more, for requests that survive the cut
        timeout_graceful_shutdown=ceil(config.drain_seconds) + 1,
    )
    if certificate is not None:
        handshake = partial(
            Handshake,
            Bound(config.max_connections),
            certificate.accepting(),
            limits,
            metrics_port,
        )
        protocol: Any = settings.http
        # uvicorn calls it for each connection; the handshake makes the protocol once it has ended
        settings.http = lambda **options: handshake(  # type: ignore[assignment]
            partial(protocol, **options)
        )
    return settings


def only_metrics(app: Any, port: int) -> Any:
    """The application, with /metrics and /m/ALIAS/metrics as its only paths on `port`."""

    async def handle(scope: Any, receive: Any, send: Any) -> None:
        is_foreign = not METRICS.fullmatch(scope.get("path", ""))
        if scope["type"] == "http" and scope["server"][1] == port and is_foreign:
            scope = {**scope, "path": "/not-metrics", "raw_path": b"/not-metrics"}
        await app(scope, receive, send)

    return handle


def reloader(state: Shared, config: ServerConfig) -> Callable[[], None] | None:
    """A function that reads the files of keys and certificate again; None without these files."""
    keys = None if config.api_key_file is None else state.keyring
    files = [file for file in (keys, state.certificate) if file is not None]

    def reload() -> None:
        for file in files:
            file.reload()

    return reload if files else None


def run_server(app: Any, config: ServerConfig, sockets: Sequence[socket.socket]) -> None:
    """Serve until a signal. `sockets`: from `connection.ports`. Raises BackendError if the engine
    dies."""
    allow_files(config.max_connections)
    state = app.state
    models = state.models
    metrics_port = None if len(sockets) == 1 else sockets[1].getsockname()[1]
    settings = settings_of(app, config, state.limits, state.certificate, metrics_port)
    server = DrainingServer(
        settings,
        config.drain_seconds,
        state.rpc,
        reload=reloader(state, config),
        dead=lambda: models.dead,
        drain_delay=config.drain_delay,
        leave=partial(setattr, models, "leaving", True),
    )
    # Uvicorn exits like this, after a log entry, if it cannot start
    with suppress(SystemExit):
        server.run([*sockets])
    if not server.started:
        raise OSError("the server could not start; the log says why")
    if models.dead is not None:
        raise models.dead
    if any(context.service.engine.busy for context in models.ready):
        end_at_once()


def end_at_once() -> None:
    """Exit with status 0 while an abandoned pass runs: an ordinary exit runs the library's
    destructors during the pass, and aborts. Does nothing outside the main thread, where the program
    continues."""
    if threading.current_thread() is threading.main_thread():
        logging.shutdown()
        os._exit(0)
